"""Rows of ranks that hang, or fail from within: stopped processes, held locks, collectives in another order."""

import itertools
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ingot.drill.clean import left_running
from ingot.drill.job import DEADLINE_SECONDS, Ended, marked_processes, send
from ingot.drill.job import ended as ended_within
from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events
from ingot.trainer.launch.watchdog import LEAST

from .bench import ONE_RANK, Bench, options
from .row import Row, drawn_mode, drilled, judge_recovered, random_of
from .times import BUSY, CRASH, Limits, load_now

_WATCHDOG = 3.0  # seconds
_HANG = Limits(detect=_WATCHDOG + 1, recover=6.0)
LONG = ("train.steps=60", f"launch.watchdog_seconds={_WATCHDOG}")
_SETTINGS = (
    *LONG,
    'plugins.modules=["planted"]',
    'plugins.folder="lab"',
    "callbacks.planted={}",
)
_PHASES = ("on_gradients", "on_update", "on_line", "record")
_DETERMINISTIC = 93
_WAITS = [0.0, 1.0, 2.0, 4.0]  # seconds before each restart that reaches no new step; then the run is given up
DEAF = {"BOARD_DEAF": "1"}
_PARTIAL = ('launch.restart="partial"',)
_STOP_STEPS, _STOP_SECONDS, _PREEMPTED = 10, 10.0, 10
_OTHER = 30.0  # seconds that a start may take on a busy machine
_PHASED = (f"launch.watchdog_other_seconds={_OTHER}", 'launch.watchdog_evaluate="5s"', "evaluate.every_steps=6")
_NATIVE = re.compile(r"\b_?Py[A-Z]\w+|\bbuiltin_sum\b")  # functions of the interpreter
_PTRACE_SEIZE = 0x4206
_NO_LINES = ("watch.log_every=60",)  # ranks then do not wait for each other between an update and a save


