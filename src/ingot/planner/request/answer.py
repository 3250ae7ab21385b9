"""From a question to ranked plans: the run that follows from the rules, and the layouts that a search finds for it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.config import from_dict, to_dict
from ingot.errors import ConfigError
from ingot.planner.predict.memory.peak_memory import rank_memory_bytes
from ingot.planner.request.plan_html import as_html
from ingot.planner.request.plan_text import as_text, wrapped
from ingot.planner.request.project import require_executable, write_plan
from ingot.planner.request.question import Question, base_run, plan_of
from ingot.planner.run.outlook import Assumptions
from ingot.planner.run.outlook_advice import loses_time
from ingot.planner.run.plan import Planned
from ingot.planner.search.context import with_context
from ingot.planner.search.search import Candidate, Found, search
from ingot.planner.show.explain import explain
from ingot.planner.show.notes import double_discount
from ingot.planner.show.recipe import recipe_lines
from ingot.planner.show.runners_up import Story
from ingot.schema.nearest import divisors, nearest
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.theory.layout import layout_problems
from ingot.units import format_seconds

# Layouts that a search is asked for: those that are shown, and runners-up to tell of.
_SEEN = 60
_DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_WHOLE_TRAINING_SECONDS = 3 * 86400.0


@dataclass(frozen=True, kw_only=True)
class Planning:
    """plans: best first; where nothing fits, the one layout that needs least memory. found: what the search saw, None
    where none was made: on a CPU, and of a run file. question: None of a run file."""

    plans: tuple[Planned, ...]
    found: Found | None = None
    question: Question | None = None

    @property
    def best(self) -> Planned:
        return self.plans[0]

    @property
    def fits(self) -> bool:
        plan = self.best.plan
        return plan.total_memory_bytes <= rank_memory_bytes(plan.cluster, self.best.run.parallel.world_size)

    @property
    def fix(self) -> str:
        """The cheapest change with which a layout would fit, "" where one does or none was found."""
        return "" if self.fits or not self.found else self.found.fix

    @property
    def why_not_executed(self) -> str:
        """Why ingot's trainer cannot execute the best plan, "" where it can."""
        try:
            require_executable(self.best)
        except ConfigError as error:
            return f"{error.found}; {error.rule}"
        return ""

    @property
    def texts(self) -> str:
        """Why usual texts say other days and dollars of a bare size, "" where they have nothing on it: they are about
        whole trainings."""
        parameters = self.question.subject.parameters if self.question else 0
        told = parameters and self.best.plan.total_seconds > _WHOLE_TRAINING_SECONDS
        return double_discount(self.best.plan, self.best.run, parameters) if told else ""

    def explain(self, topic: str) -> list[str]:
        """Lines about "mem", "time", "comms", "bubble", "lr" or "batch" of the best plan. Raises UsageError."""
        return explain(topic, self.best)

    def recipe(self) -> list[str]:
        """The layout of the best plan, told in order: each choice with its reason, its formula and the runner-up. Of a
        run file, or on a CPU, the search is made now. Raises ConfigError where nothing fits."""
        if not self.fits:
            raise ConfigError("no layout fits", rule="a recipe is told of a layout that can be run", fix=self.fix)
        best, pinned = self.best, self.question.pinned if self.question else {}
        found = self.found or search(best.run, best.plan.cluster, best.plan.software, limit=_SEEN)
        story = Story(planned=best, found=found, pinned=pinned)
        return [part for line in recipe_lines(story) for part in wrapped(line)]

    def facts(self) -> dict:
        """All of it as plain values, for JSON."""
        best = self.best
        facts: dict = {"run": to_dict(best.run), "plan": to_dict(best.plan), "reasons": best.reasons, "fits": self.fits}
        facts |= {"why_not_executed": self.why_not_executed, "texts": self.texts}
        if self.found:
            names = ("considered", "fitting", "seconds", "fix", "idle")
            facts["search"] = {name: getattr(self.found, name) for name in names}
            facts["layouts"] = [_layout_facts(planned) for planned in self.plans]
        return facts

    def write(self, path: str | Path, *, force: bool = False) -> Path:
        """The run file of the best plan, and plan.json beside it, whose path is returned. Raises UsageError where the
        file exists, ConfigError where the trainer cannot execute the plan."""
        return write_plan(Path(path), self.best, force=force)

    def __str__(self) -> str:
        return "\n".join(as_text(self))

    def _repr_html_(self) -> str:
        return as_html(self)


def answer(question: Question) -> Planning:
    """Raises ConfigError where a pin has no such name, or pins allow no layout."""
    run, reasons = base_run(question)
    if question.cluster.device == "cpu" and not question.pinned:
        return Planning(plans=(planned_of(question, run, reasons),), question=question)
    _require_legal(run, question)
    limit = max(question.top, _SEEN)
    found = search(run, question.cluster, question.software, pinned=question.pinned, limit=limit)
    candidates = found.best[: question.top] or ((found.nearest,) if found.nearest else ())
    if not candidates:
        raise _no_layout(run, question, found)
    plans = tuple(
        planned_of(question, candidate.run, reasons | _why(candidate, question, found)) for candidate in candidates
    )
    return Planning(plans=plans, found=found, question=question)


def _layout_facts(planned: Planned) -> dict:
    """Of one ranked layout: what tells it from the others."""
    plan, outlook = planned.plan, planned.plan.outlook
    return {
        "parallel": to_dict(planned.run.parallel),
        "micro_batch": planned.run.train.micro_batch,
        "memory_bytes": plan.total_memory_bytes,
        "step_seconds": plan.step_seconds,
        "mfu": plan.mfu,
        "hfu": plan.hfu,
        "tokens": plan.steps * plan.tokens_per_step,
        "bubble": plan.bubble,
        "exposed_seconds": sum(line.exposed_seconds for line in plan.communication.values()),
        "days": outlook.days if outlook else None,
        "productive_days": outlook.productive_days if outlook else None,
        "usd": plan.usd,
        "usd_with_failures": sum(outlook.usd_by_kind.values()) if outlook else None,
    }


