"""The causes of slow steps, one function each: waits, work that follows from the layout, and stops between steps.

Waits are measured by the run's own clocks. Work is measured if the clocks of a CPU run show it; otherwise it is the
planner's value: a part of the planned step, or the difference from the same run without the cause. Stops (checkpoints,
evaluations, restarts) are in every event log.
"""

import json
import math
from collections.abc import Iterator

from ingot.events import read_events
from ingot.report.diagnose.evidence import (
    Case,
    Cause,
    Prospect,
    Remedy,
    exposed_seconds,
    fewer_exchanges,
    larger_micro_batches,
    less_communication,
    less_recompute,
    shorter_bubbles,
)
from ingot.report.diagnose.waits import traffic_words
from ingot.report.readable import is_finite
from ingot.schema import events as kinds
from ingot.theory.failures import PUBLISHED_RATES, daly_interval, first_order_overhead, job_mttf_seconds
from ingot.theory.layout import resolve_parallel
from ingot.units import counted, format_bytes, format_seconds

# Data waits come in bursts if a tenth of the log lines has more than this share of them; this needs enough log lines.
_IN_BURSTS, _LEAST_LINES = 0.5, 10
_MOST_BATCHES = 64


def data_stall(case: Case) -> Iterator[Cause]:
    found = case.measured
    which = f"rank {found.waits['data'].rank} most" if "data" in found.waits else "on rank 0, others were not timed"
    kind, text, settings = _kind_of_data_stall(case)
    remedy = Remedy(text=text, settings=settings, seconds=found.data_seconds, reason="all of it, with batches in time")
    yield Cause(
        name="data stall",
        seconds=found.data_seconds,
        source="measured",
        evidence=f"the trainer waits for its next batch, {which}; {kind}",
        remedies=(remedy,),
    )


def _kind_of_data_stall(case: Case) -> tuple[str, str, dict[str, int]]:
    """Return why batches are late, in words, the remedy, and its settings: pauses, the loader's own work, or storage
    that is slower than the training."""
    found, data, train = case.measured, case.run.data, case.run.train
    if found.bursts > _IN_BURSTS and found.intervals >= _LEAST_LINES:
        settings = {"data.prefetch": _prefetch_for_pauses(case)}
        text = f"data.prefetch = {settings['data.prefetch']}, or storage without pauses"
        return f"in bursts, {found.bursts:.0%} of it in the worst tenth of the log lines", text, settings
    if data.filter.is_on:
        text = "the loader's thread decodes and checks each window (data.filter): filter in the data build instead"
        return "throughout: the loader is slower than the training", text, {}
    size = train.global_batch * (train.seq_len + 1) * (2 if case.run.model.vocab_size <= 1 << 16 else 4)
    rate = format_bytes(size / found.step_seconds)
    text = "put the token folder on faster or local storage; a larger data.prefetch would not help"
    return f"throughout: the storage gives {rate}/s to all ranks, less than they use", text, {}


def _prefetch_for_pauses(case: Case) -> int:
    """Return a data.prefetch large enough to hide the longest data wait of a log line, if that was one pause."""
    found, prefetch = case.measured, case.run.data.prefetch
    return min(prefetch + math.ceil(found.longest_wait_seconds / found.fastest_seconds), _MOST_BATCHES)


def straggler(case: Case) -> Iterator[Cause]:
    """Yield the ranks that the run itself found to be slow in their own work, or else the one that computes longest.

    Ranks that are slow because of their data are in `data_stall`. Of ranks that were only timed, pipelines are left
    out, because their ranks have different work.
    """
    if slow := _slow_ranks(case):
        yield from (_slow_rank(event, case) for event in slow.values() if _works_longer(event))
        return
    if not case.on_cpu:
        yield from _slow_device(case)
        return
    computing = case.measured.waits.get("computing")
    if computing is None or case.run.parallel.pp > 1:
        return
    late = computing.most - computing.mean
    evidence = (
        f"rank {computing.rank} computes {format_seconds(computing.most)} of a step, the mean is "
        f"{format_seconds(computing.mean)}, and all wait for it"
    )
    text = f"look at the machine of rank {computing.rank}: clock, thermal limit, memory, other load"
    remedy = Remedy(text=text, settings={}, seconds=late, reason="its time above the mean")
    yield Cause(name="straggler", seconds=late, source="measured", evidence=evidence, remedies=(remedy,))


