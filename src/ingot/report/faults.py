"""The faults of a run, from its events: what ended an attempt, and whether the steps that it repeated are equal."""

from dataclasses import dataclass

from ingot.schema import events as kinds


@dataclass(kw_only=True)
class FaultRecord:
    """A fault that ended an attempt, and the recovery from it. Times are Unix seconds, None while unknown.

    rank: the failed rank, None for a fault of the whole job. cause: what happened, as text ("was killed (SIGKILL)").
    failure: its kind (resilience/failure_kinds.py), "" if the log lacks it. step: at which it ended, None if unknown.
    injected_at: the time at which a drill caused the fault on purpose. fault_step: the last step known to be reached.
    resumed_at, resumed_from: when training continued, and the step of the checkpoint from which it continued.
    compared_steps: the number of steps logged in both attempts. compared_equal: loss and gradient norm are
    bit-identical in all of these.
    """

    rank: int | None = None
    cause: str = ""
    failure: str = ""
    step: int | None = None
    injected_at: float | None = None
    detected_at: float
    fault_step: int
    resumed_at: float | None = None
    resumed_from: int | None = None
    compared_steps: int = 0
    compared_equal: bool = True

    @property
    def detect_seconds(self) -> float | None:
        return None if self.injected_at is None else self.detected_at - self.injected_at

    @property
    def recover_seconds(self) -> float | None:
        """The seconds from the fault (from its injection, if a drill caused it) to the start of the resumed run."""
        return None if self.resumed_at is None else self.resumed_at - (self.injected_at or self.detected_at)

    @property
    def redone_steps(self) -> int | None:
        """The number of steps whose work was lost and repeated."""
        return None if self.resumed_from is None else max(self.fault_step - self.resumed_from, 0)


class FaultReader:
    """Finds the faults in the events of a run, which the caller passes in order to `see`. found: the faults so far.

    steps: the last `step` event of each step; the caller fills this dict, and the class only reads it.
    """

    def __init__(self, steps: dict[int, dict]):
        self._steps, self.found = steps, []
        self._open: FaultRecord | None = None  # the last fault, until the restart after it
        self._drill: dict | None = None
        self._redoing: FaultRecord | None = None  # the last fault after which the run resumed

    def see(self, event: dict) -> None:
        kind = event["kind"]
        if kind == kinds.DRILL:
            self._drill = event
        elif kind == kinds.FAULT:
            self._see_fault(event)
        elif kind == kinds.RUN_STARTED and self._open:
            self._open.resumed_at, self._open.resumed_from = event["time"], event["from_step"]
            self._redoing, self._open = self._open, None
        elif kind == kinds.STEP and self._redoing:
            self._see_step(event, self._redoing)

    def _see_fault(self, event: dict) -> None:
        if self._open:  # ranks that fail after the first rank belong to the same fault
            return
        drill_step = (self._drill or {}).get("step") or 0
        self._open = FaultRecord(
            rank=event.get("rank"),
            cause=str(event.get("cause") or "failed"),
            failure=str(event.get("failure") or ""),
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
