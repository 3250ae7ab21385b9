"""Causes inside of steps that follow from the layout: bubble, communication, recomputation, small products, launches.

Measured where a CPU's clocks show them, else the planner's: its part of the step, or the same run without the cause.
"""

from collections.abc import Iterator

from ingot.report.diagnose.slow_case import Case, Cause
from ingot.report.diagnose.slow_remedies import (
    Prospect,
    Remedy,
    exposed_seconds,
    fewer_exchanges,
    larger_micro_batches,
    less_communication,
    less_recompute,
    shorter_bubbles,
)
from ingot.units import format_seconds

# A host that waits less than this share of a step for its device is what the device waits for.
_HOST_BOUND = 0.1
_EVENTS_PER_SYNC = 10  # steps per log line, the default


def pipeline_bubble(case: Case) -> Iterator[Cause]:
    parallel, waits = case.run.parallel, case.measured.waits.get("pipeline")
    planned = case.planned("pipeline bubble")
    if parallel.pp == 1 or not (planned or (case.on_cpu and waits)):
        return
    evidence = f"{parallel.schedule}, {parallel.pp} pipeline ranks, {case.run.accumulation} micro-batches"
    seconds, source = planned[0] if planned else 0.0, "planned"
    if case.on_cpu and waits:
        seconds, source = waits.mean, "measured"
        evidence += f": ranks wait {format_seconds(seconds)} on average for messages of their neighbours"
        evidence += f" (planned {format_seconds(planned[0])})" if planned else ""
    remedies = case.prospect.best(shorter_bubbles(case.run)) if case.prospect else ()
    yield Cause(name="pipeline bubble", seconds=seconds, source=source, evidence=evidence, remedies=remedies)


def exposed_collectives(case: Case) -> Iterator[Cause]:
    """On a CPU, the rank that is blocked least waits for no other rank: what it is blocked is communication."""
    if case.run.parallel.world_size == 1:
        return
    blocked = case.measured.waits.get("blocked")
    planned = exposed_seconds(case.prospect.terms) * case.pace if case.prospect else 0.0
    if case.on_cpu and blocked:
        seconds, source = blocked.least, "measured"
        evidence = f"every rank is blocked for at least {format_seconds(seconds)} of a step, not counting data"
        evidence += f" (planned {format_seconds(planned)})" if planned else ""
    elif planned:
        seconds, source = planned, "planned"
        evidence = "collectives that nothing hides, as planned: a host cannot see how long devices wait for each other"
    else:
        return
    yield Cause(
        name="exposed collectives",
        seconds=seconds,
        source=source,
        evidence=evidence,
        remedies=_less_to_wait_for(case.prospect) if case.prospect else (),
    )


def _less_to_wait_for(prospect: Prospect) -> tuple[Remedy, ...]:
    """The best layout, and the best micro-batch."""
    found = prospect.best(less_communication(prospect.run)) + prospect.best(fewer_exchanges(prospect.run))
    return tuple(sorted(found, key=lambda remedy: -(remedy.seconds or 0.0)))


def recompute(case: Case) -> Iterator[Cause]:
    how = case.run.parallel.recompute
    if case.prospect is None or how == "none":
        return
    without = {"parallel.recompute": "none"}
    shortage = case.prospect.shortage(without)
    evidence = f'recompute = "{how}" runs forwards a second time; '
    evidence += f"without it a rank {shortage}" if shortage else "without it the run would fit, too"
    yield Cause(
        name="recompute",
        seconds=case.prospect.gain_of(without),
        source="planned",
        evidence=evidence,
        remedies=case.prospect.best(less_recompute(case.run)),
    )


def small_micro_batches(case: Case) -> Iterator[Cause]:
    """What larger micro-batches of the same global batch save: better shapes, fewer launches and gathers."""
    if case.prospect is None:
        return
    train, accumulation = case.run.train, case.run.accumulation
    for remedy in case.prospect.best(larger_micro_batches(case.run)):
        saved = "; ".join(case.prospect.savings(remedy.settings))
        yield Cause(
            name="small micro-batches",
            seconds=remedy.seconds or 0.0,
            source="planned",
            evidence=f"{accumulation} micro-batches of {train.micro_batch} x {train.seq_len} tokens; {saved}",
            remedies=(remedy,),
        )


def host_and_launches(case: Case) -> Iterator[Cause]:
    """A GPU that waits for its host: where the host reads the results of a log line, they are already there."""
    waits, planned = case.measured.waits, case.planned("launches")
    if case.on_cpu or not waits.keys() >= {"reading", "computing"}:
        return
    waited, busy = waits["reading"].mean, waits["computing"].mean
    bound = waited < _HOST_BOUND * case.measured.step_seconds
    if not bound and not (planned and planned[0]):
        return
    idle = case.measured.step_seconds - case.prospect.device_seconds if case.prospect else busy
    evidence = (
        f"the host computes for {format_seconds(busy)} of a step and waits {format_seconds(waited)} for the device"
    )
    yield Cause(
        name="host and launches",
        seconds=max(min(idle, busy), 0.0) if bound else planned[0] if planned else 0.0,
        source="measured" if bound else "planned",
        evidence=evidence,
        remedies=tuple(_less_for_the_host(case)),
    )


def _less_for_the_host(case: Case) -> Iterator[Remedy]:
    if case.prospect:
        yield from case.prospect.best(larger_micro_batches(case.run))
    unknown = "the plan has no rate for the host's own work"
    if case.run.train.compile == "off":
        yield Remedy(
            text='train.compile = "auto"', settings={"train.compile": "auto"}, seconds=None,
            reason=f"fewer kernels to start; {unknown}",
        )  # fmt: skip
    if case.run.watch.log_every < _EVENTS_PER_SYNC:
        yield Remedy(
            text=f"watch.log_every = {_EVENTS_PER_SYNC}", settings={"watch.log_every": _EVENTS_PER_SYNC}, seconds=None,
            reason=f"at each log line the host waits for all work that it started; {unknown}",
        )  # fmt: skip