def _slow_device(case: Case) -> Iterator[Cause]:
    """Yield the GPU whose forward takes longest, by its own clock, where no forward waits for other ranks."""
    parallel, times = case.run.parallel, case.device_times
    alone = max(parallel.tp, parallel.pp, parallel.cp, parallel.ep) == 1 and resolve_parallel(case.run).zero != 3
    if times is None or times.ranks < 2 or not alone:
        return
    forward = times.forward
    late = (forward.most - forward.mean) * (times.forward.mean + times.backward.mean) / max(forward.mean, 1e-12)
    text = f"look at the GPU of rank {forward.rank}: clock, thermal limit, memory errors (ingot doctor --bench)"
    yield Cause(
        name="straggler",
        seconds=late,
        source="measured",
        evidence=f"the forward of rank {forward.rank} takes {format_seconds(forward.most)} on its device, "
        f"the mean is {format_seconds(forward.mean)}, and all wait for it",
        remedies=(Remedy(text=text, settings={}, seconds=late, reason="its time above the mean"),),
    )


def _slow_ranks(case: Case) -> dict[int | None, dict]:
    """Return the newest event of each rank that was slow; with "drained" if its machine left the run for it."""
    slow: dict[int | None, dict] = {}
    for event in read_events(case.data.folder.events, kinds.STRAGGLER, kinds.HEALTH):
        if event["kind"] == kinds.STRAGGLER:
            slow[event.get("rank")] = event
        elif event.get("report") == "slow" and event.get("verdict") == "drain":
            for one in slow.values():
                if f"rank {one.get('rank')}" == event.get("device") or one.get("host") == event.get("node"):
                    one["drained"] = True
    return slow


def _works_longer(event: dict) -> bool:
    """Check whether the newest event of a rank shows that it is slow in its own work."""
    readable = all(is_finite(event.get(name)) for name in ("rank", "factor", "since", "seconds"))
    return readable and event.get("phase") == "compute" and not event.get("ended", True)


def _slow_rank(event: dict, case: Case) -> Cause:
    launch = case.run.launch
    host, seconds = event.get("host"), event["seconds"]
    evidence = (
        f"rank {event['rank']} on {host} takes {event['factor']:.1f} times as long as its peers since step "
        f"{event['since']:,}, and all wait for it"
    )
    text, settings = f"look at {host}: clock, thermal limit, memory, other load", {}
    if event.get("drained"):
        evidence, text = f"{evidence}, until its machine left the run", "nothing is left to do: its machine was drained"
    elif launch.nodes > 1 and launch.on_straggler == "report":
        settings = {"launch.on_straggler": "drain"}
        text += ', or launch.on_straggler = "drain" with a spare machine'
    remedy = Remedy(text=text, settings=settings, seconds=seconds, reason="its time above that of its peers")
    return Cause(name="straggler", seconds=seconds, source="measured", evidence=evidence, remedies=(remedy,))


def no_free_core(case: Case) -> Iterator[Cause]:
    queued = case.measured.waits.get("queued")
    if queued is None or not case.on_cpu:
        return
    evidence = f"rank {queued.rank} was ready to run for {format_seconds(queued.most)} of a step, but had no core"
    text = "free the cores: end other processes, or start at most as many ranks as there are cores"
    remedy = Remedy(text=text, settings={}, seconds=queued.most, reason="all of it, on a machine without other work")
    yield Cause(name="no free core", seconds=queued.most, source="measured", evidence=evidence, remedies=(remedy,))


# A run is host-bound if the host waits for its device less than this share of a step.
_HOST_BOUND = 0.1
_DEFAULT_LOG_EVERY = 10  # the default number of steps per log line


def pipeline_bubble(case: Case) -> Iterator[Cause]:
    parallel, waits = case.run.parallel, case.measured.waits.get("pipeline")
    planned = case.planned("pipeline bubble")
    if parallel.pp == 1 or not (planned or (case.on_cpu and waits)):
        return
    evidence = f"{parallel.schedule}, {parallel.pp} pipeline ranks, {case.run.accumulation} micro-batches"
    seconds, source = planned[0] if planned else 0.0, "planned"
    if case.on_cpu and waits:
        seconds, source = waits.mean, "measured"
        evidence += f": ranks wait {format_seconds(seconds)} on average for messages of their neighbors"
        evidence += f" (planned {format_seconds(planned[0])})" if planned else ""
    remedies = case.prospect.best(shorter_bubbles(case.run)) if case.prospect else ()
    yield Cause(name="pipeline bubble", seconds=seconds, source=source, evidence=evidence, remedies=remedies)


