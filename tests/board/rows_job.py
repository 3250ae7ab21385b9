"""Rows of whole jobs: signals, two launches in one folder, and other numbers of ranks and layouts on resume."""

import os
import signal
import socket
import struct
import subprocess
import time

from ingot.drill.clean import o7
from ingot.drill.job import DEADLINE_SECONDS
from ingot.drill.oracles import Trace, Verdicts, o3, read_facts, redone
from ingot.events import read_events
from ingot.schema import events

from .bench import Bench, options
from .row import INTERVAL, Row, drawn_mode, drilled, judge_recovered, random_of
from .times import CRASH, Limits

_LONG = "train.steps=60"  # so that a signal arrives before the end
# Steps of some hundredths of a second: the bench, which reads the log again and again, is not too late.
SLOW_STEPS = ("train.steps=60", "train.global_batch=64")
_PREEMPTED = 10
_CANONICAL = ('parallel.reduce="canonical"', "parallel.virtual_ranks=4", "parallel.dp_shard=1")


def stopped_between_snapshots(
    bench: Bench, name: str, step: int, process: subprocess.Popen
) -> tuple[int, dict[int, int]]:
    """Stop all ranks soon after a snapshot of `step` or later. Returns its step, and the ranks' processes."""
    folder, deadline = bench.folder(name), time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        log = list(read_events(folder.events))
        kept = [event["step"] for event in log if event["kind"] == events.SNAPSHOT_KEPT]
        if not kept or kept[-1] < step:
            continue
        pids = {event["rank"]: event["pid"] for event in log if event["kind"] == events.RANK_STARTED}
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        log = list(read_events(folder.events))
        kept = [event["step"] for event in log if event["kind"] == events.SNAPSHOT_KEPT]
        trained = max(event["step"] for event in log if event["kind"] == events.STEP)
        if trained < kept[-1] + INTERVAL - 1:
            return kept[-1], pids
        for pid in pids.values():  # the next snapshot may have begun
            os.kill(pid, signal.SIGCONT)
    raise TimeoutError(f"{name}: no snapshot of step {step} was kept")


def rs30(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Launch the same run twice, up to half a second apart."""
    random, name = random_of("RS30", seed), f"twice-{seed}"
    apart = random.uniform(0, 0.5)
    where = f"{apart:.2f} s apart"
    settings = options([_LONG, drawn_mode(seed)])
    first = bench.start(name, *settings)
    time.sleep(apart)
    second = bench.start(name, *settings)
    by_pid = {process.pid: bench.ended(process) for process in (second, first)}
    codes = sorted(ended.code for ended in by_pid.values())
    verdicts.judge("o6", where, "" if codes == [0, 30] else f"exit codes {codes}")
    for pid, ended in by_pid.items():
        owner = next(other for other in by_pid if other != pid)
        if ended.code == 30:
            names_owner = f"{socket.gethostname()}:{owner} " in ended.output or "only just started" in ended.output
            verdicts.judge("o6", where, "" if "E-RUN-BUSY" in ended.output and names_owner else ended.output[-300:])
    started = [event["attempt"] for event in read_events(bench.folder(name).events, events.RUN_STARTED)]
    verdicts.judge("o6", where, "" if started == [0] else f"attempts {started} have trained")
    judge_recovered(bench, verdicts, name, where, bench.reference(_LONG))


def rs17(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Continue with other numbers of copies, at random steps, with sums that do not depend on them."""
    random = random_of("RS17", seed)
    reference = bench.reference(*_CANONICAL, "parallel.dp_replicate=2")
    for copies in ((2, 1, 2), (4, 2, 1), (4, 2, 4)):
        name = f"copies-{seed}-{'-'.join(map(str, copies))}"
        where = " to ".join(map(str, copies)) + " ranks"
        stops = sorted(random.sample(range(2, 23), 2))
        for number, until in zip(copies, (*stops, None), strict=True):
            settings = options([*_CANONICAL, drawn_mode(seed), f"parallel.dp_replicate={number}"])
            ended = bench.train(name, *settings, *([] if until is None else ["--until-step", str(until)]))
            wanted = 0 if until is None else _PREEMPTED
            verdicts.judge("o6", where, "" if ended.code == wanted else f"code {ended.code}: {ended.output[-300:]}")
        judge_recovered(bench, verdicts, name, where, reference, all_layouts=True)


_LAYOUTS = ("dp_replicate", "tp", "pp", "dp_shard", "")
_NEXT_STEPS, _TOLERANCE = 5, 1e-6


def rs18(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Continue in another form of parallelism, each time after some steps; sums in another order differ by rounding."""
    random, name = random_of("RS18", seed), f"layouts-{seed}"
    stops = sorted(random.sample(range(4, 21), 4))
    where = "DP2, TP2, PP2, FSDP2, 1 rank"
    for axis, until in zip(_LAYOUTS, (*stops, None), strict=True):
        settings = ["parallel.dp_shard=1", drawn_mode(seed), *([f"parallel.{axis}=2"] if axis else [])]
        until_step = [] if until is None else ["--until-step", str(until)]
        ended = bench.train(name, *options(settings), *until_step)
        wanted = 0 if until is None else _PREEMPTED
        verdicts.judge("o6", where, "" if ended.code == wanted else f"code {ended.code}: {ended.output[-300:]}")
    judge_close(bench, verdicts, name, where, stops)


def judge_close(
    bench: Bench, verdicts: Verdicts, name: str, where: str, stops: list[int], *settings: str, again: int = 0
) -> None:
    """Judge the run `name` like any, but the losses of the steps after each of `stops` by their distance from R, and no
    state: its bits are others. settings: those of R. again: how many steps may be done twice."""
    folder, reference = bench.folder(name), bench.reference(*settings)
    verdicts.judge("o7", where, o7(folder, bench.temporary(name), bench.memory_before))
    facts = read_facts(folder)
    verdicts.judge("o3", where, o3(facts.samples, reference.samples))
    worst = 0.0
    for stop in stops:
        steps = [step for step in range(stop + 1, stop + 1 + _NEXT_STEPS) if step in reference.trace]
        worst = max([worst, *(_distance(facts.trace, reference.trace, step) for step in steps)])
    verdicts.numbers["loss_distance"] = worst
    verdicts.judge("o1", where, "" if worst <= _TOLERANCE else f"losses differ by {worst:.1e} relative")
    twice = redone(facts.trace)
    verdicts.judge("o8", where, f"{twice} steps were done twice" if twice > again else "")


def _distance(ours: Trace, reference: Trace, step: int) -> float:
    mine, theirs = (struct.unpack("<d", trace[step][-1][0])[0] for trace in (ours, reference))
    return abs(mine - theirs) / abs(theirs)


ROWS = (
    Row("RS01", "SIGKILL of a rank at a random moment", drilled("RS01", _LONG, without="RS01 partial"), limits=CRASH),
    Row(
        "RS07 memory",
        "SIGKILL of a rank, and loss of the tensors of all checkpoints",
        drilled("RS07 memory", *SLOW_STEPS),
        limits=CRASH,
    ),
    Row("RS08", "SIGKILL of all processes of a job", drilled("RS08", _LONG), limits=Limits(recover=CRASH.recover)),
    Row("RS17", "resume on 2, 1, 2, on 4, 2, 1 and on 4, 2, 4 ranks with canonical sums", rs17),
    Row("RS18", "resume as DP2, TP2, PP2, FSDP2, 1 rank", rs18),
    Row("RS30", "two launches in one folder", rs30),
)
