"""The watchdog of a job: it finds that no rank makes progress any more, from heartbeats and outside of the ranks.

A rank that hangs stops all others within a step, because they wait for it in a collective. So a job hangs if every rank
is overdue: it has been in its phase for longer than that phase may take. A rank that the others wait for with good
reason (it reads slow data, or a callback of rank 0 computes) is not overdue, and then nothing hangs. A process that has
been stopped for as long as a step may take is a hang whatever the others do. Where some ranks are overdue in a step and
the others are elsewhere, in a save or a callback, these may wait for those: only their collectives show it.

A step may take FACTOR times as long as the longest one so far (NVIDIA's resiliency extension has the same default), or
twice as long as a first step, which compiles; but at least launch.watchdog_seconds. The first step of a later attempt
may take FACTOR times as long as those before it.

A save may take WHOLE_FACTOR times as long as the longest one so far, and an evaluation likewise, but at least LEAST
times launch.watchdog_seconds. What counts is the whole work, as the ranks report it: with what a save wrote after
training went on, and without evaluations of a single batch. If training has to wait for a save in the background that
is older than all before, the disk is slower now, so its age counts as well. Until a whole one has ended, and if
WHOLE_FACTOR times the longest is more, launch.watchdog_other_seconds is the limit. launch.watchdog_save and
launch.watchdog_evaluate may give a limit instead.

Any other phase, and the very first step, may take launch.watchdog_other_seconds: how long it took before says little,
because a start may have more to load, and a callback may compute for minutes every thousandth line. A rank that leaves
a job whose end is reported has nothing to do that could take longer than a step: groups are known to hang when they are
destroyed. Time in which the supervisor itself did not run (a suspended machine) does not count.
"""

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.schema.launch import Launch
from ingot.trainer.checkpoint.uploader import UPLOAD_SECONDS
from ingot.trainer.resilience.heartbeat import REPORTED, Beat, Heartbeats, Phase
from ingot.units import format_seconds

FACTOR, RECOMPILES = 5.0, 2.0
WHOLE_FACTOR, LEAST = 10.0, 5.0  # of saves and evaluations: the last save waits for the one before
STOPPED = "Tt"  # states of a process in /proc
LOOK_SECONDS = 0.2  # between two looks
_CALM_SECONDS, _FAR_SECONDS = 0.5, 1.0  # the same while every rank has more than this left, and none is stopped
_LATE_SECONDS = 0.8  # a supervisor that looks this much later than it has to did not run in between
_STATE_SECONDS = 0.3  # a rank that was in its phase for less is not asked for its state


@dataclass(frozen=True)
class Hang:
    """A job that makes no progress. beats: rank -> its newest heartbeat. seconds: since the last one of any rank.
    limit: the limit that ran out last, in seconds; setting: the one that it follows from; reason: how it follows, for
    people. suspects: ranks that are overdue in a step while the others are not in one, and may wait for them: a hang if
    the collectives show that. Empty for a certain hang."""

    beats: dict[int, Beat]
    seconds: float
    limit: float
    setting: str
    suspects: frozenset[int] = frozenset()
    reason: str = ""