def exposed_collectives(case: Case) -> Iterator[Cause]:
    """Yield the communication that does not overlap with other work.

    The rank that waits least waits for no other rank, so its time there is only communication. On GPUs it is known by
    axis: the sum of the least ones. Older logs of CPUs have that time among all in which a rank was blocked.
    """
    if case.run.parallel.world_size == 1:
        return
    waits = case.measured.waits
    blocked = waits.get("collectives") or waits.get("blocked")
    planned = exposed_seconds(case.prospect.terms) * case.pace if case.prospect else 0.0
    exposed = case.measured.exposed
    if (case.on_cpu and blocked) or exposed:
        seconds = blocked.least if case.on_cpu and blocked else sum(one.least for one in exposed.values())
        source = "measured"
        evidence = f"every rank waits in collectives for at least {format_seconds(seconds)} of a step"
        evidence += f" (planned {format_seconds(planned)})" if planned else ""
        words = traffic_words(exposed, case.measured.hidden, case.measured.step_seconds)
        evidence += f"; means by axis: {words}" if words else ""
    elif planned:
        seconds, source = planned, "planned"
        evidence = "collectives without overlap, as planned: the host cannot measure how long devices wait for others"
    else:
        return
    yield Cause(
        name="exposed collectives",
        seconds=seconds,
        source=source,
        evidence=evidence,
        remedies=_communication_remedies(case.prospect) if case.prospect else (),
    )


def _communication_remedies(prospect: Prospect) -> tuple[Remedy, ...]:
    """Return the best change of the layout and the best change of the micro-batch, largest gain first."""
    found = prospect.best(less_communication(prospect.run)) + prospect.best(fewer_exchanges(prospect.run))
    return tuple(sorted(found, key=lambda remedy: -(remedy.seconds or 0.0)))


def recompute(case: Case) -> Iterator[Cause]:
    how = case.run.parallel.recompute
    if case.prospect is None or how == "none":
        return
    without = {"parallel.recompute": "none"}
    shortage = case.prospect.shortage(without)
    evidence = f'recompute = "{how}" runs forwards a second time; '
    evidence += f"without it a rank {shortage}" if shortage else "without it the run would fit as well"
    yield Cause(
        name="recompute",
        seconds=case.prospect.gain_of(without),
        source="planned",
        evidence=evidence,
        remedies=case.prospect.best(less_recompute(case.run)),
    )


def small_micro_batches(case: Case) -> Iterator[Cause]:
    """Yield the time that larger micro-batches of the same global batch would save, by better matrix shapes and fewer
    launches and gathers."""
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
    """Yield the time that a GPU waits for its host. In a host-bound run, the host hardly waits for results."""
    waits, planned, times = case.measured.waits, case.planned("launches"), case.device_times
    if case.on_cpu or not waits.keys() >= {"reading", "computing"}:
        return
    waited, busy = waits["reading"].mean, waits["computing"].mean
    bound = waited < _HOST_BOUND * case.measured.step_seconds
    evidence = (
        f"the host computes for {format_seconds(busy)} of a step and waits {format_seconds(waited)} for the device"
    )
    seconds, source = planned[0] if planned else 0.0, "planned"
    if bound:
        idle = case.measured.step_seconds - case.prospect.device_seconds if case.prospect else busy
        seconds, source = max(min(idle, busy), 0.0), "measured"
    if times is not None:
        # Between phases the device has no work; within one, the time of launches is in that of the phase.
        between = max(times.idle(case.measured.step_seconds) - case.measured.data_seconds, 0.0)
        evidence += f"; the device itself has no work for {format_seconds(between)} between phases"
        if between > seconds or not bound:
            seconds, source = between, "measured"
    if seconds > 0:
        yield Cause(
            name="host and launches",
            seconds=seconds,
            source=source,
            evidence=evidence,
            remedies=tuple(_host_remedies(case)),
        )


def _host_remedies(case: Case) -> Iterator[Remedy]:
    if case.prospect:
        yield from case.prospect.best(larger_micro_batches(case.run))
    unknown = "the plan has no rate for the host's own work"
    if case.run.train.compile == "off":
        yield Remedy(
            text='train.compile = "auto"', settings={"train.compile": "auto"}, seconds=None,
            reason=f"fewer kernels to start; {unknown}",
        )  # fmt: skip
    if case.run.watch.log_every < _DEFAULT_LOG_EVERY:
        yield Remedy(
            text=f"watch.log_every = {_DEFAULT_LOG_EVERY}",
            settings={"watch.log_every": _DEFAULT_LOG_EVERY},
            seconds=None,
            reason=f"at each log line the host waits for all work that it started; {unknown}",
        )  # fmt: skip


