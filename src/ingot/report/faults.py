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

    An attempt without an end in the log, after which a new command starts the run, ended in a fault, too.

    steps: the last `step` event of each step; the caller fills this dict, and the class only reads it. compares: also
    compare the steps that were trained again; else the values of `steps` may be anything.
    """

    def __init__(self, steps: Mapping[int, Any], *, compares: bool = True):
        self._steps, self._compares, self.found = steps, compares, list[FaultRecord]()
        self._alive = False  # an attempt started, and its end is not in the log
        self._last_time = 0.0
        self._open: FaultRecord | None = None  # the last fault, until the restart after it
        self._drill: dict | None = None
        self._redoing: FaultRecord | None = None  # the last fault after which the run resumed

    def see(self, event: dict) -> None:
        kind = event["kind"]
        if kind == kinds.DRILL:
            self._drill = event
        elif kind == kinds.FAULT:
            self._alive = False
            self._see_fault(event, str(event.get("cause") or "failed"))
        elif kind in (kinds.STOPPED, kinds.FINISHED, kinds.PLANNED_RESTART):
            self._alive = False
        elif kind == kinds.RUN_STARTED:
            self._see_start(event)
        elif kind == kinds.START_TIMES and self._redoing and not self._redoing.by_command:
            self._redoing.restart_seconds = event["total_seconds"]
        elif kind == kinds.STEP and self._redoing and self._compares:
            self._see_step(event, self._redoing)
        if kind != kinds.RANK_STARTED:  # it is of the next attempt
            self._last_time = event["time"]

    def _see_start(self, event: dict) -> None:
        by_command = event.get("attempt") == 0  # a supervisor counts its attempts from 0
        if by_command and self._alive:
            self._see_fault({"time": self._last_time}, _UNLOGGED)
        self._alive = True
        if self._open:
            self._open.resumed_at, self._open.resumed_from = event["time"], event["from_step"]
            self._open.by_command = by_command
            self._redoing, self._open = self._open, None

    def _see_fault(self, event: dict, cause: str) -> None:
        if self._open:  # ranks that fail after the first rank belong to the same fault
            return
        drill_step = (self._drill or {}).get("step") or 0
        self._open = FaultRecord(
            rank=event.get("rank"),
            cause=cause,
            failure=str(event.get("failure") or ""),
            code=str(event.get("code") or ""),
            step=event.get("step"),
            injected_at=self._drill["time"] if self._drill else None,
            detected_at=event["time"],
            fault_step=max(event.get("step") or 0, drill_step, *self._steps, 0),
        )
        self._drill = None
        self.found.append(self._open)

    def _see_step(self, event: dict, fault: FaultRecord) -> None:
        before = self._steps.get(event["step"])
        if before is not None and event["step"] <= fault.fault_step:
            fault.compared_steps += 1
            fault.compared_equal &= before["loss"] == event["loss"] and before["grad_norm"] == event["grad_norm"]
