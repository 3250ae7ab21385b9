"""Rows of saves that are disturbed from outside: kills at every call, a full disk, a slow disk, a killed writer."""

import itertools
import re
import signal
import time
from errno import EIO, EROFS
from statistics import median

from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder

from . import killpoints
from .bench import Bench
from .crash_points import DISKS, MEMORY, ONLY_WEIGHTS, PREVIOUS, SAVED, calls_of_a_save, crash_points, row_of
from .row import INTERVAL, MODES, Row, judge_recovered, mode_of, newest_valid, random_of, resumed_from

SEEDS = 5  # as many seeds have all crash points together
_SLOW_STEPS = 80
TAKES_ROOM = ("create", "write")
NO_EFFECT = ("mkdir", "unlink", "rmdir")  # they may fail without a report, as mkdir of a folder that exists


def rs09(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Take every fifth call of both modes, those of this seed, and one random call of a real job of two ranks."""
    counts = {mode: len(calls_of_a_save(bench, mode)) for mode in MODES}
    numbers = {mode: range(1 + seed % SEEDS, count + 1, SEEDS) for mode, count in counts.items()}
    crash_points(bench, verdicts, dict(numbers), ("power", "kill"))
    verdicts.numbers |= {f"calls_{mode}": float(count) for mode, count in counts.items()}
    crash_of_a_job(bench, seed, verdicts)


def crash_of_a_job(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Kill a whole job of two ranks, with its supervisor, at a random call of a random rank; continue it."""
    random = random_of("RS09", seed)
    mode, do, rank = random.choice(list(MODES)), random.choice(["power", "kill"]), random.randrange(2)
    # In sync mode rank 1 writes only its own file. Calls of the first saves, whichever they belong to.
    k = random.randrange(1, 80 if rank else 180)
    name, where = f"job-{seed}", f"job of 2 ranks: {mode} {do} at call {k} of rank {rank}"
    folder, since, log = bench.folder(name), verdicts.findings, bench.root / f"{name}.calls"
    fault = killpoints.fault(folder, do, k, who=f"{MODES[mode]}:{rank}", log=log)
    option = ("--set", mode_of(mode))
    killed, injected = bench.train(name, *option, env=fault), time.time()
    if killed.code != -signal.SIGKILL:
        verdicts.judge("o6", where, f"the job was not killed (exit code {killed.code}): {killed.output[-300:]}")
        return
    ended = bench.train(name, *option)
    verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-500:]}")
    verdicts.time(folder, injected)
    # Without any checkpoint the run starts at step 0, which is no loss: none was ever saved.
    saves_left_out = len(list(read_events(folder.events, events.CHECKPOINT_SKIPPED)))
    judge_recovered(bench, verdicts, name, where, bench.reference(), faults=2 + saves_left_out)
    call = killpoints.read_calls(log)[k - 1]
    verdicts.came_of(f"{do}, 2 ranks", killpoints.place_of(call), f"step {resumed_from(folder)}", since)


def _found(folder: RunFolder, *kinds: str) -> list[dict]:
    return list(read_events(folder.events, *kinds))


