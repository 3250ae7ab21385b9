"""Requests to stop a run: signals, the time limit of the run file, and the file by which the supervisor asks. No torch.

A request stays until the process ends. The ranks agree on it in resilience/stop_vote.py.
"""

import json
import math
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from ingot.schema.events import PLANNED_STOPS
from ingot.schema.launch import Launch
from ingot.storage import write_atomic
from ingot.units import format_seconds

# Of a terminal (Ctrl-C, hang-up), of schedulers (Slurm and Kubernetes: SIGTERM), and of Slurm's --signal=USR1@SECONDS.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
REQUESTED, TIME_LIMIT = "requested", "launch.stop_after"
# The supervisor starts the ranks again after they have saved; DRAIN: without a machine that may have their files.
RESTART, DRAIN = PLANNED = PLANNED_STOPS
REASONS = (REQUESTED, TIME_LIMIT, *PLANNED, *(number.name for number in STOP_SIGNALS))


@dataclass(frozen=True)
class StopRequest:
    """A request to save and stop. reason: one of REASONS. deadline: when the ranks are killed, in seconds of
    time.monotonic() of this machine; inf if they are not."""

    reason: str
    deadline: float = math.inf

    @classmethod
    def now(cls, reason: str, launch: Launch) -> "StopRequest":
        return cls(reason, time.monotonic() + launch.grace_limit)

    def write(self, path: Path) -> None:
        """Write the request to the file that rank 0 looks for."""
        deadline = self.deadline if math.isfinite(self.deadline) else None
        write_atomic(path, json.dumps({"reason": self.reason, "deadline": deadline}) + "\n")

    @classmethod
    def read(cls, path: Path) -> "StopRequest | None":
        """Read the request in `path`; None without the file. A file with other content, as a user may make it, asks
        without a deadline."""
        try:
            values = json.loads(path.read_bytes())
            return cls(REASONS[REASONS.index(values["reason"])], float(values["deadline"] or math.inf))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            return cls(REQUESTED)

    def line(self, *, is_ending: bool) -> str:
        """Return the line for people when the request arrives. is_ending: see StopRequests."""
        if is_ending:
            late = "uploads that do not end in time are left out; a second Ctrl-C stops now"
            return f"stopping: the run is saved, and {late}"
        left = self.deadline - time.monotonic()
        within = "" if math.isinf(left) else f", within {format_seconds(max(left, 0.0))}"
        why = "" if self.reason in ("SIGINT", REQUESTED) else f" ({self.reason})"
        return f"stopping after this step, saving first{why}{within}; a second Ctrl-C stops now and does not save"


class StopRequests:
    """The requests to stop that this process knows of. `ask` adds one; the first counts.

    file: the file of the supervisor, None on ranks that do not look for it. launch: the settings of the run.
    began: the start of the launcher, in seconds of time.monotonic(), from which launch.stop_after counts; None if the
    supervisor counts it. is_ending: the last step is saved, and the run waits for uploads alone.
    """

    def __init__(self, file: Path | None = None, launch: Launch | None = None, began: float | None = None):
        self._file, self._launch = file, launch or Launch()
        self._ends = math.inf if began is None else began + self._launch.stop_after_limit
        self._first: StopRequest | None = None
        self.is_ending = False

    def ask(self, reason: str) -> StopRequest:
        """Ask for `reason`, unless something asked before. Returns the request that counts."""
        if self._first is None:
            self._first = StopRequest.now(reason, self._launch)
        return self._first

    def current(self) -> StopRequest | None:
        """Return the request that counts; None if nothing has asked."""
        if self._first is None and time.monotonic() >= self._ends:
            self.ask(TIME_LIMIT)
        if self._first is None and self._file is not None:
            self._first = StopRequest.read(self._file)
        return self._first
