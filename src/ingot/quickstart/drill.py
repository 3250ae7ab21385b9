"""The drill: kill a rank of a running job, and compare the recovered run with an undisturbed twin.

The twin starts one checkpoint earlier than the recovered run, on the same layout, and trains the steps around the kill
without interruption, whereas the killed run had to load a checkpoint and repeat steps. Losses and gradient norms of
both must be equal, without a tolerance.
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
    """A thread that sends SIGKILL to a rank of the run in `folder` after step `after_step`, once per run folder.

    Before the kill, the thread copies the second newest checkpoint to `twin`; the run needs two checkpoints by then.
    Only events after the creation of the thread count: process ids of an earlier start may now belong to other
    processes.
    """

    def __init__(self, folder: RunFolder, twin: RunFolder, *, rank: int, after_step: int):
        super().__init__(daemon=True)
        self.folder, self.twin, self.rank, self.after_step = folder, twin, rank, after_step
        self._since = round(time.time(), 6)  # the log rounds times like this
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
            # Written first, so that the event is before the effects of the kill.
            log.write(events.DRILL, action="kill", rank=self.rank, pid=pid, step=step)
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # the run ended before the kill; the stage `drill` reports this
        finally:
            log.close()


def copy_earlier_checkpoint(folder: RunFolder, twin: RunFolder) -> None:
    """Copy the second newest checkpoint of `folder` and the ledger to `twin`, which then looks like a run that stopped
    at this checkpoint."""
    earlier, _ = sorted(p for p in folder.checkpoints.iterdir() if p.name.startswith("step-"))[-2:]
    for source, target in ((earlier, twin.checkpoints / earlier.name), (folder.ledger, twin.ledger)):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)


def kill_and_restart(folder: RunFolder) -> tuple[dict | None, int]:
    """Return the `drill` event of the run and the step that it restarted from; (None, 0) if nothing was killed."""
    kill = next(read_events(folder.events, events.DRILL), None)
    if kill is None:
        return None, 0
    for start in read_events(folder.events, events.RUN_STARTED):
        if start["time"] > kill["time"]:
            return kill, start["from_step"]
    raise RunFailed(
        "E-DRILL-NO-RESTART",
        f"the run in {folder.root} did not start again after the kill at step {kill['step']}",
        rule="the supervisor restarts a run whose rank was killed",
        fix="see the logs folder of the run for the reason",
        run=str(folder.root),
        step=kill["step"],
    )


def compare_with_twin(folder: RunFolder, twin: RunFolder) -> Twin:
    """Compare the steps of the twin with those of the drilled run. Raises RunFailed if there is nothing to compare."""
    kill, resumed = kill_and_restart(folder)
    theirs = _facts_by_step(twin)
    ours = _facts_by_step(folder)
    if kill is None or not theirs:
        raise RunFailed(
            "E-DRILL-NO-TWIN",
            "there is no kill or no twin run to compare with",
            rule="a comparison needs a run with a killed rank and a twin that trained the steps around the kill",
            fix="remove the quickstart folder and start again",
        )
    missing = [step for step in theirs if step not in ours]
    if missing:
        raise RunFailed(
            "E-DRILL-STEP-MISSING",
            f"the run with the kill did not log step {missing[0]}, but its twin did",
            rule="a recovered run logs every step",
            fix="remove the quickstart folder and start again",
            step=missing[0],
        )
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
    # A step that was repeated after the kill is logged twice; the later event counts.
    return {e["step"]: (e["loss"], e["grad_norm"]) for e in read_events(folder.events, events.STEP)}
