"""What a batch ramp does to a pipeline: small batches leave it few micro-batches."""

from dataclasses import dataclass

from ingot.planner.run.batch import batch_ramp
from ingot.schema.run import RunConfig
from ingot.theory.layout import resolve_parallel
from ingot.theory.schedule import build_table, schedule_problems, simulate
from ingot.units import format_count


@dataclass(frozen=True)
class RampStage:
    """bubble: share of a step that pipeline ranks wait; None where the schedule has no table for micro_batches."""

    batch_tokens: float
    until_tokens: float
    micro_batches: int
    bubble: float | None


def ramp_bubbles(run: RunConfig, tokens: int = 0, first_batch: float = 0.0) -> tuple[RampStage, ...]:
    """What a batch ramp does to the run's pipeline, all stages alike and F = I = W.

    tokens: of the whole run, 0: those of its steps. first_batch: in tokens, instead of a quarter of the run's.
    """
    ramp = batch_ramp(run.tokens_per_step, tokens or run.train.steps * run.tokens_per_step)
    if first_batch:
        ramp = ((first_batch, ramp[0][1]), *ramp[1:])
    each = run.train.seq_len * run.train.micro_batch * run.parallel.data_ranks
    stages = [(size, until, max(round(size / each), 1)) for size, until in ramp]
    return tuple(RampStage(size, until, count, _bubble(run, count)) for size, until, count in stages)


def _bubble(run: RunConfig, micro_batches: int) -> float | None:
    parallel = resolve_parallel(run)
    if parallel.pp == 1:
        return 0.0
    shape = parallel.schedule, parallel.pp, micro_batches, parallel.stages_on_each_rank
    if any(schedule_problems(*shape)):
        return None
    return simulate(build_table(*shape), forward=1.0, backward_input=1.0, backward_weight=1.0).bubble_fraction


def ramp_warning(run: RunConfig, tolerated: float = 0.25) -> str:
    """In words, where a ramp would leave pipeline ranks idle for more than a `tolerated` share; else ""."""
    first, *_, last = ramp_bubbles(run)
    if first.bubble is None:
        why = f"{run.parallel.schedule} has no table for its {first.micro_batches} micro-batches"
    elif first.bubble > tolerated:
        now = "" if last.bubble is None else f", and {last.bubble:.0%} with the whole batch"
        why = f"pipeline ranks would wait {first.bubble:.0%} of a step with {first.micro_batches} micro-batches{now}"
    else:
        return ""
    return (
        f"a batch ramp from {format_count(first.batch_tokens)} tokens: {why}; begin larger, or with a shorter pipeline"
    )
