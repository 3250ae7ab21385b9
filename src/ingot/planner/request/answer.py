"""Answers to plan requests: ranked plans of a run whose settings follow from rules and whose layouts a search finds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.config import from_dict
from ingot.errors import ConfigError
from ingot.planner.request.plan_request import PlanRequest, base_run, plan_of
from ingot.planner.run.advice import loses_time
from ingot.planner.run.outlook import Assumptions
from ingot.planner.run.plan import PlannedRun, RankedPlans, write_plan
from ingot.planner.search.search import Candidate, Found, search
from ingot.planner.search.space import with_context
from ingot.planner.show.alternatives import DecisionContext
from ingot.planner.show.decisions import decision_lines
from ingot.planner.show.explain import explain
from ingot.planner.show.plans import plans_html, plans_text, wrapped
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.theory.layout import layout_problems
from ingot.theory.rules.nearest import divisors, nearest
from ingot.units import format_seconds

# The number of layouts that a search returns: the plans to show, and their runners-up.
_SEARCHED = 60
_DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class PlanResult(RankedPlans):
    """Ranked plans that can be printed, shown as a table in a notebook, explained, and written as a run file."""

    def explain(self, topic: str) -> list[str]:
        """Return lines that explain the best plan's "mem", "time", "comms", "bubble", "lr" or "batch".

        Raises UsageError for another topic.
        """
        return explain(topic, self.best)

    def recipe(self) -> list[str]:
        """Return the decisions of the best plan in order, each with its reason, its formula and the runner-up.

        If the plan was made without a search (run file, CPU), a search runs now. Raises ConfigError if no layout fits.
        """
        if not self.fits:
            raise ConfigError(
                "E-LAYOUT-FIT",
                "no layout fits in memory",
                rule="--explain recipe describes a layout that fits",
                fix=self.fix,
                cluster=self.best.plan.cluster.name,
            )
        best = self.best
        found = self.search_result or search(best.run, best.plan.cluster, best.plan.software, limit=_SEARCHED)
        context = DecisionContext(planned=best, search_result=found, pinned=self.pinned)
        return [part for line in decision_lines(context) for part in wrapped(line)]

    def write(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the best plan's run file to `path`, and plan.json to the same folder; return the path of plan.json.

        force: overwrite an existing run file. Raises UsageError if the run file exists, ConfigError if the trainer
        cannot execute the plan.
        """
        return write_plan(Path(path), self.best, force=force)

    def __str__(self) -> str:
        return "\n".join(plans_text(self))

    def _repr_html_(self) -> str:
        return plans_html(self)


def answer(request: PlanRequest) -> PlanResult:
    """Return the ranked plans for a request. Raises ConfigError if a pinned setting is unknown, or if no layout has
    all pinned settings."""
    run, reasons = base_run(request)
    model = {"parameters": request.model.parameters, "shape": request.model.shape, "pinned": request.pinned}
    if request.cluster.device == "cpu" and not request.pinned:
        return PlanResult(plans=(planned_of(request, run, reasons),), **model)
    _require_legal(run, request)
    limit = max(request.top, _SEARCHED)
    found = search(run, request.cluster, request.software, pinned=request.pinned, limit=limit)
    candidates = found.best[: request.top] or ((found.nearest,) if found.nearest else ())
    if not candidates:
        raise _no_layout(run, request, found)
    plans = tuple(
        planned_of(request, candidate.run, reasons | _why(candidate, request, found)) for candidate in candidates
    )
    return PlanResult(plans=plans, search_result=found, **model)


def planned_of(request: PlanRequest, run: RunConfig, reasons: dict[str, str]) -> PlannedRun:
    """Return the plan of a run that has a layout.

    Its checkpoint interval is the best one for the expected failures. The interval that `run` already has is kept
    instead if it is shorter or equal and costs little time.
    """
    run, context = with_context(run, request.cluster)
    plan, reasons = plan_of(request, run), reasons | context
    if plan.outlook:
        every = plan.outlook.checkpoint_every_seconds
        steps = max(min(round(every / plan.step_seconds), run.train.steps), 1)
        kept = plan_of(replace(request, assumptions=assumptions_of(request, run)), run)
        if (
            steps >= run.checkpoint.interval.in_steps(plan.step_seconds)
            and kept.outlook
            and not loses_time(kept.outlook, plan.outlook)
        ):
            return PlannedRun(run=run, plan=kept, reasons=reasons)
        run = replace(run, checkpoint=replace(run.checkpoint, every="", every_steps=steps))
        reasons["checkpoint.every_steps"] = f"every {format_seconds(every)}, best for the expected failures (Daly 2006)"
    return PlannedRun(run=run, plan=plan, reasons=reasons)


def assumptions_of(request: PlanRequest, run: RunConfig) -> Assumptions:
    """Return the request's assumptions, with the run's checkpoint interval if they do not set one themselves."""
    return request.assumptions.with_interval_of(run)


