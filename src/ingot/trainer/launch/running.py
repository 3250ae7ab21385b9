"""A job as the supervisor uses it: start its ranks, see their ends and hangs, end them. No torch."""

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.schema.run_folder import Job, RunFolder
from ingot.trainer.launch.handover import EarlierJob
from ingot.trainer.launch.slow_nodes import NONE_SLOW, SlowRank
from ingot.trainer.launch.watchdog import LOOK_SECONDS, Hang
from ingot.trainer.resilience.endings import RankEnding
from ingot.trainer.resilience.incidents import JobIncident
from ingot.trainer.resilience.start_times import FIRST, Ordered

_PEER_SECONDS = 1.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class PlannedRestart:
    """A restart of ranks that have not failed. reason: for people. save: the ranks first save their last step; False:
    they start again from what was saved before, because their memory is not to be trusted. leaves: a machine leaves
    the job, so the ranks first upload what they saved."""

    reason: str
    save: bool = True
    leaves: bool = False


class RunningJob(ABC):
    """The ranks of a run, on one machine or several. The methods are about the newest attempt."""

    @property
    @abstractmethod
    def log(self) -> Path:
        """The file with the standard error of the ranks of this machine."""

    @property
    @abstractmethod
    def started(self) -> bool:
        """True if ranks were started in this attempt, False while machines are missing or checked."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """The number of ranks of the job."""

    @abstractmethod
    def start(self, attempt: int, before: Ordered = FIRST, *, check: bool = False) -> None:
        """Begin an attempt. The last one must have ended; `before` says how long that took. check: the machines are
        checked before ranks start (checking.py), by `running`, which raises NodeUnhealthy if too few are sound."""

    @abstractmethod
    def running(self) -> bool:
        """Return whether ranks run, or will, or the processes do that start them."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait until a rank has ended, at most so long."""

    @abstractmethod
    def exit_codes(self) -> Mapping[int, int]:
        """Return the exit codes of the ranks that have ended (negative: signal number), in that order."""

    @abstractmethod
    def ended_at(self, rank: int) -> float | None:
        """Return when a rank ended [s of time.monotonic()]; None if that is not known."""

    @abstractmethod
    def endings(self) -> Mapping[int, RankEnding]:
        """Return what ranks recorded about their ends."""

    @abstractmethod
    def hang(self) -> Hang | None:
        """Return the hang if the job makes no progress."""

    @abstractmethod
    def examine(self, hang: Hang, step: int) -> JobIncident:
        """Ask the ranks what they do, keep that, and return the incident. step: the last one in the log."""

    @abstractmethod
    def explain(self, step: int) -> JobIncident:
        """Return the incident of ranks that ended early. step: the last one in the log."""

    def respond(self, incident: JobIncident) -> JobIncident:
        """Change what the next attempt needs in order not to end with the same `incident`, and return the incident;
        with an error if another attempt would not help."""
        return incident

    @abstractmethod
    def end_attempt(self, failed: Collection[int] = (), *, keep: bool = False) -> Collection[int]:
        """Kill the ranks and wait until they are gone. Raises ResourceError if the kernel cannot end them.

        keep: ranks that have lost the others, or have saved and ended for a restart, keep their processes for the next
        attempt; they are returned. failed: those that cannot.
        """

    @abstractmethod
    def close(self) -> None:
        """End all processes of the job, and free the memory of its snapshots. Raises like `end_attempt`."""

    @property
    def look_seconds(self) -> float:
        """The longest time until somebody has to look at the ranks again."""
        return LOOK_SECONDS

    def earlier(self) -> EarlierJob | None:
        """Return the job that this one goes on with, of a leader that is gone; None if there is none."""
        return None

    def lost_node(self, step: int) -> JobIncident | None:
        """Return the incident of a machine that was lost, or is missing. step: the last one in the log."""
        return None

    def planned_restart(self, slow: Mapping[int, SlowRank] = NONE_SLOW) -> PlannedRestart | None:
        """Return why the ranks of this attempt have to start again although they work; None if they have not to. Once
        it has returned a restart, it does until the attempt ends. slow: the ranks that were slow for long enough to
        drain their machines."""
        return None

    def signals(self) -> Iterator[tuple[signal.Signals, str]]:
        """Return the stop signals to other machines since the last call, each with a name of its machine."""
        yield from ()

    def lost_ranks(self) -> list[int]:
        """Return the ranks that have ended, but not normally, in the order in which they ended."""
        codes = self.exit_codes()
        endings = self.endings() if codes else {}  # a rank that ended normally has recorded that
        return [rank for rank in codes if rank not in endings or endings[rank].kind]

    def all_ended(self) -> bool:
        """Return whether every rank has recorded its end: only Python is still shutting down."""
        return len(self.endings()) == self.ranks

    def wait_for_peers(self) -> None:
        """Wait for what explains the ends so far, for a short time. After the abort of a rank: until a peer has
        recorded in which collective it lost it, because they may have called different ones. If ranks have lost a peer:
        until that one's own end is known, which may be on another machine."""
        deadline = time.monotonic() + _PEER_SECONDS
        while self._is_unexplained() and time.monotonic() < deadline and self.running():
            time.sleep(_POLL_SECONDS)

    def _is_unexplained(self) -> bool:
        lost, endings = self.lost_ranks(), self.endings()
        if len(lost) == self.ranks:
            return False
        if -signal.SIGABRT in self.exit_codes().values():
            return not any(ending.kind for ending in endings.values())
        return all(rank in endings and endings[rank].is_echo for rank in lost)


def next_log(folder: RunFolder) -> str:
    """Return the name of the log of the next attempt."""
    number = 1
    while (folder.logs / f"attempt-{number}.log").exists():
        number += 1
    return f"attempt-{number}.log"


def ranks_of(job: Job, first: int) -> range:
    """Return the ranks of the part `job` of a job, whose lowest is `first`."""
    return range(first, first + job.processes)
