"""The alternatives to a plan's decisions: for each decision the best layout in which it is different, and for the model
its dense or sparse twin."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ingot.planner.run.plan import PlannedRun
from ingot.planner.search.candidates import Candidate, Evaluator
from ingot.planner.search.moves import LayoutChange, neighbors
from ingot.planner.search.search import Found, search
from ingot.planner.show.layout import layout_text, settings_text
from ingot.schema.arch import Arch, Moe
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.theory.layout import resolve_parallel
from ingot.theory.params import count_active_parameters, count_parameters
from ingot.units import format_bytes, format_count, format_seconds

# The settings that distinguish layouts. In `_distance`, each setting that differs adds the share _DIFFERENCE of a step.
_SETTINGS = (
    "tp", "pp", "schedule", "stages_per_rank", "cp", "ep", "dp_replicate", "dp_shard", "zero", "recompute", "offload",
    "micro_batch",
)  # fmt: skip
_DIFFERENCE = 0.02
_EQUAL = 0.005  # layouts whose times differ by less than this share count as equally fast
# The usual sparse twin of a dense model; Mixtral has the same relation to Mistral 7B (Jiang et al. 2024).
_EXPERTS, _TOP_K = 8, 2
_RULE = "by the rule of thumb sqrt(all x active)"
_KNOWN = "DeepSeekMoE 16B, 2.8B active and 6.8B by the rule, equals Llama 2 7B (Dai et al. 2024)"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One decision of a plan.

    chosen: the result. reason: why it was chosen. formula: its formula, with numbers filled in. runner_up:
    "runner-up: ..." or "better: ...", the best layout in which this decision is different, with its time and memory; ""
    if there is none.
    """

    title: str
    chosen: str
    reason: str
    formula: str = ""
    runner_up: str = ""


@dataclass(frozen=True, kw_only=True)
class DecisionContext:
    """A plan, and the search whose other layouts its decisions are compared with. pinned: the settings that the search
    had to keep."""

    planned: PlannedRun
    search_result: Found
    pinned: Mapping[str, object]

    @property
    def run(self) -> RunConfig:
        return self.planned.run

    @property
    def cluster(self) -> Cluster:
        return self.planned.plan.cluster

    def runner_up(self, *names: str) -> str:
        """Describe the best layout that differs from the plan's in one of the settings `names`; "" if there is none.

        The best one is the fastest of the layouts that the search found, otherwise of those one change away. Each
        further setting that differs counts as additional time, so that the layout shows the effect of this decision.
        """
        if any(name in self.pinned for name in names):
            return "runner-up: none was searched, because this setting is pinned"
        mine = settings_of(self.run, names)
        others = [c for c in self.search_result.best if settings_of(c.run, names) != mine]
        steps = [step for step in self._one_change_away if settings_of(step.candidate.run, names) != mine]
        others = others or [step.candidate for step in steps if step.fits]
        if others:
            return self.compared(min(others, key=self._distance))
        if steps:
            near = min(steps, key=lambda step: step.candidate.memory_bytes).candidate
            return f"runner-up: none fits, {full_layout_text(near.run)} needs {format_bytes(near.memory_bytes)}"
        return ""

    @cached_property
    def own_layout(self) -> Candidate:
        """The plan's own layout with the memory and time that the search computed for it."""
        seen = next((c for c in self.search_result.best if same_layout(c.run, self.run)), None)
        return seen or Evaluator(self.run, self.cluster, self.planned.plan.software).candidate(self.run)

    @cached_property
    def _one_change_away(self) -> tuple[LayoutChange, ...]:
        return neighbors(self.own_layout, self.cluster)

    def _distance(self, candidate: Candidate) -> float:
        """Return the step time of a layout, increased by 2% for each setting in which it differs from the plan's."""
        mine, other = settings_of(self.run, _SETTINGS), settings_of(candidate.run, _SETTINGS)
        return candidate.step_seconds * (1 + _DIFFERENCE * sum(a != b for a, b in zip(mine, other, strict=True)))

    def second(self) -> Candidate | None:
        """Return the best layout that is not the plan's own, None if the search found no other."""
        return next((c for c in self.search_result.best if not same_layout(c.run, self.run)), None)

    def without_recompute(self) -> RunConfig:
        return replace(self.run, parallel=replace(self.run.parallel, recompute="none", recompute_every=1))

    def compared(self, candidate: Candidate) -> str:
        """Describe a layout with its step time relative to the plan's, and its memory.

        The text begins with "better" if the layout is faster than the plan's, which is possible for a run file or with
        pinned settings; otherwise with "runner-up".
        """
        base = self.own_layout.step_seconds
        which = "better" if candidate.step_seconds < (1 - _EQUAL) * base else "runner-up"
        more = f" ({candidate.step_seconds / base - 1:+.1%})" if base and candidate.step_seconds else ""
        time = f", {format_seconds(candidate.step_seconds)} per step{more}" if candidate.step_seconds else ""
        return f"{which}: {full_layout_text(candidate.run)}{time}, {format_bytes(candidate.memory_bytes)}"


