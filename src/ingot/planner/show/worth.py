"""Dense or with experts: tokens per dollar of both, on the same cluster, each in its best layout."""

import math
from dataclasses import replace

from ingot.planner.search.search import Candidate, search
from ingot.planner.show.runners_up import Choice, Story, layout_words
from ingot.schema.arch import Arch, Moe
from ingot.theory.params import count_active_parameters, count_parameters
from ingot.units import format_count

# The usual sparse twin of a dense model, as Mixtral is one of Mistral 7B's shape (Jiang et al. 2024).
_EXPERTS, _TOP_K = 8, 2
_RULE = "by the rule of thumb sqrt(all x active)"
_KNOWN = "DeepSeekMoE 16B, 2.8B active and 6.8B by the rule, equals Llama 2 7B (Dai et al. 2024)"


def weigh(story: Story) -> Choice | None:
    """The plan's model beside its twin with as many active parameters. None where no time is known, or the twin fits
    nowhere."""
    arch, plan = story.run.model, story.planned.plan
    mine = story.mine
    if not mine.step_seconds:
        return None
    other = dense_twin(arch) if arch.is_moe else sparse_twin(arch)
    found = search(replace(story.run, model=other), story.cluster, plan.software, limit=1)
    if not found.best:
        return None
    twin = found.best[0]
    dense, sparse = (twin, mine) if arch.is_moe else (mine, twin)
    quality = equal_dense(sparse.run.model)
    slower = quality / count_parameters(dense.run.model)
    amounts = {"dense": _per_unit(story, dense), "experts": _per_unit(story, sparse)}
    unit = "dollar" if _price(story) else "device-hour"
    ahead = amounts["experts"] / (amounts["dense"] / slower)
    return Choice(
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
        runner_up=f"its layout: {layout_words(twin.run)}, {'dense' if arch.is_moe else 'with experts'}",
    )


def sparse_twin(arch: Arch) -> Arch:
    """8 experts of half the width, 2 to a token: as much work for a token, in four times the feed-forward."""
    return replace(arch, moe=Moe(num_experts=_EXPERTS, top_k=_TOP_K, d_expert=max(arch.d_ffn // _TOP_K, 1)))


def dense_twin(arch: Arch) -> Arch:
    """One feed-forward as wide as all that a token meets."""
    moe = arch.moe
    return replace(arch, moe=Moe(), d_ffn=(moe.top_k + moe.shared_experts) * moe.d_expert)


def equal_dense(arch: Arch) -> float:
    """Parameters of a dense model of about the same loss on the same tokens: a rule of thumb, not a law."""
    return math.sqrt(count_parameters(arch) * count_active_parameters(arch))


def _price(story: Story) -> float:
    return story.run.cost.usd_per_hour or story.cluster.usd_per_hour


def _per_unit(story: Story, candidate: Candidate) -> float:
    """Tokens per dollar, or per device-hour where no price is known."""
    hours = candidate.step_seconds * candidate.run.parallel.world_size / 3600
    return candidate.run.tokens_per_step / (hours * (_price(story) or 1.0))