def rs12(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Let calls of a save fail, in both modes: a random one as on a full disk; all from a random one on as on a disk
    that became read-only, or vanished; and every fifth kind of call, those of this seed, as on a disk with an error.
    And let the disk be full before the start."""
    random = random_of("RS12", seed)
    for mode in MODES:
        calls = calls_of_a_save(bench, mode)
        takes_room = [n for n, (call, _) in enumerate(calls, 1) if call in TAKES_ROOM]
        _fails(bench, verdicts, mode, "ENOSPC once", random.choice(takes_room), do="full")
        lasts = ("EIO", EIO) if seed % 2 else ("EROFS", EROFS)
        _fails(bench, verdicts, mode, f"{lasts[0]} from it on", random.choice(takes_room), do="fail", errno=lasts[1])
        places = [killpoints.place_of(call) for call in calls]
        for place in sorted(set(places))[seed % SEEDS :: SEEDS]:
            k = random.choice([n for n, found in enumerate(places, 1) if found == place])
            _fails(bench, verdicts, mode, "EIO once", k, do="fail", errno=EIO, times=1)
    refused = bench.train("no-room", env={"BOARD_NOROOM": "1"})
    verdicts.judge("o6", "before the start", "" if "E-DISK-SPACE" in refused.output else refused.output[-300:])
    begun = bench.folder("no-room").events.exists()
    verdicts.judge("o6", "before the start", "a run was begun" if begun or not refused.code else "")


def _fails(bench: Bench, verdicts: Verdicts, mode: str, fault: str, k: int, **how: str | int) -> None:
    """Let call `k` of a save fail, and judge: a save that fails is reported by code and path, no checkpoint is lost,
    and in the background mode training goes on, to the last save, which has to succeed. how: see killpoints.c."""
    call, since, lasts = calls_of_a_save(bench, mode)[k - 1], verdicts.findings, fault.endswith("on")
    name, where = f"{fault}-{mode}".replace(" ", "-"), f"{mode}: {fault}, call {k} ({call[0]} {call[1]})"
    folder, settings = bench.copy(bench.base(SAVED, *PREVIOUS), name), (*PREVIOUS, mode_of(mode))
    ended = bench.attempt(name, *settings, env=killpoints.fault(folder, k=k, who=MODES[mode], **how))
    failed = [(one["code"], str(folder.root) in one["reason"]) for one in _found(folder, events.CHECKPOINT_FAILED)]
    named = set(failed) <= {("E-CKPT-WRITE", True)} and (lasts or len(failed) <= 1)
    verdicts.judge("o6", where, "" if named else f"failed saves {failed}")
    outcome = "training went on" if failed else "no save failed"
    matters = call[0] not in NO_EFFECT and killpoints.file_of(call[1]) != "old checkpoint"
    silent = matters and not failed and not ended.code
    verdicts.judge("o6", where, "it failed without a report" if silent else "")
    if ended.code:
        may_end = mode == "sync" or lasts
        named = may_end and "E-CKPT-WRITE" in ended.output and str(folder.root) in ended.output
        verdicts.judge("o6", where, "" if named else f"exit code {ended.code}: {ended.output[-300:]}")
        newest, torn = newest_valid(folder)
        verdicts.judge("o6", where, torn or ("" if newest >= SAVED else f"the newest is of step {newest}"))
        outcome, ended = "continued by the command", bench.attempt(name, *settings)
    verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
    judge_recovered(bench, verdicts, name, where, bench.reference(ranks=1), faults=6 if lasts else 1)
    verdicts.came_of(f"{fault}, {mode}", killpoints.place_of(call), outcome, since)


def rs14(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Let every call of the writer take so long that a save takes five times the interval between checkpoints."""
    settings = (mode_of("async"), f"train.steps={_SLOW_STEPS}")
    for number, micro in enumerate((6000, 18000, 54000)):  # a machine under load has longer steps
        name = f"slow-{seed}-{number}"
        slow = killpoints.fault(bench.folder(name), "slow", who="writer", micro=micro + 250 * seed)
        ended = bench.attempt(name, *settings, env=slow)
        verdicts.judge("o6", name, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
        judge_recovered(bench, verdicts, name, name, bench.reference(f"train.steps={_SLOW_STEPS}", ranks=1))
        if _judge_slow(bench, verdicts, name):
            return
    verdicts.judge("o6", f"slow-{seed}", "no delay made a save take 5 intervals: the fault had no effect")


def _judge_slow(bench: Bench, verdicts: Verdicts, name: str) -> bool:
    """Judge how training waited and what it left out. Returns whether saves took five times the interval."""
    log = list(read_events(bench.folder(name).events))
    times = [event["time"] for event in log if event["kind"] == events.STEP]
    saved = [event for event in log if event["kind"] == events.CHECKPOINT]
    skipped = [event for event in log if event["kind"] == events.CHECKPOINT_SKIPPED]
    interval = (times[-1] - times[0]) / (len(times) - 1) * INTERVAL
    ratio = median(event["write_seconds"] for event in saved) / interval
    # The last save is not counted: the run has to wait for it, and for the one before.
    stall = sum(event["stall_seconds"] for event in saved[:-1]) / (times[-1] - times[0])
    verdicts.numbers |= {"write_per_interval": ratio, "stall_of_wall": stall, "left_out": float(len(skipped))}
    counted = {event["step"] for event in saved + skipped}
    missing = set(range(INTERVAL, _SLOW_STEPS + 1, INTERVAL)) - counted
    verdicts.judge("o6", name, f"neither saved nor left out: {sorted(missing)}" if missing else "")
    verdicts.judge("o6", name, "" if stall <= 0.02 else f"training waited {stall:.1%} of the time")
    return ratio >= 5


def rs15(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Kill the writer process of a random rank at a random call of its first save."""
    random = random_of("RS15", seed)
    rank, k = random.randrange(2), random.randrange(2, 60)
    name, where = f"writer-{seed}", f"the writer of rank {rank} killed at call {k}"
    folder = bench.folder(name)
    # The fault is in the environment of the job, so it would kill the next writer as well: the first one counts.
    once = bench.root / f"{name}.calls"
    option = ("--set", mode_of("async"), "--set", "train.steps=48")
    process = bench.start(name, *option, env=killpoints.fault(folder, "die", k, who=f"writer:{rank}", log=once, once=1))
    ended = bench.ended(process)
    verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
    failed = list(read_events(folder.events, events.CHECKPOINT_FAILED))
    codes = [event["code"] for event in failed]
    verdicts.judge("o6", where, "" if codes == ["E-CKPT-WRITER"] else f"failed saves: {codes}")
    names_rank = bool(failed) and re.search(rf"\brank {rank}\b", failed[0]["reason"]) is not None
    verdicts.judge("o6", where, "" if names_rank else f"rank {rank} is not named: {failed}")
    if failed:
        there = folder.checkpoint(failed[0]["step"]).exists()
        verdicts.judge("o6", where, "the failed checkpoint is there" if there else "")
    faults = list(read_events(folder.events, events.FAULT))
    verdicts.judge("o6", where, "training was disturbed" if faults else "")
    judge_recovered(bench, verdicts, name, where, bench.reference("train.steps=48"))


def rs16(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Measure how long training waits for a save, on a model whose step takes about 0.1 s, and compare the trace with a
    run that saves only at its end."""
    settings = ("train.global_batch=64", "train.steps=24")
    off = bench.reference("checkpoint.every_steps=1000", *settings)
    name = f"stall-{seed}"
    ended = bench.train(name, *(w for s in (*settings, mode_of("async")) for w in ("--set", s)))
    verdicts.judge("o6", name, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
    judge_recovered(bench, verdicts, name, name, off)
    log = list(read_events(bench.folder(name).events))
    times = [event["time"] for event in log if event["kind"] == events.STEP]
    stalls = [event["stall_seconds"] for event in log if event["kind"] == events.CHECKPOINT]
    step, stall = median(b - a for a, b in itertools.pairwise(times)), median(stalls)
    verdicts.numbers |= {"stall_s": stall, "step_s": step, "stall_per_step": stall / step}
    verdicts.judge("o6", name, "" if stall <= 0.05 else f"training waited {stall * 1000:.0f} ms")
    verdicts.judge("o6", name, "" if stall <= step / 10 else f"training waited {stall / step:.0%} of a step")


ROWS = (
    Row("RS09", "SIGKILL or loss of power at every call that changes the disk in a save", rs09),
    row_of("RS09 disks", "SIGKILL or loss of power at a call of a save of two ranks, each with its disk", DISKS),
    row_of("RS09 weights", "SIGKILL or loss of power at a call of a save of the weights alone", ONLY_WEIGHTS),
    row_of("RS09 memory", "SIGKILL of a rank at a call of a save, or a message to the keeper of its node", MEMORY),
    Row("RS12", "ENOSPC, an error or a read-only disk at a call of a save; no room before the start", rs12),
    Row("RS14", "a save that takes 5 times the interval", rs14),
    Row("RS15", "SIGKILL of the process that writes checkpoints", rs15),
    Row("RS16", "none: how long training waits for a save", rs16),
)
