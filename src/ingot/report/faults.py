"""The faults of a run, from its events: what ended an attempt, and whether the steps that it repeated are equal."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.schema import events as kinds

_OF_ERRORS = ("numerics", "data", "disk", "settings")
_UNLOGGED = "ended, and the log does not show why (SIGKILL of the command, or a power loss)"


@dataclass(kw_only=True)
class FaultRecord:
    """A fault that ended an attempt, and the recovery from it. Times are Unix seconds, None while unknown.

    rank: the failed rank, None for a fault of the whole job. cause: what happened, as text ("was killed (SIGKILL)").
    failure: its kind (resilience/failure_kinds.py), "" if the log lacks it. code: of the error that ended it; "": no
    error did, or the log does not have it. step: at which it ended, None if unknown.
    injected_at: the time at which a drill caused the fault on purpose. fault_step: the last step known to be reached.
    resumed_at, resumed_from: when training continued, and the step of the checkpoint from which it continued.
    by_command: it ended the command, and a new command continued the run: nothing recovered by then.
    restart_seconds: the total of the `start_times` of the restart (resilience/start_times.py).
    compared_steps: the number of steps logged in both attempts. compared_equal: loss and gradient norm are
    bit-identical in all of these.
    """

    rank: int | None = None
    cause: str = ""
    failure: str = ""
    code: str = ""
    step: int | None = None
    injected_at: float | None = None
    detected_at: float
    fault_step: int
    resumed_at: float | None = None
    resumed_from: int | None = None
    by_command: bool = False
    restart_seconds: float | None = None
    compared_steps: int = 0
    compared_equal: bool = True

    @property
    def detect_seconds(self) -> float | None:
        return None if self.injected_at is None else self.detected_at - self.injected_at

    @property
    def recovered(self) -> bool:
        """The supervisor started the ranks again, in the same command."""
        return self.resumed_at is not None and not self.by_command

    @property
    def recover_seconds(self) -> float | None:
        """The seconds from the fault to steps of the usual length, as the restart measured them; in a log without them,
        `gap_seconds`. None for a fault that ended the command."""
        return self.gap_seconds if self.by_command or self.restart_seconds is None else self.restart_seconds

    @property
    def gap_seconds(self) -> float | None:
        """The seconds from the fault (from its injection, if a drill caused it) to the start of the resumed run; None
        for a fault that ended the command."""
        if self.resumed_at is None or self.by_command:
            return None
        return self.resumed_at - (self.injected_at or self.detected_at)

    @property
    def paused_seconds(self) -> float | None:
        """The seconds until a new command continued the run; None if no command did."""
        return self.resumed_at - self.detected_at if self.by_command and self.resumed_at is not None else None

    @property
    def text(self) -> str:
        """The fault as a phrase: the rank, the cause, and the code of the error."""
        who = "the job" if self.rank is None else f"rank {self.rank}"
        says_who = not self.code and self.failure not in _OF_ERRORS  # of an error, the cause is what it found
        code = f" ({self.code})" if self.code else ""
        return f"{who}{'' if says_who else ':'} {self.cause.rstrip('.')}{code}"

    @property
    def redone_steps(self) -> int | None:
        """The number of steps whose work was lost and repeated."""
        return None if self.resumed_from is None else max(self.fault_step - self.resumed_from, 0)


class FaultReader:
    """Finds the faults in the events of a run, which the caller passes in order to `see`. found: the faults so far.

    An attempt without an end in the log, after which a new command starts the run, ended in a fault, too. So did a
    restart that failed before it trained: both faults were over when the next attempt started.

    steps: the last `step` event of each step, with which those of steps that are trained again are compared; the caller
    fills this dict, and the class only reads it. None: nothing is compared.
    """

    def __init__(self, steps: Mapping[int, Mapping[str, Any]] | None = None):
        self._steps, self.found = steps, list[FaultRecord]()
        self._alive = False  # an attempt started, and its end is not in the log
        self._last_time = 0.0
        self._reached = 0  # the last step in the log that the run did not go back from
        self._open: list[FaultRecord] = []  # faults until the start after them; newest last
        self._restarting = False  # the supervisor ordered a restart since the last fault
        self._drill: dict | None = None
        self._started_after: FaultRecord | None = None  # the fault whose restart this attempt is
        self._redone: list[_RedoneSteps] = []

    def see(self, event: dict) -> None:
        kind = event["kind"]
        if kind == kinds.DRILL:
            self._drill = event
        elif kind == kinds.FAULT:
            self._alive = False
            self._see_fault(event, str(event.get("cause") or "failed"))
        elif kind == kinds.RESTART:
            self._restarting = True
        elif kind in (kinds.STOPPED, kinds.FINISHED, kinds.PLANNED_RESTART):
            self._alive, self._drill = False, None
        elif kind == kinds.RUN_STARTED:
            self._see_start(event)
        elif kind == kinds.START_TIMES and self._started_after:
            self._started_after.restart_seconds = event["total_seconds"]
        elif kind == kinds.ROLLED_BACK:  # what follows is trained on other data, or on a state without damage
            self._reached, self._drill = event["to_step"], None
            self._redone.clear()
        elif kind == kinds.STEP:
            self._see_step(event)
        elif kind == kinds.PROGRESS:
            self._reached = event["step"]
        if kind != kinds.RANK_STARTED:  # it is of the next attempt
            self._last_time = event["time"]

    def _see_start(self, event: dict) -> None:
        by_command = event.get("attempt") == 0  # a supervisor counts its attempts from 0
        if by_command and self._alive:
            self._see_fault({"time": self._last_time}, _UNLOGGED)
        for fault in self._open:
            fault.resumed_at, fault.resumed_from = event["time"], event["from_step"]
            fault.by_command = by_command
        for fault in self._open[1:]:  # their attempts trained nothing that was lost
            fault.fault_step = event["from_step"]
        self._started_after = self._open[-1] if self._open and not by_command else None
        self._open.clear()
        self._alive, self._restarting = True, False
        self._reached = event["from_step"]

    def _see_fault(self, event: dict, cause: str) -> None:
        if self._open and not self._restarting:  # ranks that fail after the first rank belong to the same fault
            return
        drill_step = (self._drill or {}).get("step") or 0
        fault = FaultRecord(
            rank=event.get("rank"),
            cause=cause,
            failure=str(event.get("failure") or ""),
            code=str(event.get("code") or ""),
            step=event.get("step"),
            injected_at=self._drill["time"] if self._drill else None,
            detected_at=event["time"],
            fault_step=max(event.get("step") or 0, drill_step, self._reached),
        )
        self._drill, self._restarting = None, False
        if not self._open:
            self._redone.append(_RedoneSteps(fault, self._reached))
        self._open.append(fault)
        self.found.append(fault)

    def _see_step(self, event: dict) -> None:
        step = self._reached = event["step"]
        if self._steps is None or not self._redone:
            return
        before = self._steps.get(step)
        for redone in self._redone:
            if before is not None and redone.compared < step <= redone.logged:
                redone.compared = step
                redone.fault.compared_steps += 1
                redone.fault.compared_equal &= all(_equal(before[name], event[name]) for name in ("loss", "grad_norm"))
        self._redone = [redone for redone in self._redone if step < redone.logged]


@dataclass
class _RedoneSteps:
    """The steps that a fault let the run train again. logged: the last one that the lost attempt had logged. compared:
    the last one that was compared."""

    fault: FaultRecord
    logged: int
    compared: int = 0


def _equal(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)  # NaN, twice
