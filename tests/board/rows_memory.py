"""Rows of a rank that runs out of memory, by a limit that another process sets on it in every attempt: it is an error
of the rank, or the kernel kills it."""

import os
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.fallbacks import read_fallbacks
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.manifest import candidate_folders, read_manifest
from ingot.units import format_bytes

from .bench import DEADLINE_SECONDS, Bench, Ended, options
from .row import INTERVAL, Row, judge_recovered, random_of
from .rows_job import judge_close

_GAVE_UP, _PREEMPTED = 93, 10
# Activations that differ by more than what the allocator takes at a time (64 MiB), of steps that are quick to compute.
_SETTINGS = ("model.num_layers=24", "train.global_batch=512", "train.micro_batch=256", "train.steps=6")
_SMALLER = "train.micro_batch=128"
# Micro-batches of one long sequence: nothing is left to halve.
_LONG = (
    *("model.num_layers=24", "model.d_model=128", "model.head_dim=32", "model.d_ffn=512", "model.max_seq_len=1024"),
    *("train.seq_len=1024", "train.global_batch=2", "train.micro_batch=1", "train.steps=2"),
)
_RECOMPUTED = "parallel.recompute=full"
_GROUPS = Path("/sys/fs/cgroup")
_GROUP_BYTES = 64 << 20  # less than the activations of a step
_POLL_SECONDS = 0.005