def settings_of(run: RunConfig, names: tuple[str, ...]) -> tuple[object, ...]:
    """Return the values of a layout's settings `names`. "auto" is replaced by its value, so that equal layouts compare
    equal."""
    parallel = resolve_parallel(run)
    return tuple(run.train.micro_batch if name == "micro_batch" else getattr(parallel, name) for name in names)


def same_layout(one: RunConfig, other: RunConfig) -> bool:
    return settings_of(one, _SETTINGS) == settings_of(other, _SETTINGS)


def full_layout_text(run: RunConfig) -> str:
    return f"{layout_text(run)}, {settings_text(run)}"


def dense_vs_moe(context: DecisionContext) -> Decision | None:
    """Compare the plan's model with its twin by tokens per dollar on the same cluster, each in its best layout. The
    twin of a dense model has experts, and the reverse; both have the same number of active parameters.

    Return None if the step time is unknown, or if no layout of the twin fits.
    """
    arch, plan = context.run.model, context.planned.plan
    mine = context.own_layout
    if not mine.step_seconds:
        return None
    other = dense_twin(arch) if arch.is_moe else sparse_twin(arch)
    found = search(replace(context.run, model=other), context.cluster, plan.software, limit=1)
    if not found.best:
        return None
    twin = found.best[0]
    dense, sparse = (twin, mine) if arch.is_moe else (mine, twin)
    quality = dense_equivalent(sparse.run.model)
    slower = quality / count_parameters(dense.run.model)
    amounts = {"dense": _per_unit(context, dense), "experts": _per_unit(context, sparse)}
    unit = "dollar" if _price(context) else "device-hour"
    ahead = amounts["experts"] / (amounts["dense"] / slower)
    return Decision(
        title="dense or experts",
        chosen=f"{'experts' if arch.is_moe else 'dense'}, as the model was given",
        reason=(
            f"dense {format_count(amounts['dense'])}, {sparse.run.model.moe.num_experts} experts"
            f" {format_count(amounts['experts'])} tokens per {unit}, both with"
            f" {format_count(count_active_parameters(sparse.run.model))} parameters active; for a loss as low as with"
            f" experts, a dense model would be larger and make {format_count(amounts['dense'] / slower)}: experts are"
            f" {ahead:.1f} times ahead"
        ),
        formula=(
            f"sqrt({format_count(count_parameters(sparse.run.model))} x"
            f" {format_count(count_active_parameters(sparse.run.model))}) = {format_count(quality)} dense, {_RULE};"
            f" {_KNOWN}"
        ),
        runner_up=f"its layout: {full_layout_text(twin.run)}, {'dense' if arch.is_moe else 'with experts'}",
    )


def sparse_twin(arch: Arch) -> Arch:
    """Return the model with 8 experts of half the feed-forward's width, 2 of them per token: the work per token is
    equal, and feed-forwards have four times the parameters."""
    return replace(arch, moe=Moe(num_experts=_EXPERTS, top_k=_TOP_K, d_expert=max(arch.d_ffn // _TOP_K, 1)))


def dense_twin(arch: Arch) -> Arch:
    """Return the dense model whose feed-forward is as wide as all experts of one token together."""
    moe = arch.moe
    return replace(arch, moe=Moe(), d_ffn=(moe.top_k + moe.shared_experts) * moe.d_expert)


def dense_equivalent(arch: Arch) -> float:
    """Return the number of parameters of a dense model with about the same loss after the same tokens, by the rule of
    thumb sqrt(all parameters x active parameters)."""
    return math.sqrt(count_parameters(arch) * count_active_parameters(arch))


def _price(context: DecisionContext) -> float:
    return context.run.cost.usd_per_hour or context.cluster.usd_per_hour


def _per_unit(context: DecisionContext, candidate: Candidate) -> float:
    """Return tokens per dollar, or per device-hour if no price is known."""
    hours = candidate.step_seconds * candidate.run.parallel.world_size / 3600
    return candidate.run.tokens_per_step / (hours * (_price(context) or 1.0))
