"""A row of runs whose folder is on a mount that vanishes, fails, or does not answer."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from errno import ENOSPC

from ingot.drill.job import END_SECONDS, TrainingJob, gone_within, marked_processes
from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events

from .bench import Bench, options
from .mounted import Mounted, missing
from .row import Row, judge_recovered, mode_of, random_of

_LIMIT = 20.0  # seconds; the start of the ranks has them, too
_SETTINGS = ("train.steps=60", f"launch.watchdog_other_seconds={_LIMIT}", "launch.watchdog_seconds=3")
_LONG = (mode_of("async"), "train.steps=400")  # a save that fails stops others, as does the last one
_LATE_SECONDS = 10.0  # after the limit, or after the fault where there is none
_RESOURCE = 3
_LOST, _SILENT, _FULL = "E-RUN-FOLDER-LOST", "E-RUN-FOLDER-SILENT", "E-DISK-FULL"


@dataclass(frozen=True)
class _Case:
    """A way in which a mount vanishes. fault: carries it out. code, found: of the error that the command ends with.
    limit: the seconds in which it has to end."""

    name: str
    fault: Callable[[Mounted], None]
    code: str
    found: str
    limit: float = _LATE_SECONDS


_CASES = (
    _Case("detached", Mounted.detach, _LOST, "another folder is there"),
    _Case("errors", lambda mounted: mounted.order("errno 5"), _LOST, "Input/output error"),
    _Case("read-only", lambda mounted: mounted.order("errno-writes 30"), _LOST, "Read-only file system"),
    _Case("full", lambda mounted: mounted.order(f"errno-writes {ENOSPC}"), _FULL, "No space left on device"),
    _Case("server killed", Mounted.kill, _LOST, ""),  # the words of the kernel differ
    _Case("silent", lambda mounted: mounted.order("silence"), _SILENT, "has not answered", _LIMIT + _LATE_SECONDS),
)


@dataclass(frozen=True)
class _MountedJob(TrainingJob):
    """`ingot train` where the run folder is mounted."""

    mounted: Mounted | None = None

    def command(self) -> list[str]:
        assert self.mounted is not None
        return self.mounted.command(super().command())


def rs31_mount(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Take the mount of the run folder away in each way, near a random step: named, and ended with all processes; the
    same command goes on when the mount is back, and nothing was written below the mount point."""
    random = random_of("RS31 mount", seed)
    for case in _CASES:
        name, step = f"{case.name.replace(' ', '-')}-{seed}", random.randrange(5, 30)
        point, disk, where = bench.root / name, bench.root / f"{name}.disk", f"{case.name} near step {step}"
        with Mounted(disk, point) as mounted:
            process = _job(bench, name, mounted).start()
            bench.wait_for_step(disk.name, step, process)
            time.sleep(random.uniform(0, 0.1))
            case.fault(mounted)
            ended = bench.ended(process)
            right = ended.code == _RESOURCE and case.code in ended.output and case.found in ended.output
            right = right and str(point) in ended.output and "Traceback" not in ended.output
            verdicts.judge("o6", where, "" if right else f"exit code {ended.code}: {ended.output[-600:]}")
            late = ended.seconds > case.limit
            verdicts.judge("o6", where, f"it took {ended.seconds:.1f} s to end" if late else "")
            left = gone_within(END_SECONDS, lambda point=point: marked_processes(point))
            verdicts.judge("o7", where, f"processes are left: {left}" if left else "")
        strays = [str(path.relative_to(point)) for path in point.rglob("*")]
        verdicts.judge("o7", where, f"written below the mount point: {strays}" if strays else "")
        with Mounted(disk, point) as mounted:
            again = bench.ended(_job(bench, name, mounted).start())
        verdicts.judge("o6", where, "" if again.code == 0 else f"exit code {again.code}: {again.output[-300:]}")
        shutil.rmtree(point)
        disk.rename(point)  # where the oracles look
        judge_recovered(bench, verdicts, name, where, bench.reference(*_SETTINGS))
    _full_for_a_while(bench, f"full-for-a-while-{seed}", random.randrange(5, 30), random.uniform(0.5, 2), verdicts)


def _full_for_a_while(bench: Bench, name: str, step: int, seconds: float, verdicts: Verdicts) -> None:
    """Let the disk have no room for `seconds`: training goes on, and the log gets what it lacks."""
    point, disk, where = bench.root / name, bench.root / f"{name}.disk", f"full for {seconds:.1f} s near step {step}"
    with Mounted(disk, point) as mounted:
        process = _job(bench, name, mounted, *_LONG).start()
        bench.wait_for_step(disk.name, step, process)
        mounted.order(f"errno-writes {ENOSPC}")
        time.sleep(seconds)
        mounted.order("heal")
        ended = bench.ended(process)
    verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-600:]}")
    shutil.rmtree(point)
    disk.rename(point)
    judge_recovered(bench, verdicts, name, where, bench.reference(*_SETTINGS, *_LONG))
    starts = len(list(read_events(bench.folder(name).events, events.RUN_STARTED)))
    verdicts.judge("o6", where, f"the run started {starts} times" if starts != 1 else "")


def _job(bench: Bench, name: str, mounted: Mounted, *more: str) -> _MountedJob:
    job = bench.job(name, *options((*_SETTINGS, *more)))
    return _MountedJob(job.run_file, job.run, job.temporary, job.options, job.variables, mounted)


ROWS = (
    Row("RS31 mount", "the mount of the run folder is detached, fails, is full, or is silent", rs31_mount, missing),
)