def rs27(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Give a rank too little memory for its micro-batch, from its start on: the run stops and names the change that
    helps, or takes it, and keeps it when it is continued. Losses differ by rounding: a sum has another order."""
    random = random_of("RS27", seed)
    rank = random.randrange(2)
    where = f"rank {rank}"
    limit = _stops(bench, verdicts, f"stops-{seed}", rank)

    adapts, until = f"adapts-{seed}", random.randrange(2, 5)
    for stop, code in ((["--until-step", str(until)], _PREEMPTED), ([], 0)):
        ended = _limited(bench, adapts, rank, limit, (*_SETTINGS, "launch.on_oom=adapt"), stop)
        verdicts.judge("o6", f"{where} adapts", "" if ended.code == code else f"{ended.code}: {ended.output[-300:]}")
    found = list(read_events(bench.folder(adapts).events, events.LAYOUT))
    right = [(e["overrides"], e["reason"]) for e in found] == [([_SMALLER], "memory")]
    verdicts.judge("o6", f"{where} adapts", "" if right else f"layouts {found}")
    newest = read_manifest(candidate_folders(bench.folder(adapts).checkpoints)[0])
    verdicts.judge("o6", f"{where} adapts", "" if newest.settings["train.micro_batch"] == 128 else "another manifest")
    judge_close(bench, verdicts, adapts, where, [0, until], *_SETTINGS, again=INTERVAL)


def _stops(bench: Bench, verdicts: Verdicts, name: str, rank: int) -> int:
    """Train with too little memory for a micro-batch, and enough for a smaller one: the run has to stop with the rank's
    bill and this change, with which it ends well. Returns the limit of the memory, in bytes."""
    where, change, settings = f"rank {rank}", _SMALLER, _SETTINGS
    large, small = (
        _peak(bench, f"peak-{name}-{n}", one, rank) for n, one in enumerate((settings, (*settings, change)))
    )
    limit = small + (large - small) // 3  # what a step lacks is much, and what a thread needs is there
    verdicts.numbers |= {"large_mib": large >> 20, "small_mib": small >> 20}

    injected = time.time()
    ended = _limited(bench, name, rank, limit, settings)
    named = "E-RUN-MEMORY" in ended.output and f"--set {change}" in ended.output and f"rank {rank} " in ended.output
    faults = [(e["rank"], e["failure"]) for e in read_events(bench.folder(name).events, events.FAULT)]
    right = ended.code == _GAVE_UP and named and faults == [(rank, "memory")]
    verdicts.judge("o6", f"{where} stops", "" if right else f"code {ended.code}, {faults}: {ended.output[-300:]}")
    verdicts.judge("o6", f"{where} stops", _wrong_bill(bench, name, rank, settings, ended.output))
    ended = _limited(bench, name, rank, limit, (*settings, change))
    verdicts.judge("o6", f"{where} with the change", "" if ended.code == 0 else f"code {ended.code}")
    verdicts.time(bench.folder(name), injected)
    judge_close(bench, verdicts, name, where, [0], *settings, again=INTERVAL)
    return limit


def _wrong_bill(bench: Bench, name: str, rank: int, settings: Sequence[str], output: str) -> str:
    """Return what the error of a rank without memory lacks of its predicted bill; "" if nothing."""
    found = read_fallbacks(bench.folder(name).fallbacks, load_run(bench.run_file, settings))
    bill = {kind: size for kind, size in found.bill_of(rank).items() if size}
    if lacking := {"weights", "optimizer", "activations", "runtime"} - bill.keys():
        return f"the bill has no {lacking}"
    parts = [f"{kind} {format_bytes(size)}" for kind, size in bill.items()]
    parts.append(f"as predicted: {format_bytes(sum(bill.values()))} of {format_bytes(found.available_bytes)}")
    words = " ".join(output.split())
    missing = [part for part in parts if part not in words]
    return f"{missing} of the bill are not shown: {output[-400:]}" if missing else ""


def _peak(bench: Bench, name: str, settings: Sequence[str], rank: int) -> int:
    """Return the most memory [bytes] that the kernel counts against the limit, of a rank without one."""
    most = 0

    def look(pid: int) -> None:
        nonlocal most
        found = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        most = max(most, int(found[1]) << 10) if found else most

    ended = _watched(bench, name, rank, look, settings, ["--until-step", "2"])
    assert ended.code == _PREEMPTED, ended.output
    bench.drop(name)
    return most


def _limited(
    bench: Bench, name: str, rank: int, limit: int, settings: Sequence[str], more: Sequence[str] = ()
) -> Ended:
    """Train with a limit of the memory of a rank, in bytes."""

    def look(pid: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))

    return _watched(bench, name, rank, look, settings, more)


def _watched(
    bench: Bench, name: str, rank: int, look: Callable[[int], None], settings: Sequence[str], more: Sequence[str]
) -> Ended:
    """Train, and meanwhile `look` at each process that is this rank."""
    process = bench.start(name, *options(settings), *more)
    ends = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < ends:
        for event in read_events(bench.folder(name).events, events.RANK_STARTED):
            if event["rank"] == rank:
                with suppress(OSError):  # it has ended
                    look(event["pid"])
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)
            break
    return bench.ended(process)


def rs27_kernel(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Let the kernel kill a rank for lack of memory in every attempt: the first time is an accident, the second one
    stops the run with the rank's bill and a change: a smaller micro-batch, or with odd seeds recomputation, because
    nothing is left to halve. The same command continues when the memory is there."""
    name, rank = f"kernel-{seed}", random_of("RS27 kernel", seed).randrange(2)
    settings, change = ((_SETTINGS, _SMALLER), (_LONG, _RECOMPUTED))[seed % 2]
    where, injected = f"rank {rank}, {change}", time.time()
    with _memory_group(_GROUP_BYTES) as group:
        moved = set[int]()

        def look(pid: int) -> None:
            if pid not in moved:
                (group / "cgroup.procs").write_text(str(pid))
                moved.add(pid)

        ended = _watched(bench, name, rank, look, settings, ())
    faults = [(e["rank"], e["failure"]) for e in read_events(bench.folder(name).events, events.FAULT)]
    restarts = len(list(read_events(bench.folder(name).events, events.RESTART)))
    named = all(words in ended.output for words in ("E-RUN-MEMORY", "the kernel had no memory left", f"--set {change}"))
    right = ended.code == _GAVE_UP and named and (faults, restarts) == ([(rank, "memory")] * 2, 1)
    problem = "" if right else f"code {ended.code}, {faults}, {restarts} restarts: {ended.output[-300:]}"
    verdicts.judge("o6", where, problem)
    verdicts.judge("o6", where, _wrong_bill(bench, name, rank, settings, ended.output))
    ended = bench.train(name, *options(settings))
    verdicts.judge("o6", f"{where} again", "" if ended.code == 0 else f"code {ended.code}: {ended.output[-300:]}")
    verdicts.time(bench.folder(name), injected)
    judge_recovered(bench, verdicts, name, where, bench.reference(*settings), faults=2)


@contextmanager
def _memory_group(size: int) -> Iterator[Path]:
    """A control group of this machine whose processes get no more memory than `size` [bytes] while they are in it.
    Raises OSError where this user may not make one, or the machine does not limit memory in this way."""
    old = (_GROUPS / "memory").is_dir()  # version 1 of control groups
    group = (_GROUPS / "memory" if old else _GROUPS) / f"board-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(size))
        with suppress(FileNotFoundError):  # without swap
            (group / ("memory.memsw.limit_in_bytes" if old else "memory.swap.max")).write_text(str(size if old else 0))
        yield group
    finally:
        group.rmdir()


def _no_memory_group() -> str:
    try:
        with _memory_group(_GROUP_BYTES):
            return ""
    except OSError as error:
        return f"needs a control group that limits memory: {error.strerror}"


ROWS = (
    Row("RS27", "out of memory on one rank", rs27),
    Row("RS27 kernel", "the kernel kills a rank for lack of memory", rs27_kernel, missing=_no_memory_group),
)
