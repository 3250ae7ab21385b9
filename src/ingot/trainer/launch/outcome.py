"""The state of a job as its event log shows it, and its result. No torch."""

from dataclasses import dataclass, field
from pathlib import Path

from ingot.errors import EXIT_OK
from ingot.events import NewEvents
from ingot.schema import events
from ingot.trainer.launch.slow_nodes import SlowRank

# Most lines of a log are of other kinds, and are not parsed: the launcher reads along all the time.
_KINDS = (
    events.RUN_STARTED,
    events.ROLLED_BACK,
    events.PROGRESS,
    events.CHECKPOINT,
    events.STRAGGLER,
    events.FINISHED,
    events.STOPPED,
)


@dataclass
class EventLogReader:
    """A reader of the event log of a running job. `read` takes in the lines written since construction.

    step: the last step logged. saved: the step of the newest checkpoint that was verified,
    on loading or after saving; None before the first, 0 if the run starts at step 0. ended: "finished", "stopped" or
    "". reason: of a stop. slow: the ranks of this attempt that are slow for long enough to drain their machines.
    """

    path: Path
    step: int = 0
    saved: int | None = None
    ended: str = ""
    reason: str = ""
    slow: dict[int, SlowRank] = field(default_factory=dict)
    _log: NewEvents = field(init=False)

    def __post_init__(self):
        position = self.path.stat().st_size if self.path.exists() else 0
        self._log = NewEvents(self.path, *_KINDS, position=position)

    def read(self) -> None:
        """Take in the complete lines that were added to the log since the last call."""
        for event in self._log.read():
            self._take(event)

    def _take(self, event: dict) -> None:
        kind = event.get("kind")
        if kind == events.RUN_STARTED:
            self.step = self.saved = event["from_step"]
            self.slow.clear()
        elif kind == events.ROLLED_BACK:
            self.step = self.saved = event["to_step"]
        elif kind == events.PROGRESS:
            self.step = event["step"]
        elif kind == events.CHECKPOINT:
            self.saved = event["step"]
        elif kind == events.STRAGGLER:
            self.slow.pop(event["rank"], None)
            if (slow := SlowRank.of(event)) is not None:
                self.slow[slow.rank] = slow
        elif kind in (events.FINISHED, events.STOPPED):
            self.ended, self.step, self.reason = kind, event["step"], event.get("reason", "")


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """The end of a job. exit_code: 0 if finished, 10 if stopped on request.

    step: the last completed step, as far as a log line shows it. saved_step: the step of the newest verified
    checkpoint; lower than `step` only if the last steps could not be saved in time.
    """

    exit_code: int
    step: int
    saved_step: int
    restarts: int
    seconds: float
    run: Path

    @property
    def finished(self) -> bool:
        return self.exit_code == EXIT_OK

    def facts(self) -> dict:
        """Return the result as plain values: the JSON object of `ingot train --json`."""
        return {
            "run": str(self.run),
            "finished": self.finished,
            "step": self.step,
            "saved_step": self.saved_step,
            "restarts": self.restarts,
            "seconds": round(self.seconds, 3),
            "exit_code": self.exit_code,
        }
