"""The drill: kill a rank of a running job, and hold what it does afterwards against an undisturbed twin.

The twin starts from the checkpoint before the one that the killed run comes back from, on the same layout, and runs
through the fault's steps in one go, where the killed run had to load and redo. Losses and gradient norms of both are
compared as numbers that are equal or not: no tolerance.
"""

import os
import shutil
import signal
import threading
import time
from dataclasses import asdict

from ingot.errors import RunFailed
from ingot.events import EventLog, read_events
from ingot.report.facts import Twin
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_json

POLL_SECONDS = 0.05


class RankKiller(threading.Thread):
    """Sends SIGKILL to `rank` of the run in `folder` once step `after_step` was logged; at most once per run folder.

    First it gives `twin` a copy of the checkpoint before the newest. Needs two checkpoints by then.
    Only what was logged since this object was made counts: process ids of an earlier start belong to strangers now.
    """

    def __init__(self, folder: RunFolder, twin: RunFolder, *, rank: int, after_step: int):
        super().__init__(daemon=True)
        self.folder, self.twin, self.rank, self.after_step = folder, twin, rank, after_step
        self._since = round(time.time(), 3)  # as the log rounds
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            step = max((e["step"] for e in self._events(events.PROGRESS)), default=0)
            if step >= self.after_step:
                if not any(read_events(self.folder.events, events.DRILL)):
                    self._kill(step)
                return

    def _events(self, kind: str) -> list[dict]:
        return [e for e in read_events(self.folder.events, kind) if e["time"] >= self._since]

    def stop(self) -> None:
        self._ended.set()
        self.join(timeout=5)

    def _kill(self, step: int) -> None:
        copy_earlier_checkpoint(self.folder, self.twin)
        pid = [e["pid"] for e in self._events(events.RANK_STARTED) if e["rank"] == self.rank][-1]
        log = EventLog(self.folder.events)
        try:
            os.kill(pid, 0)
            log.write(events.DRILL, action="kill", rank=self.rank, pid=pid, step=step)  # before its effects are logged
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # the run was over first; the story says so
        finally:
            log.close()


def copy_earlier_checkpoint(folder: RunFolder, twin: RunFolder) -> None:
    """Give `twin` the second newest checkpoint of `folder` and the ledger: a run that was stopped there."""
    earlier, _ = sorted(p for p in folder.checkpoints.iterdir() if p.name.startswith("step-"))[-2:]
    for source, target in ((earlier, twin.checkpoints / earlier.name), (folder.ledger, twin.ledger)):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)


def kill_and_restart(folder: RunFolder) -> tuple[dict | None, int]:
    """The `drill` event of the run and the step it came back from. (None, 0) if nothing was killed."""
    kill = next(read_events(folder.events, events.DRILL), None)
    if kill is None:
        return None, 0
    for start in read_events(folder.events, events.RUN_STARTED):
        if start["time"] > kill["time"]:
            return kill, start["from_step"]
    raise RunFailed(f"the run in {folder.root} did not start again after the kill at step {kill['step']}")


def compare_with_twin(folder: RunFolder, twin: RunFolder) -> Twin:
    """Hold the steps of the twin against those of the drilled run. Raises RunFailed if there is nothing to compare."""
    kill, resumed = kill_and_restart(folder)
    theirs = _facts_by_step(twin)
    ours = _facts_by_step(folder)
    if kill is None or not theirs:
        raise RunFailed("the drill left no twin to compare with", fix="remove the quickstart folder and start again")
    missing = [step for step in theirs if step not in ours]
    if missing:
        raise RunFailed(f"the drilled run has no facts of step {missing[0]}, which its twin made")
    differences = [abs(a - b) for step, values in theirs.items() for a, b in zip(values, ours[step], strict=True)]
    comparison = Twin(
        kill_step=kill["step"],
        resumed_from=resumed,
        first_step=min(theirs),
        last_step=max(theirs),
        steps=len(theirs),
        equal=all(theirs[step] == ours[step] for step in theirs),
        max_difference=max(differences),
    )
    write_json(folder.root / "twin.json", asdict(comparison))
    return comparison


def _facts_by_step(folder: RunFolder) -> dict[int, tuple[float, float]]:
    # A step that was redone after the kill is logged twice; the later one is the one that counts.
    return {e["step"]: (e["loss"], e["grad_norm"]) for e in read_events(folder.events, events.STEP)}
