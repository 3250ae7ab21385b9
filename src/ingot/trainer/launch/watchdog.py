"""The watchdog of a job: it finds that no rank makes progress any more, from heartbeats and outside of the ranks.

A rank that hangs stops all others within a step, because they wait for it in a collective. So a job hangs if every rank
has been in its phase for longer than that phase may take. A rank whose long phase the others wait for (it reads data,
or writes a manifest) is not overdue, and then nothing hangs.

A phase may take FACTOR times as long as the longest one so far (NVIDIA's resiliency extension has the same default),
but at least launch.watchdog_seconds, so that a pause of the machine is no hang; and launch.watchdog_first_seconds
before one was seen. Time in which the supervisor itself did not run (a suspended machine) does not count.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass

from ingot.schema.launch import Launch
from ingot.trainer.resilience.heartbeat import Beat, Heartbeats, Phase

FACTOR = 5.0
_LATE_SECONDS = 1.0  # a supervisor that looks this much after its last look did not run in between


@dataclass(frozen=True)
class Hang:
    """A job that makes no progress. beats: rank -> its newest heartbeat. seconds: since the last one of any rank.
    limit: the limit of the phase that ran out last, in seconds."""

    beats: dict[int, Beat]
    seconds: float
    limit: float


class Watchdog:
    """Looks at the heartbeats of a job. Limits that it learned stay from one attempt to the next."""

    def __init__(self, launch: Launch, beats: Heartbeats):
        self._launch, self._beats = launch, beats
        self._longest = [0.0] * len(Phase)
        self._looked = self._from = time.monotonic()

    def limit(self, phase: Phase) -> float:
        """Return how long a rank may be in `phase`, in seconds."""
        first, longest = self._launch.watchdog_first_seconds, self._longest[phase]
        if phase is Phase.END:
            return float("inf")
        return min(max(self._launch.watchdog_seconds, FACTOR * longest), first) if longest else first

    def look(self, ended: Collection[int]) -> Hang | None:
        """Return the hang if no rank makes progress, else None. ended: the ranks that are not there any more."""
        now = time.monotonic()
        if now > self._looked + _LATE_SECONDS:
            self._from = now
        self._looked = now
        beats = {rank: self._beats.read(rank) for rank in range(self._beats.ranks) if rank not in ended}
        for phase in Phase:
            self._longest[phase] = max([self._longest[phase], *(beat.longest[phase] for beat in beats.values())])
        if not beats or not self._launch.watchdog_seconds:
            return None
        limits = {rank: self.limit(beat.phase) for rank, beat in beats.items()}
        if any(now <= max(beat.since, self._from) + limits[rank] for rank, beat in beats.items()):
            return None
        last = max(beats, key=lambda rank: beats[rank].since + limits[rank])
        return Hang(beats, now - max(beat.since for beat in beats.values()), limits[last])
