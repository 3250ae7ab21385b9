"""The row of a rank that runs out of memory: a limit that another process sets on it, in every attempt."""

import re
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events
from ingot.trainer.checkpoint.manifest import candidate_folders, read_manifest

from .bench import DEADLINE_SECONDS, Bench, Ended, options
from .row import INTERVAL, Row, random_of
from .rows_job import judge_close

_GAVE_UP, _PREEMPTED = 93, 10
# Activations that differ by more than what the allocator takes at a time (64 MiB), of steps that are quick to compute.
_SETTINGS = ("model.num_layers=24", "train.global_batch=512", "train.micro_batch=256", "train.steps=6")
_SMALLER = "train.micro_batch=128"
_POLL_SECONDS = 0.005


def rs27(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Give a rank too little memory for its micro-batch, from its start on: the run stops and names the change that
    helps, or takes it, and keeps it when it is continued. Losses differ by rounding: a sum has another order."""
    random = random_of("RS27", seed)
    rank = random.randrange(2)
    where = f"rank {rank}"
    large, small = (_peak(bench, f"peak-{size[-3:]}", size, rank) for size in (_SETTINGS[2], _SMALLER))
    limit = small + (large - small) // 3  # what a step lacks is much, and what a thread needs is there
    verdicts.numbers |= {"large_mib": large >> 20, "small_mib": small >> 20}

    stops = f"stops-{seed}"
    injected = time.time()
    ended = _limited(bench, stops, rank, limit)
    named = "E-RUN-MEMORY" in ended.output and f"--set {_SMALLER}" in ended.output and f"rank {rank} " in ended.output
    faults = [(e["rank"], e["failure"]) for e in read_events(bench.folder(stops).events, events.FAULT)]
    right = ended.code == _GAVE_UP and named and faults == [(rank, "memory")]
    verdicts.judge("o6", f"{where} stops", "" if right else f"code {ended.code}, {faults}: {ended.output[-300:]}")
    ended = _limited(bench, stops, rank, limit, _SMALLER)
    verdicts.judge("o6", f"{where} with the change", "" if ended.code == 0 else f"code {ended.code}")
    verdicts.time(bench.folder(stops), injected)
    judge_close(bench, verdicts, stops, where, [0], *_SETTINGS, again=INTERVAL)

    adapts, until = f"adapts-{seed}", random.randrange(2, 5)
    for stop, code in ((["--until-step", str(until)], _PREEMPTED), ([], 0)):
        ended = _limited(bench, adapts, rank, limit, "launch.on_oom=adapt", more=stop)
        verdicts.judge("o6", f"{where} adapts", "" if ended.code == code else f"{ended.code}: {ended.output[-300:]}")
    found = list(read_events(bench.folder(adapts).events, events.LAYOUT))
    right = [(e["overrides"], e["reason"]) for e in found] == [([_SMALLER], "memory")]
    verdicts.judge("o6", f"{where} adapts", "" if right else f"layouts {found}")
    newest = read_manifest(candidate_folders(bench.folder(adapts).checkpoints)[0])
    verdicts.judge("o6", f"{where} adapts", "" if newest.settings["train.micro_batch"] == 128 else "another manifest")
    judge_close(bench, verdicts, adapts, where, [0, until], *_SETTINGS, again=INTERVAL)


def _peak(bench: Bench, name: str, size: str, rank: int) -> int:
    """Return the most memory [bytes] that the kernel counts against the limit, of a rank without one."""
    most = 0

    def look(pid: int) -> None:
        nonlocal most
        found = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        most = max(most, int(found[1]) << 10) if found else most

    ended = _watched(bench, name, rank, look, (*_SETTINGS, size), ["--until-step", "2"])
    assert ended.code == _PREEMPTED, ended.output
    bench.drop(name)
    return most


def _limited(bench: Bench, name: str, rank: int, limit: int, *settings: str, more: Sequence[str] = ()) -> Ended:
    """Train with a limit of the memory of a rank, in bytes."""

    def look(pid: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))

    return _watched(bench, name, rank, look, (*_SETTINGS, *settings), more)


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


ROWS = (Row("RS27", "out of memory on one rank", rs27),)
