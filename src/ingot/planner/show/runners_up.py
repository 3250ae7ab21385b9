"""What a plan was chosen over: for each decision the best layout that decides it otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ingot.planner.run.plan import Planned
from ingot.planner.search.candidates import Candidate, Evaluator
from ingot.planner.search.moves import Change, neighbours
from ingot.planner.search.search import Found
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.theory.layout import resolve_parallel
from ingot.units import format_bytes, format_seconds

# What a layout is told by, and what each of them that differs counts as, in shares of a step.
_TOLD = (
    "tp", "pp", "schedule", "stages_per_rank", "cp", "ep", "dp_replicate", "dp_shard", "zero", "recompute", "offload",
    "micro_batch",
)  # fmt: skip
_OTHER = 0.02
_EQUAL = 0.005  # layouts whose times differ by less are equally fast


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One step of a recipe. chosen: what the plan has. reason: why. formula: with its numbers. runner_up: "runner-up:
    ..." or "better: ...", the best layout that decides this otherwise, and what it takes; "" where there is none."""

    title: str
    chosen: str
    reason: str
    formula: str = ""
    runner_up: str = ""


@dataclass(frozen=True, kw_only=True)
class Story:
    """A plan, and what a search found beside it. pinned: what the search could not change."""

    planned: Planned
    found: Found
    pinned: Mapping[str, object]

    @property
    def run(self) -> RunConfig:
        return self.planned.run

    @property
    def cluster(self) -> Cluster:
        return self.planned.plan.cluster

    def runner_up(self, *names: str) -> str:
        """In words: the fastest layout that differs from the plan's in one of these settings, where others that differ
        as well count as some time, so that it tells of this decision; among those found, else one step away. "" where
        there is no other layout."""
        if any(name in self.pinned for name in names):
            return "runner-up: none was looked for, as asked for"
        mine = settings_of(self.run, names)
        others = [c for c in self.found.best if settings_of(c.run, names) != mine]
        steps = [step for step in self._neighbours if settings_of(step.candidate.run, names) != mine]
        others = others or [step.candidate for step in steps if step.fits]
        if others:
            return self.beside(min(others, key=self._distance))
        if steps:
            near = min(steps, key=lambda step: step.candidate.memory_bytes).candidate
            return f"runner-up: none fits, {layout_words(near.run)} needs {format_bytes(near.memory_bytes)}"
        return ""

    @cached_property
    def mine(self) -> Candidate:
        """The plan's own layout, as the search sees it."""
        seen = next((c for c in self.found.best if same_layout(c.run, self.run)), None)
        return seen or Evaluator(self.run, self.cluster, self.planned.plan.software).candidate(self.run)

    @cached_property
    def _neighbours(self) -> tuple[Change, ...]:
        return neighbours(self.mine, self.cluster)

    def _distance(self, candidate: Candidate) -> float:
        mine, other = settings_of(self.run, _TOLD), settings_of(candidate.run, _TOLD)
        return candidate.step_seconds * (1 + _OTHER * sum(a != b for a, b in zip(mine, other, strict=True)))

    def second(self) -> Candidate | None:
        return next((c for c in self.found.best if not same_layout(c.run, self.run)), None)

    def without_recompute(self) -> RunConfig:
        return replace(self.run, parallel=replace(self.run.parallel, recompute="none", recompute_every=1))

    def beside(self, candidate: Candidate) -> str:
        """A runner-up; or what would be better, than a run file or with pins it may be."""
        faster = candidate.step_seconds < (1 - _EQUAL) * self.mine.step_seconds
        return f"{'better' if faster else 'runner-up'}: {self._words(candidate)}"

    def _words(self, candidate: Candidate) -> str:
        """Its layout, what it takes, and how much longer than the plan's layout by the same prediction."""
        base = self.mine.step_seconds
        more = f" ({candidate.step_seconds / base - 1:+.1%})" if base and candidate.step_seconds else ""
        time = f", {format_seconds(candidate.step_seconds)} per step{more}" if candidate.step_seconds else ""
        return f"{layout_words(candidate.run)}{time}, {format_bytes(candidate.memory_bytes)}"


def settings_of(run: RunConfig, names: tuple[str, ...]) -> tuple[object, ...]:
    """Resolved, so that what "auto" means counts."""
    parallel = resolve_parallel(run)
    return tuple(run.train.micro_batch if name == "micro_batch" else getattr(parallel, name) for name in names)


def same_layout(one: RunConfig, other: RunConfig) -> bool:
    return settings_of(one, _TOLD) == settings_of(other, _TOLD)


def layout_words(run: RunConfig) -> str:
    """ "tp 4, pp 4 (1f1b), 32 x dp 8, zero 1, micro-batch 1, recompute full": what is used of a layout."""
    parallel = resolve_parallel(run)
    words = [f"tp {parallel.tp}"] if parallel.tp > 1 else []
    if parallel.pp > 1:
        words.append(f"pp {parallel.pp} ({parallel.schedule} x{parallel.stages_on_each_rank})")
    words += [f"cp {parallel.cp} ({parallel.context_form})"] if parallel.cp > 1 else []
    words += [f"ep {parallel.ep}"] if parallel.ep > 1 else []
    copies = f"{parallel.dp_replicate} x " if parallel.dp_replicate > 1 else ""
    words.append(f"dp {copies}{parallel.dp_shard}")
    words += [f"zero {parallel.zero}"] if parallel.shard_ranks > 1 else []
    words.append(f"micro-batch {run.train.micro_batch}")
    words += [f"recompute {parallel.recompute}"] if parallel.recompute != "none" else []
    words += [f"offload {parallel.offload}"] if parallel.offload != "none" else []
    return ", ".join(words)
