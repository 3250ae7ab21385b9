"""Faults of a run and how it came back, read from the order of its events."""

from dataclasses import dataclass

from ingot.schema import events as kinds


@dataclass(kw_only=True)
class Incident:
    """One loss of the job and its recovery. Times are Unix seconds, None while unknown.

    cause: for people, a predicate ("was killed (SIGKILL)"). injected_at: when a drill did it on purpose.
    fault_step: the furthest step known to have been reached.
    resumed_from: the checkpoint's step that training went on from; resumed_at: when it did.
    compared_steps: logged in both attempts. compared_equal: all of them with the same bits of loss and gradient norm.
    """

    rank: int | None = None
    cause: str = ""
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
        """From the fault (from its injection, if a drill did it) to the resumed run's start."""
        return None if self.resumed_at is None else self.resumed_at - (self.injected_at or self.detected_at)

    @property
    def redone_steps(self) -> int | None:
        """Steps whose work was lost and done again."""
        return None if self.resumed_from is None else max(self.fault_step - self.resumed_from, 0)


class IncidentReader:
    """`see` every event in order; `found` are the incidents so far. `steps` is read, not changed: step -> its event."""

    def __init__(self, steps: dict[int, dict]):
        self._steps, self.found = steps, []
        self._open: Incident | None = None  # lost, not yet resumed
        self._drill: dict | None = None
        self._redoing: Incident | None = None  # resumed, steps up to fault_step come a second time

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
        if self._open:  # peers of a lost rank fail after it: one incident
            return
        drill_step = (self._drill or {}).get("step") or 0
        self._open = Incident(
            rank=event.get("rank"),
            cause=str(event.get("cause") or "failed"),
            injected_at=self._drill["time"] if self._drill else None,
            detected_at=event["time"],
            fault_step=max(event.get("step") or 0, drill_step, *self._steps, 0),
        )
        self._drill = None
        self.found.append(self._open)

    def _see_step(self, event: dict, incident: Incident) -> None:
        before = self._steps.get(event["step"])
        if before is not None and event["step"] <= incident.fault_step:
            incident.compared_steps += 1
            incident.compared_equal &= before["loss"] == event["loss"] and before["grad_norm"] == event["grad_norm"]