def checkpoint_stall(case: Case) -> Iterator[Cause]:
    found, every = case.measured, case.run.checkpoint.interval
    if not found.saves and not found.weights_saves:
        return
    each = found.save_seconds_each
    interval = "at the best interval" if every.is_auto else f"one every {every}"
    evidence = f"{counted(found.saves, 'checkpoint')}, {interval}, each stops training for {format_seconds(each)}"
    evidence += f"; {counted(found.weights_saves, 'save')} of the weights alone" if found.weights_saves else ""
    yield Cause(
        name="checkpoint stall",
        seconds=found.save_seconds,
        source="measured",
        evidence=evidence,
        remedies=tuple(_other_interval(case, each, longer=True)) if found.saves else (),
    )


def restarts(case: Case) -> Iterator[Cause]:
    found = case.measured
    if not found.restarts:
        return
    causes = ", ".join(dict.fromkeys(fault.cause or "unknown" for fault in case.data.faults if not fault.is_open))
    evidence = f"{counted(found.restarts, 'fault')} ({causes}); {counted(found.redone_steps, 'step')} trained again"
    repair = Remedy(
        text="repair the cause of the faults: ingot report lists them",
        settings={},
        seconds=found.restart_seconds,
        reason="all of it, without faults",
    )
    shorter = _other_interval(case, found.save_seconds_each, longer=False) if found.saves else ()
    yield Cause(
        name="restarts",
        seconds=found.restart_seconds,
        source="measured",
        evidence=evidence,
        remedies=(repair, *shorter),
    )


def _other_interval(case: Case, stall: float, *, longer: bool) -> Iterator[Remedy]:
    """Yield Daly's checkpoint interval if it costs less and is longer than the run's (or shorter, if `longer` is
    False), unless the run has it already. stall: seconds per checkpoint."""
    step, interval = case.measured.step_seconds, case.run.checkpoint.interval
    if interval.is_auto:
        return
    every = interval.in_steps(step)
    mttf, known = _mttf(case)
    wanted = max(min(round(daly_interval(mttf, stall) / step), case.run.train.steps), 1)
    now, then = (first_order_overhead(mttf, stall, steps * step) for steps in (every, wanted))
    if (wanted > every) != longer or wanted == every or then >= now:
        return
    settings = case.run.checkpoint.with_steps(wanted)
    yield Remedy(
        text=", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items()),
        settings=settings,
        seconds=(now - then) * step,
        reason=f"Daly's interval for a fault every {format_seconds(mttf)} ({known}), repeated work included",
    )


def _mttf(case: Case) -> tuple[float, str]:
    """Return the mean seconds between faults, and the source of this number."""
    if case.measured.restarts:
        return max(case.data.active_seconds, 1.0) / case.measured.restarts, "from this log"
    plan = case.data.plan
    if plan and plan.outlook and plan.outlook.failures:
        return plan.outlook.days * 86_400 / plan.outlook.failures, "from the plan"
    rate = PUBLISHED_RATES["llama3"]
    nodes = math.ceil(case.run.parallel.world_size / (1 if case.on_cpu else rate.devices_per_node))
    return job_mttf_seconds(1 if case.on_cpu else nodes, rate.per_node_day), f"{rate.per_node_day:.2%} per node and day"


def evaluation(case: Case) -> Iterator[Cause]:
    found, every, tokens = case.measured, case.run.evaluate.every_steps, case.run.evaluate.max_tokens
    if not found.evaluations or not every:
        return
    remedy = Remedy(
        text=f"evaluate.every_steps = {2 * every} (or evaluate.max_tokens = {tokens // 2})",
        settings={"evaluate.every_steps": 2 * every},
        seconds=found.evaluate_seconds / 2,
        reason="evaluating half as often, or on half as many tokens, takes half the time",
    )
    yield Cause(
        name="evaluation",
        seconds=found.evaluate_seconds,
        source="measured",
        evidence=f"{counted(found.evaluations, 'evaluation')} of held-out text, one every {counted(every, 'step')}",
        remedies=(remedy,),
    )