def _why(candidate: Candidate, request: PlanRequest, found: Found) -> dict[str, str]:
    """Return the reason for each layout setting that differs from its default, by its key in the run file."""
    default, parallel = Parallel(), candidate.run.parallel
    place = found.best.index(candidate) if candidate in found.best else 0
    rank = "the fastest" if not place else f"number {place + 1}"
    why = f"{rank} of {found.considered:,} layouts on {request.cluster.name}"
    least = f"needs the least memory of {found.considered:,} layouts; none fits {request.cluster.name}"
    why = why if found.best else least
    chosen = [name for name in vars(default) if getattr(parallel, name) != getattr(default, name)]
    reasons = {f"parallel.{name}": "as asked for" if name in request.pinned else why for name in chosen}
    return reasons | {"train.micro_batch": "as asked for" if "micro_batch" in request.pinned else why}


def _no_layout(run: RunConfig, request: PlanRequest, found: Found) -> ConfigError:
    """Return the error for a search that found no legal layout although no single pinned setting is the cause."""
    tried = _pinned_run(run, request)
    problems = [f"{key}: {message}" for key, message in layout_problems(tried)] if tried else []
    return ConfigError(
        "E-LAYOUT-NONE",
        "\n".join(problems) or "no layout is legal",
        rule="a layout divides model and batch into equal parts",
        fix=found.fix,
        problems=problems,
    )


def _require_legal(run: RunConfig, request: PlanRequest) -> None:
    """Raise ConfigError, before any search, if no layout can have the pinned settings."""
    _require_values(request.pinned)
    _require_devices(request)
    _require_micro_batch(run, request.pinned.get("micro_batch", 1))
    if tried := _pinned_run(run, request):
        mine = {f"parallel.{name}" for name in request.pinned}
        if problems := [f"{key}: {message}" for key, message in layout_problems(tried) if key in mine]:
            raise ConfigError(
                "E-PIN-LAYOUT",
                "\n".join(problems),
                rule="a layout divides model and batch into equal parts",
                fix="use a legal value, or remove the pin",
                problems=problems,
            )


def _require_values(pinned: Mapping[str, object]) -> None:
    """Raise ConfigError if a pinned setting has a wrong type or value. The search reports unknown names."""
    known = {name: value for name, value in pinned.items() if name in vars(Parallel())}
    try:
        from_dict(Parallel, known, where=lambda key: "pinned")
    except ConfigError as error:
        raise ConfigError(
            "E-PIN-VALUE",
            error.found,
            rule="a pin has a legal value of [parallel] in a run file",
            fix="use a legal value",
            pins=[f"{name}={value}" for name, value in known.items()],
        ) from None


def _require_devices(request: PlanRequest) -> None:
    devices, pinned = request.cluster.devices, request.pinned
    degrees = {name: int(str(pinned[name])) for name in _DEGREES if name in pinned}
    product = math.prod(degrees.values())
    if devices % product:
        shown = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        shown += f" = {product}" if len(degrees) > 1 else ""
        raise ConfigError(
            "E-PIN-DEVICES",
            f"{shown} does not divide the {devices:,} devices of {request.cluster.name}",
            rule="the degrees of a mesh multiply to the number of devices",
            fix=f"use {nearest(product, divisors(devices))}",
            product=product,
            devices=devices,
        )


def _require_micro_batch(run: RunConfig, size: object) -> None:
    batch = run.train.global_batch
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(
            "E-PIN-VALUE",
            f"pinned micro_batch = {size!r}",
            rule="a micro-batch is a whole number of at least 1",
            fix="use 1 or more",
            pins=[f"micro_batch={size}"],
        )
    if batch % size:
        raise ConfigError(
            "E-PIN-BATCH",
            f"micro_batch {size} does not divide the global batch of {batch:,}",
            rule="micro-batches are equal parts of the global batch",
            fix=f"use {nearest(size, divisors(batch))}",
            micro_batch=size,
            global_batch=batch,
        )


def _pinned_run(run: RunConfig, request: PlanRequest) -> RunConfig | None:
    """Return the run with the pinned settings; unless dp_shard is pinned, it uses the remaining devices.

    Return None if a pinned setting has an unknown name, which the search reports.
    """
    pinned = dict(request.pinned)
    micro_batch = int(str(pinned.pop("micro_batch", 1)))
    if any(name not in vars(run.parallel) for name in pinned):
        return None
    product = math.prod(int(str(pinned.get(name, 1))) for name in _DEGREES)
    if "dp_shard" not in pinned:
        pinned["dp_shard"] = request.cluster.devices // product
    parallel = replace(Parallel(), **pinned)
    return replace(run, parallel=parallel, train=replace(run.train, micro_batch=micro_batch))
