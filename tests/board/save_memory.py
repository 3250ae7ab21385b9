"""The memory that saves in the background take while the disk is slower than they come.

python -m tests.board.save_memory [--layers 16] [--micro 20000]

A real run of one rank saves every few steps, on a disk whose every call takes --micro microseconds longer
(killpoints.c). All private memory of the rank and of its writer process counts, and memory that both share, once; what
they had before the first snapshot does not.
"""

import argparse
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ingot.events import read_events
from ingot.schema import events

from . import killpoints
from .bench import ONE_RANK, Bench, options
from .row import mode_of

_MODEL = ("train.global_batch=2", "model.d_model=512", "model.num_heads=8", "model.head_dim=64", "model.d_ffn=1536")
_EVERY, _STEPS = 3, 15  # steps; those before the first save show what training takes
_POLL_SECONDS, _MOST_SECONDS = 0.02, 900.0


@dataclass(frozen=True)
class SaveMemory:
    """snapshot: bytes of the tensor files of a full checkpoint. extra: the most bytes that saves took. per_interval:
    median seconds of a save, relative to the time between two that were due. saved, left_out: how many saves."""

    snapshot: int
    extra: int
    per_interval: float
    saved: int
    left_out: int

    @property
    def in_snapshots(self) -> float:
        return self.extra / self.snapshot


def measure(bench: Bench, layers: int, micro: int) -> SaveMemory:
    """Train with saves that come faster than the disk takes them, and measure. micro: microseconds per call."""
    name, folder = "save-memory", bench.folder("save-memory")
    saves = (f"checkpoint.every_steps={_EVERY}", mode_of("async"))
    settings = (*ONE_RANK, *_MODEL, f"model.num_layers={layers}", f"train.steps={_STEPS}", *saves)
    slow = killpoints.fault(folder, "slow", who="writer", micro=micro, below=folder.root)
    process, job = bench.start(name, *options(settings), env=slow), bench.job(name)
    before, most, pids, until = 0, 0, list[int](), time.monotonic() + _MOST_SECONDS
    while process.poll() is None and time.monotonic() < until:
        if len(pids) < 2:  # the rank and its writer
            pids = [*job.ranks().values(), *job.writers()]
        private, snapshots = sum(map(_private, pids)), _snapshots(pids)
        if snapshots:
            most = max(most, private + snapshots)
        elif len(pids) == 2:
            before = max(before, private)
        time.sleep(_POLL_SECONDS)
    ended = bench.ended(process)
    assert ended.code == 0, ended.output
    log = list(read_events(folder.events))
    times = [event["time"] for event in log if event["kind"] == events.STEP]
    saved = [event for event in log if event["kind"] == events.CHECKPOINT]
    interval = _EVERY * (times[-1] - times[0]) / (len(times) - 1)
    return SaveMemory(
        snapshot=saved[0]["bytes"],
        extra=most - before,
        per_interval=median(event["write_seconds"] for event in saved) / interval,
        saved=len(saved),
        left_out=sum(event["kind"] == events.CHECKPOINT_SKIPPED for event in log),
    )


def _private(pid: int) -> int:
    """Return the bytes of private memory of a process, of no file; 0 if it has ended."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
    return 0


def _snapshots(pids: list[int]) -> int:
    """Return the bytes of all snapshots that processes have open, each once."""
    found: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError):
            for one in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if str(one.readlink()).startswith("/memfd:ingot-snapshot"):
                        status = one.stat()
                        found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.board.save_memory", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--layers", type=int, default=16, help="of the model (default: 16, a snapshot of 0.6 GB)")
    parser.add_argument("--micro", type=int, default=20_000, help="microseconds of a call (default: %(default)s)")
    args = parser.parse_args()
    with Bench() as bench:
        found = measure(bench, args.layers, args.micro)
    print(
        f"a snapshot of {found.snapshot / 1e6:,.0f} MB; a save takes {found.per_interval:.1f} times the interval; "
        f"{found.saved} saved, {found.left_out} left out; most extra memory {found.extra / 1e6:,.0f} MB, "
        f"{found.in_snapshots:.3f} snapshots; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