def rs01_phases(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Kill a rank from within, in each phase of a step: after its gradients, its update, in a log line, in a save."""
    random = random_of("RS01 phases", seed)
    for place in _PHASES:
        _recovers(
            bench, verdicts, f"kill-{place}-{seed}", f"kill {random.randrange(2)} {random.randrange(9, 40)} {place}"
        )


def rs02(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """A segmentation fault and an abort: restarted, with their stacks in the log. An exception of a plug-in: not tried
    again, named with file and line; the same command continues once the plug-in raises no more."""
    random = random_of("RS02", seed)
    for kind, named in (("segv", "SIGSEGV"), ("abort", "SIGABRT")):
        name, rank = f"{kind}-{seed}", random.randrange(2)
        _recovers(bench, verdicts, name, f"{kind} {rank} {random.randrange(9, 40)} on_update", rank, named)
        log = (bench.folder(name).logs / "attempt-1.log").read_text()
        verdicts.judge("o6", kind, "" if f"in {kind}" in log else f"no stack of the planted fault in {log[-300:]}")
    name, fault = f"error-{seed}", f"error {random.randrange(2)} {random.randrange(9, 40)} on_update"
    ended = bench.train(name, *_options(bench), env={"BOARD_FAULT": fault})
    right = ended.code == _DETERMINISTIC and "E-CALLBACK" in ended.output and "planted.py:" in ended.output
    verdicts.judge("o6", fault, "" if right else f"exit code {ended.code}: {ended.output[-300:]}")
    again = bench.train(name, *_options(bench))
    verdicts.judge("o6", fault, "" if again.code == 0 else f"exit code {again.code}: {again.output[-300:]}")
    judge_recovered(bench, verdicts, name, fault, bench.reference(*planted_settings(bench)))


def rs03(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Stop one rank of two, all ranks, and the only rank of a run: nobody waits for that one."""
    drilled("RS03", *LONG)(bench, seed, verdicts)
    drilled("RS03", *LONG, *ONE_RANK, case="-single")(bench, seed, verdicts)


def rs04(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """One rank holds its interpreter lock for ever, and one waits for something that never comes: while the others
    wait for it in the next step, or in a save. The only rank of a run holds its lock. Then ranks that block and ignore
    signals: hung, with both kinds of restart, and asked to stop."""
    random = random_of("RS04", seed)
    for kind, named in (("hold", "interpreter lock"), ("wait", "waits for rank")):
        rank, name = random.randrange(2), f"{kind}-{seed}"
        fault = f"{kind} {rank} {random.randrange(9, 40)} on_update"
        ended = bench.train(name, *_options(bench), env={"BOARD_FAULT": fault})
        _judge_hang(bench, verdicts, name, fault, ended, rank, named)
        if kind == "hold":
            _judge_native_frames(bench, verdicts, name, fault, rank)
        name, fault = f"{kind}-save-{seed}", f"{kind} {rank} {4 * random.randrange(3, 10)} on_update"
        ended = bench.train(name, *_options(bench), *options(_NO_LINES), env={"BOARD_FAULT": fault})
        _judge_hang(bench, verdicts, name, fault, ended, rank, "", settings=_NO_LINES)
    name, fault = f"hold-single-{seed}", f"hold 0 {random.randrange(9, 40)} on_update"
    ended = bench.train(name, *_options(bench), *options(ONE_RANK), env={"BOARD_FAULT": fault})
    where = f"{fault}, the only rank"
    _judge_hang(bench, verdicts, name, where, ended, 0, "interpreter lock", settings=ONE_RANK)
    for kind, settings in (("deaf", ()), ("deaf-partial", _PARTIAL)):
        rank, name = random.randrange(2), f"{kind}-{seed}"
        fault = f"wait {rank} {random.randrange(9, 40)} on_update"
        ended = bench.train(name, *_options(bench), *options(settings), env={"BOARD_FAULT": fault, **DEAF})
        where = f"{kind} {fault}"
        _judge_hang(bench, verdicts, name, where, ended, rank, "ignores SIGUSR2", settings=settings)
    _stop_deaf_ranks(bench, f"deaf-stop-{seed}", random.randrange(9, 40), verdicts)


def rs04_phases(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """All ranks wait for ever in the same phase: at the start, in the first step, in a save after earlier ones, whose
    limit is learned, and in the first evaluation, whose limit the run file gives. Each is found within the limit of its
    phase, with its name, and recovered."""
    random = random_of("RS04 phases", seed)
    save, evaluation = 4 * random.randrange(4, 10), 6 * random.randrange(2, 7)
    cases = (
        ("start", "wait all 0 start", "at the start", _OTHER, "launch.watchdog_other_seconds = 30"),
        ("first-step", "wait all 1 on_gradients", "in the first step", _OTHER, "launch.watchdog_other_seconds = 30"),
        ("save", f"wait all {save} record", "in a save", LEAST * _WATCHDOG, 'launch.watchdog_save = "auto"'),
        ("evaluation", f"wait all {evaluation} evaluation", "in an evaluation", 5.0, "launch.watchdog_evaluate = 5"),
    )
    settings = (*_PHASED, drawn_mode(seed))
    for what, fault, named, limit, reason in cases:
        name = f"{what}-{seed}"
        ended = bench.train(name, *_options(bench), *options(settings), env={"BOARD_FAULT": fault})
        faults = list(read_events(bench.folder(name).events, events.FAULT))
        right = [
            (e["detected_by"], named in e["cause"], e["limit"], e["limit_reason"].startswith(reason)) for e in faults
        ] == [("watchdog", True, limit, True)]
        wrong = ended.code or not right
        verdicts.judge("o6", fault, f"exit code {ended.code}, faults {faults}: {ended.output[-300:]}" if wrong else "")
        late = [e["seconds"] for e in faults if e["seconds"] is None or not limit <= e["seconds"] <= limit + 1]
        verdicts.judge("o6", fault, f"found after {late} s, not {limit:g} to {limit + 1:g} s" if late else "")
        judge_recovered(bench, verdicts, name, fault, bench.reference(*planted_settings(bench)))


def _stop_deaf_ranks(bench: Bench, name: str, step: int, verdicts: Verdicts) -> None:
    """Send SIGTERM to all processes of a job, as a scheduler does, whose ranks take no signals; then continue it."""
    where = f"SIGTERM near step {step} to ranks that take no signals"
    process = bench.start(name, *_options(bench), env=DEAF)
    bench.wait_for_step(name, step, process)
    send(signal.SIGTERM, marked_processes(bench.folder(name).root))
    last = max(event["step"] for event in read_events(bench.folder(name).events, events.STEP)) + _STOP_STEPS
    ended = bench.ended(process)
    stops = [(e["step"], e["saved_step"]) for e in read_events(bench.folder(name).events, events.STOPPED)]
    saved = len(stops) == 1 and stops[0][0] == stops[0][1] <= last
    right = ended.code == _PREEMPTED and saved and ended.seconds < _STOP_SECONDS
    found = f"exit code {ended.code} after {ended.seconds:.1f} s, stops {stops}: {ended.output[-300:]}"
    verdicts.judge("o6", where, "" if right else found)
    again = bench.train(name, *_options(bench), env=DEAF)
    verdicts.judge("o6", where, "" if again.code == 0 else f"exit code {again.code}: {again.output[-300:]}")
    judge_recovered(bench, verdicts, name, where, bench.reference(*planted_settings(bench)), faults=0)


def rs05(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """One rank calls a collective with another shape, leaves one out, or swaps two: a bug, which is not tried again."""
    random = random_of("RS05", seed)
    for kind in ("shape", "skip", "order"):
        name, fault = f"{kind}-{seed}", f"{kind} {random.randrange(2)} {random.randrange(9, 40)} on_update always"
        ended = bench.train(name, *_options(bench), env={"BOARD_FAULT": fault})
        found = [e["cause"] for e in read_events(bench.folder(name).events, events.FAULT)]
        right = ended.code == _DETERMINISTIC and "E-COLLECTIVES-DIFFER" in ended.output and len(found) == 1
        right = right and "number " in found[0]  # with its shape: of each rank, or of the one that Gloo did not abort
        verdicts.judge("o6", fault, "" if right else f"exit code {ended.code}, faults {found}: {ended.output[-300:]}")
        _time(bench, verdicts, name)
        verdicts.judge("o7", fault, left_running(bench.folder(name).root))


def rs33(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """The same abort, and the same hang, at the same step in every attempt: given up with 93 when they come the third
    time. A SIGKILL, which may come by chance, is tried again, each time after twice the time."""
    random = random_of("RS33", seed)
    for kind in ("abort", "wait"):
        name, fault = (
            f"always-{kind}-{seed}",
            f"{kind} {random.randrange(2)} {random.randrange(9, 40)} on_update always",
        )
        ended = bench.train(name, *_options(bench), env={"BOARD_FAULT": fault})
        faults = len(list(read_events(bench.folder(name).events, events.FAULT)))
        right = ended.code == _DETERMINISTIC and "E-RUN-REPEATS" in ended.output and faults == 3
        verdicts.judge("o6", fault, "" if right else f"exit code {ended.code}, {faults} faults: {ended.output[-300:]}")
        verdicts.judge("o7", fault, left_running(bench.folder(name).root))
    kills_without_progress(bench, seed, verdicts)


def kills_without_progress(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Kill a rank at the same step in every attempt: restarts wait longer and longer, and end."""
    random, name = random_of("RS33 kills", seed), f"always-kill-{seed}"
    fault = f"kill {random.randrange(2)} {random.randrange(9, 40)} on_update always"
    # The budget of restarts would end the run as well, and a watchdog of some seconds a busy machine's attempts.
    budget = options(["launch.max_restarts=10", "launch.watchdog_seconds=60"])
    process = bench.start(name, *_options(bench), *budget, env={"BOARD_FAULT": fault})
    ended = ended_within(process, 3 * DEADLINE_SECONDS)  # five attempts
    right = ended.code == _DETERMINISTIC and "E-RUN-NO-PROGRESS" in ended.output
    verdicts.judge("o6", fault, "" if right else f"exit code {ended.code}: {ended.output[-300:]}")
    log = list(read_events(bench.folder(name).events, events.RESTART, events.RANK_STARTED))
    waits = [(event["step"], event["wait_seconds"]) for event in log if event["kind"] == events.RESTART]
    at_the_step = [seconds for step, seconds in waits if step == waits[-1][0]]
    verdicts.judge("o6", fault, "" if at_the_step == _WAITS else f"waits of {waits} (step, s), not of {_WAITS} s")
    pairs = [(one, after) for one, after in itertools.pairwise(log) if one["kind"] == events.RESTART]
    early = [round(after["time"] - one["time"], 3) for one, after in pairs]
    early = [gap for (one, _), gap in zip(pairs, early, strict=True) if gap < one["wait_seconds"]]
    verdicts.judge("o6", fault, f"started again after {early} s already" if early else "")
    verdicts.judge("o7", fault, left_running(bench.folder(name).root))


def planted_settings(bench: Bench) -> Sequence[str]:
    """Return the settings of a run that can have the faults of planted.py, which it finds beside its run file."""
    lab = bench.root / "lab"
    lab.mkdir(exist_ok=True)
    shutil.copyfile(Path(__file__).parent / "planted.py", lab / "planted.py")
    return _SETTINGS


def _options(bench: Bench) -> list[str]:
    return options(planted_settings(bench))


def _recovers(
    bench: Bench, verdicts: Verdicts, name: str, fault: str, rank: int | None = None, named: str = ""
) -> None:
    """Train with a fault, once, and judge that the run recovered. rank, named: of the one fault that it has to log."""
    ended = bench.train(name, *_options(bench), env={"BOARD_FAULT": fault})
    faults = [(e["rank"], e["cause"]) for e in read_events(bench.folder(name).events, events.FAULT)]
    right = len(faults) == 1 and rank in (None, faults[0][0]) and named in faults[0][1]
    verdicts.judge("o6", fault, "" if ended.code == 0 and right else f"exit code {ended.code}, faults {faults}")
    _time(bench, verdicts, name)
    judge_recovered(bench, verdicts, name, fault, bench.reference(*planted_settings(bench)))


def _judge_hang(
    bench: Bench,
    verdicts: Verdicts,
    name: str,
    where: str,
    ended: Ended,
    rank: int,
    named: str,
    settings: Sequence[str] = (),
) -> None:
    """Judge a run whose rank `rank` hung once: found by the watchdog in time, named, and recovered."""
    faults = list(read_events(bench.folder(name).events, events.FAULT))
    right = [(e["rank"], e["detected_by"], named in e["cause"]) for e in faults]
    wrong = ended.code or right != [(rank, "watchdog", True)]
    verdicts.judge("o6", where, f"exit code {ended.code}, faults {faults}: {ended.output[-300:]}" if wrong else "")
    late = [e["seconds"] for e in faults if e["seconds"] > _WATCHDOG + 1]
    verdicts.judge("o6", where, f"found after {late} s" if late else "")
    _time(bench, verdicts, name)
    judge_recovered(bench, verdicts, name, where, bench.reference(*planted_settings(bench), *settings))


def _time(bench: Bench, verdicts: Verdicts, name: str) -> None:
    """Record O4 and O5 of the fault that planted.py has planted in the run `name`: it then writes a file."""
    planted = bench.root / f"{name}.planted"
    if planted.exists():
        verdicts.time(bench.folder(name), planted.stat().st_mtime)


def _judge_native_frames(bench: Bench, verdicts: Verdicts, name: str, where: str, rank: int) -> None:
    """Judge that the evidence of the first hang has native frames of a rank that holds its interpreter lock. Not where
    no program may read them, nor on a busy machine, where gdb takes longer than it may."""
    since, outcome = verdicts.findings, _no_native_frames()
    if not outcome:
        text = (bench.folder(name).incidents / "0001" / f"rank-{rank}.stacks").read_text()
        _, found, frames = text.partition("with native frames (")
        right = found and _NATIVE.search(frames)
        verdicts.judge("o6", where, "" if right else f"no native frame in the evidence: {text[-300:]}")
        outcome = f"by {frames.partition(')')[0]}"
    verdicts.came_of("hold", "native frames", outcome, since)


def _no_native_frames() -> str:
    """Return why this machine shows no native frames of a rank; "" if it does."""
    if not (shutil.which("py-spy") or shutil.which("gdb")):
        return "not judged: neither py-spy nor gdb is installed"
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        # From a sibling, as gdb is one of the rank: a process may always trace its own children.
        program = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).ptrace({_PTRACE_SEIZE}, {other.pid}, None, None))"
        traced = subprocess.run([sys.executable, "-S", "-c", program])
        other.kill()
    if traced.returncode:
        return "not judged: no process may read another one's stack"
    busy = load_now()["others"]
    return f"not judged: {busy:g} other programs per core" if busy >= BUSY else ""


ROWS = (
    Row("RS01 phases", "SIGKILL of a rank in each phase of a step", rs01_phases, limits=CRASH),
    Row("RS02", "an exception, a segmentation fault, an abort", rs02, limits=CRASH),
    Row("RS03", "SIGSTOP of one rank, of all ranks, of the only rank", rs03, limits=_HANG),
    Row("RS04", "a rank that holds its interpreter lock, waits for ever, or blocks and ignores all signals", rs04),
    Row("RS04 phases", "all ranks hang at the start, in the first step, in a save, in an evaluation", rs04_phases),
    Row("RS05", "a rank leaves out, reorders or misshapes a collective", rs05, limits=Limits(detect=_HANG.detect)),
    Row("RS06", "a pause of one rank, of all ranks, shorter than the watchdog", drilled("RS06", *LONG)),
    Row("RS33", "the same failure at the same step in every attempt", rs33),
)