def planned_of(question: Question, run: RunConfig, reasons: dict[str, str]) -> Planned:
    """The plan of a run with its layout. Its run file saves as often as failures ask for, or as rules do where that is
    more often and costs little; the plan counts what the file says."""
    run, context = with_context(run, question.cluster)
    plan, reasons = plan_of(question, run), reasons | context
    if plan.outlook:
        every = plan.outlook.checkpoint_every_seconds
        steps = max(min(round(every / plan.step_seconds), run.train.steps), 1)
        kept = plan_of(replace(question, assumptions=assumptions_of(question, run)), run)
        if steps >= run.checkpoint.every_steps and kept.outlook and not loses_time(kept.outlook, plan.outlook):
            return Planned(run=run, plan=kept, reasons=reasons)
        run = replace(run, checkpoint=replace(run.checkpoint, every_steps=steps))
        reasons["checkpoint.every_steps"] = f"every {format_seconds(every)}, by the failures to expect (Daly 2006)"
    return Planned(run=run, plan=plan, reasons=reasons)


def assumptions_of(question: Question, run: RunConfig) -> Assumptions:
    """Of a whole run: with the checkpoints of its file, unless their interval is assumed."""
    given = question.assumptions
    if given.checkpoint_every_seconds or given.checkpoint_every_steps:
        return given
    return replace(given, checkpoint_every_steps=run.checkpoint.every_steps)


def _why(candidate: Candidate, question: Question, found: Found) -> dict[str, str]:
    """Of each setting of the layout that is not as it is by itself."""
    default, parallel = Parallel(), candidate.run.parallel
    place = found.best.index(candidate) if candidate in found.best else 0
    rank = "the fastest" if not place else f"number {place + 1}"
    why = f"{rank} of {found.considered:,} layouts on {question.cluster.name}"
    why = (
        why if found.best else f"needs least memory of {found.considered:,} layouts; none fits {question.cluster.name}"
    )
    chosen = [name for name in vars(default) if getattr(parallel, name) != getattr(default, name)]
    reasons = {f"parallel.{name}": "as asked for" if name in question.pinned else why for name in chosen}
    return reasons | {"train.micro_batch": "as asked for" if "micro_batch" in question.pinned else why}


def _no_layout(run: RunConfig, question: Question, found: Found) -> ConfigError:
    """Why a search came back without any layout, where no single pin is to blame."""
    tried = _pinned_run(run, question)
    problems = [f"{key}: {message}" for key, message in layout_problems(tried)] if tried else []
    return ConfigError(
        "\n".join(problems) or "no layout is legal", rule="a layout divides model and batch", fix=found.fix
    )


def _require_legal(run: RunConfig, question: Question) -> None:
    """Refuse pins that no layout can have, before a search for one."""
    _require_values(question.pinned)
    _require_devices(question)
    _require_micro_batch(run, question.pinned.get("micro_batch", 1))
    if tried := _pinned_run(run, question):
        mine = {f"parallel.{name}" for name in question.pinned}
        if problems := [f"{key}: {message}" for key, message in layout_problems(tried) if key in mine]:
            raise ConfigError(
                "\n".join(problems), rule="a layout divides model and batch", fix="use a legal value, or leave the pin"
            )


def _require_values(pinned: Mapping[str, object]) -> None:
    """Of the right type, and one of the words that there are. Names that there are not the search tells."""
    known = {name: value for name, value in pinned.items() if name in vars(Parallel())}
    try:
        from_dict(Parallel, known, where=lambda key: "pinned")
    except ConfigError as error:
        raise ConfigError(error.found, rule="what a run file may have in [parallel]", fix="use a legal value") from None


def _require_devices(question: Question) -> None:
    devices, pinned = question.cluster.devices, question.pinned
    degrees = {name: int(str(pinned[name])) for name in _DEGREES if name in pinned}
    product = math.prod(degrees.values())
    if devices % product:
        shown = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        shown += f" = {product}" if len(degrees) > 1 else ""
        raise ConfigError(
            f"{shown} does not divide the {devices:,} devices of {question.cluster.name}",
            rule="every device has a place in the mesh",
            fix=f"use {nearest(product, divisors(devices))}",
        )


def _require_micro_batch(run: RunConfig, size: object) -> None:
    batch = run.train.global_batch
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"pinned micro_batch = {size!r}", rule="a whole number of at least 1", fix="use 1 or more")
    if batch % size:
        found = f"micro_batch {size} does not divide the global batch of {batch:,}"
        raise ConfigError(found, rule="equal parts", fix=f"use {nearest(size, divisors(batch))}")


def _pinned_run(run: RunConfig, question: Question) -> RunConfig | None:
    """With the pins, and the ranks that are left sharing the batch. None where a pin has no such name, which the search
    tells."""
    pinned = dict(question.pinned)
    micro_batch = int(str(pinned.pop("micro_batch", 1)))
    if any(name not in vars(run.parallel) for name in pinned):
        return None
    product = math.prod(int(str(pinned.get(name, 1))) for name in _DEGREES)
    if "dp_shard" not in pinned:
        pinned["dp_shard"] = question.cluster.devices // product
    parallel = replace(Parallel(), **pinned)  # type: ignore[arg-type]
    return replace(run, parallel=parallel, train=replace(run.train, micro_batch=micro_batch))
