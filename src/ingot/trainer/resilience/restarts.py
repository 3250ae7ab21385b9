"""Decides whether a job that failed starts again, and after how long. No torch.

A restart helps against accidents. It does not help against a bug, which fails at the same step each time; nor where the
job fails again and again before it reaches a step that it had not reached. Two failures that look the same may be
accidents (a signal from outside, a device that fails twice); a third one is none. Accidents may be many in a month, but
not in an hour.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ingot.errors import RunFailed
from ingot.schema.launch import SAME, Launch
from ingot.trainer.resilience.incidents import JobIncident
from ingot.units import counted, format_seconds

NO_PROGRESS = 3  # restarts in a row that reach no new step; NVIDIA's resiliency extension has the same number
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds, doubled with each restart in a row without progress


class Restarts:
    """The restarts of one job. count: so far. recent: those within launch.restart_window_seconds, without those in
    which the job took another layout for lack of memory.

    clock: seconds that never jump. earlier: the restarts of earlier leaders of the job, each with its age in seconds.
    """

    def __init__(
        self,
        launch: Launch,
        clock: Callable[[], float] = time.monotonic,
        earlier: Sequence[tuple[float, JobIncident]] = (),
    ):
        self._launch, self._clock = launch, clock
        self._incidents: list[float] = []  # when each was
        self._adapted = 0
        self._since_progress: list[JobIncident] = []
        self._farthest, self._in_vain = -1, 0
        for age, incident in earlier:
            if incident.adapted:
                self._adapted += 1
            else:
                self._take(incident, clock() - age)

    @property
    def count(self) -> int:
        return len(self._incidents) + self._adapted

    @property
    def recent(self) -> int:
        since = self._clock() - self._launch.restart_window_seconds
        return sum(at >= since for at in self._incidents)

    def wait_after(self, incident: JobIncident, log: Path) -> float:
        """Return how many seconds to wait before the job starts again.

        log: the standard error of the attempt. Raises the error of a rank that a restart cannot resolve, and RunFailed
        if the same happened at the same step SAME times, if the job reaches no new step, or if it failed too often.
        """
        if incident.adapted:  # there are only so many layouts, or measures
            self._adapted += 1
            return 0.0
        before = self._take(incident, self._clock())
        if incident.error:
            raise incident.error
        who = f"rank {incident.rank}" if incident.rank >= 0 else "the job"
        what = f"{who} {incident.cause} near step {incident.step}"
        facts = {"rank": incident.rank, "step": incident.step, "cause": incident.cause, "kind": incident.kind}
        go_on = f"fix the cause ({_shown_in(incident, log)}); the same command then continues from the last checkpoint"
        same = sum((i.signature, i.step) == (incident.signature, incident.step) for i in before)
        if incident.signature and same + 1 >= SAME:
            raise RunFailed(
                "E-RUN-REPEATS",
                f"{what}, {same + 1} times",
                rule=f"the same failure {SAME} times at the same step is a bug; starting again will not help",
                fix=go_on,
                **facts,
                times=same + 1,
                log=str(log),
            )
        if self._in_vain > NO_PROGRESS:
            raise RunFailed(
                "E-RUN-NO-PROGRESS",
                f"{what}; {self._in_vain} restarts in a row reached no step after {self._farthest}",
                rule=f"a job whose restarts do not get farther is given up after {NO_PROGRESS}",
                fix=go_on,
                **facts,
                farthest=self._farthest,
            )
        most, window = self._launch.max_restarts, self._launch.restart_window_seconds
        if self.recent > most:
            raise RunFailed(
                "E-RUN-RESTARTS",
                f"{what}, after {counted(most, 'restart')}",
                rule=f"a job is restarted at most launch.max_restarts = {most} times in {format_seconds(window)} "
                "(launch.restart_window_seconds)",
                fix=f"find the cause ({_shown_in(incident, log)}); the same command continues from the last checkpoint",
                **facts,
                max_restarts=most,
            )
        return min(_FIRST_WAIT * 2 ** (self._in_vain - 1), _LONGEST_WAIT) if self._in_vain else 0.0

    def _take(self, incident: JobIncident, at: float) -> list[JobIncident]:
        """Count an incident. Returns those before it since the job last reached a new step."""
        if incident.step > self._farthest:
            self._since_progress = []
        before = list(self._since_progress)
        self._since_progress.append(incident)
        self._incidents.append(at)
        self._in_vain = len(before)
        self._farthest = max(self._farthest, incident.step)
        return before


def _shown_in(incident: JobIncident, log: Path) -> str:
    """Return where the cause of an incident can be seen."""
    if not incident.setting:
        is_empty = log.is_file() and not log.stat().st_size  # as of a rank that was killed
        return f"see ingot status {log.parent.parent}; its ranks printed nothing" if is_empty else f"see {log}"
    stacks = f"see the stacks in {incident.evidence}; " if incident.evidence else ""
    limit = f"; the limit was {format_seconds(incident.limit)}: {incident.limit_reason}" if incident.limit else ""
    return f"{stacks}if the program does need that time, raise {incident.setting}{limit}"