class Watchdog:
    """Looks at the heartbeats of a job. The times that it learned stay from one attempt to the next.

    look_seconds: the time until the next look has to follow, as the last one found.
    """

    def __init__(self, launch: Launch, beats: Heartbeats):
        self._launch, self._beats = launch, beats
        self._step = self._first_step = 0.0  # the longest so far [s]
        self._whole = dict.fromkeys(REPORTED, 0.0)  # phase -> the longest whole one so far [s]
        self._in_flight = 0.0  # the age of a save that ranks wait for now [s]
        self._looked, self._lost = time.monotonic(), 0.0
        self._lost_before: dict[int, tuple[int, float]] = {}  # rank -> its beat, and self._lost when that was new
        self._stopped: dict[int, float] = {}  # rank -> since when its process was seen stopped
        self._suspected = -math.inf  # when ranks were suspects last
        self.look_seconds = LOOK_SECONDS

    def limit(self, phase: Phase) -> float:
        """Return how long a rank may be in `phase`, in seconds."""
        if phase is Phase.STEP:
            return max(self._launch.watchdog_seconds, FACTOR * self._step, RECOMPILES * self._first_step)
        if phase is Phase.COMPILE and self._first_step:
            return max(self._launch.watchdog_seconds, FACTOR * self._first_step)
        if phase is Phase.LEAVE:
            return self._launch.watchdog_seconds
        if phase in REPORTED:
            fixed, learned = self._fixed(phase), self._learned(phase)
            return fixed or min(learned or math.inf, self._launch.watchdog_other_seconds)
        return self._launch.watchdog_other_seconds + (UPLOAD_SECONDS if phase is Phase.END else 0.0)

    def _fixed(self, phase: Phase) -> float | None:
        """Return the limit of saves or evaluations that the run file gives; None for "auto"."""
        launch = self._launch
        return launch.watchdog_save_limit if phase is Phase.SAVE else launch.watchdog_evaluate_limit

    def _learned(self, phase: Phase) -> float:
        """Return the limit of saves or evaluations by those that have ended; 0 before one has."""
        if not self._whole[phase]:
            return 0.0
        longest = WHOLE_FACTOR * max(self._whole[phase], self._in_flight if phase is Phase.SAVE else 0.0)
        again = RECOMPILES * self._first_step if phase is Phase.EVALUATE else 0.0  # a batch of another shape
        return max(LEAST * self._launch.watchdog_seconds, longest, again)

    def _origin(self, phase: Phase) -> tuple[str, str]:
        """Return the setting that the limit of `phase` follows from, and how, in words."""
        if phase is Phase.STEP or (phase is Phase.COMPILE and self._first_step) or phase is Phase.LEAVE:
            words = f"launch.watchdog_seconds = {self._launch.watchdog_seconds:g}"
            if self.limit(phase) > self._launch.watchdog_seconds:
                first = f", the longest first one {format_seconds(self._first_step)}" if self._first_step else ""
                words += f", the longest step so far took {format_seconds(self._step)}{first}"
            return "launch.watchdog_seconds", words
        setting = {Phase.SAVE: "launch.watchdog_save", Phase.EVALUATE: "launch.watchdog_evaluate"}.get(phase)
        other = self._launch.watchdog_other_seconds
        if setting and (fixed := self._fixed(phase)):
            return setting, f"{setting} = {format_seconds(fixed)}"
        if setting and self.limit(phase) < other:
            longest = format_seconds(self._whole[phase])
            return setting, f'{setting} = "auto", the longest one so far took {longest}'
        return "launch.watchdog_other_seconds", f"launch.watchdog_other_seconds = {other:g}"

    def look(self, ended: Collection[int]) -> Hang | None:
        """Return the hang if no rank makes progress, or may make none, else None. ended: the ranks that are gone."""
        now = time.monotonic()
        if now > self._looked + self.look_seconds + _LATE_SECONDS:
            self._lost += now - self._looked
            self._stopped.clear()
        self._looked, self.look_seconds = now, LOOK_SECONDS
        beats = {rank: self._beats.read(rank) for rank in range(self._beats.ranks) if rank not in ended}
        self._step = max([self._step, *(beat.longest[Phase.STEP] for beat in beats.values())])
        self._first_step = max([self._first_step, *(beat.longest[Phase.COMPILE] for beat in beats.values())])
        for phase in REPORTED:
            self._whole[phase] = max([self._whole[phase], *(beat.longest[phase] for beat in beats.values())])
        self._in_flight = max((beat.in_flight for beat in beats.values()), default=0.0)
        if not beats or not self._launch.watchdog_seconds:
            return None
        left = {rank: self.limit(beat.phase) - self._seconds(rank, beat, now) for rank, beat in beats.items()}
        stopped = max((now - self._stopped.get(rank, now) for rank in beats), default=0.0)
        last, suspects = beats[max(left, key=lambda rank: left[rank])].phase, frozenset[int]()
        if stopped > self.limit(Phase.STEP):
            last = Phase.STEP
        elif max(left.values()) >= 0:
            suspects = self._suspects(beats, left, now)
            if not suspects:
                if not self._stopped and min(left.values()) > _FAR_SECONDS:
                    self.look_seconds = _CALM_SECONDS
                return None
            last = Phase.STEP
        setting, reason = self._origin(last)
        seconds = now - max(beat.since for beat in beats.values())
        return Hang(beats, seconds, self.limit(last), setting, suspects, reason)

    def _suspects(self, beats: Mapping[int, Beat], left: Mapping[int, float], now: float) -> frozenset[int]:
        """Return the ranks that are overdue in a step, if the others are elsewhere: they may wait for these, and phases
        do not show that. Not again within the limit of a step, because an answer takes the ranks some time."""
        overdue = frozenset(rank for rank, beat in beats.items() if beat.phase is Phase.STEP and left[rank] < 0)
        elsewhere = all(beats[rank].phase is not Phase.STEP for rank in beats if rank not in overdue)
        if not overdue or not elsewhere or now < self._suspected + self.limit(Phase.STEP):
            return frozenset()
        self._suspected = now
        return overdue

    def _seconds(self, rank: int, beat: Beat, now: float) -> float:
        """Return how long a rank has been in its phase, and note since when its process is stopped."""
        if self._lost_before.get(rank, (-1, 0.0))[0] != beat.count:
            self._lost_before[rank] = beat.count, self._lost
        took = now - beat.since - (self._lost - self._lost_before[rank][1])
        if took < _STATE_SECONDS or state_of(beat.pid) not in STOPPED:
            self._stopped.pop(rank, None)
        else:
            self._stopped.setdefault(rank, now)
        return took


def state_of(pid: int) -> str:
    """Return the state letter of a process, as in ps; "-" if it is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "-"
