"""The faults of a run, from its events: what ended an attempt, and whether the steps that it repeated are equal."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.schema import events as kinds

_OF_ERRORS = ("numerics", "data", "disk", "settings")
_UNLOGGED = "ended without an event in the log (as after SIGKILL of the command, or a power loss)"
# Events by which the ranks show that they train.
_SIGNS = (kinds.RUN_STARTED, kinds.STEP, kinds.PROGRESS, kinds.CHECKPOINT)


@dataclass(kw_only=True)
class FaultRecord:
    """A fault that ended an attempt, and the recovery from it. Times are Unix seconds, None while unknown.

    rank: the failed rank, None for a fault of the whole job. cause: what happened, as text ("was killed (SIGKILL)").
    failure: its kind (resilience/failure_kinds.py), "" if the log lacks it. code: of the error that ended it; "": no
    error did, or the log does not have it. step: at which it ended, None if unknown.
    injected_at: the time at which a drill caused the fault on purpose. fault_step: the last step known to be reached.
    resumed_at: when the next attempt trained. resumed_from: the step of the checkpoint from which the run continued, be
    it after more faults. next_fault_at: the time of the next fault, if no attempt trained before it; resumed_at is None
    then. before_training: it ended an attempt before that trained, so no steps were lost.
    trained_at: when the same command trained again, be it after more faults; None if it did not, or not yet.
    by_command: it ended the command, and a new command followed: nothing recovered by then.
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
    next_fault_at: float | None = None
    before_training: bool = False
    trained_at: float | None = None
    by_command: bool = False
    restart_seconds: float | None = None
    compared_steps: int = 0
    compared_equal: bool = True

    @property
    def detect_seconds(self) -> float | None:
        return None if self.injected_at is None else self.detected_at - self.injected_at

    @property
    def recovered(self) -> bool:
        """The same command trained again."""
        return self.trained_at is not None

    @property
    def is_open(self) -> bool:
        """Nothing followed: the run did not go on, or not yet."""
        return self.resumed_at is None and self.next_fault_at is None

    @property
    def recover_seconds(self) -> float | None:
        """The seconds from the fault to steps of the usual length, as the restart measured them; without such a
        measure, those to the start of the attempt that trained. None for a fault after which the same command did not
        train again."""
        if self.trained_at is None or self.restart_seconds is not None:
            return self.restart_seconds
        return self.trained_at - (self.injected_at or self.detected_at)

    @property
    def gap_seconds(self) -> float | None:
        """The seconds from the fault (from its injection, if a drill caused it) to the start of the attempt that
        trained, or to the next fault before that; None for a fault after which the same command did not train again."""
        until = self.resumed_at if self.next_fault_at is None else self.next_fault_at
        return None if self.trained_at is None or until is None else until - (self.injected_at or self.detected_at)

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
        """The number of steps whose work was lost and repeated; None as long as no attempt trained after the fault."""
        if self.resumed_from is None:
            return None
        return 0 if self.before_training else max(self.fault_step - self.resumed_from, 0)


def fault_of(event: Mapping[str, Any], *, fault_step: int = 0, injected_at: float | None = None) -> FaultRecord:
    """Return the record of a `fault` event, without what followed."""
    return FaultRecord(
        rank=event.get("rank"),
        cause=str(event.get("cause") or "failed"),
        failure=str(event.get("failure") or ""),
        code=str(event.get("code") or ""),
        step=event.get("step"),
        injected_at=injected_at,
        detected_at=event["time"],
        fault_step=max(event.get("step") or 0, fault_step),
    )


def count_ends(faults: Iterable[FaultRecord], *, running: bool) -> tuple[int, int]:
    """Return how many faults the command recovered from, and how many ended it. running: a command runs now; the fault
    that nothing followed yet is neither then."""
    faults = list(faults)
    ended = sum(fault.by_command or (fault.is_open and not running) for fault in faults)
    return sum(fault.recovered for fault in faults), ended


class FaultReader:
    """Finds the faults in the events of a run, which the caller passes in order to `see`. found: the faults so far.

    The supervisor writes one `fault` event per attempt. An attempt without an end in the log, after which a new command
    begins, ended in a fault, too. A command counts its attempts from 0. On several nodes, so does a launcher that takes
    the lead over and goes on with the job (trainer/launch/handover.py): the `node` events show that. A leader that
    steps down waits for the next one, so the job goes on as soon as a launcher of it takes part again.

    steps: the last `step` event of each step, to compare the steps that were trained again; the caller fills this dict,
    and the class only reads it. None: compare nothing.
    """

    def __init__(self, steps: Mapping[int, Any] | None = None):
        self._steps, self.found = steps, list[FaultRecord]()
        self._redone: list[_RedoneSteps] = []
        self._alive = False  # an attempt started, and its end is not in the log
        self._sign = 0.0  # the time of the newest sign of training
        self._reached = 0  # the newest step
        self._drill: dict | None = None
        self._open: list[FaultRecord] = []  # the faults of the newest command since it trained last
        self._lost: list[FaultRecord] = []  # the faults of all commands since the run trained last
        self._new_command = self._restarted = False  # since the last fault: what follows it
        self._led = False  # a launcher began to lead, and its first attempt has not begun
        self._members: set[tuple[str, ...]] = set()  # launchers of the job on several nodes
        self._earlier: set[tuple[str, ...]] = set()  # those of the job before it
        self._left: list[FaultRecord] = []  # the faults that were open when the newest job began
        self._led_to: float | None = None  # when that job trained first
        self._timed: FaultRecord | None = None  # the fault from which this attempt recovers

    def see(self, event: dict) -> None:
        kind = event["kind"]
        if kind == kinds.DRILL:
            self._drill = event
        elif kind == kinds.NODE:
            self._see_node(event)
        elif kind == kinds.FAULT:
            self._see_fault(event)
        elif kind == kinds.RESTART:
            self._restarted = True
        elif kind in (kinds.STOPPED, kinds.FINISHED, kinds.PLANNED_RESTART):
            self._alive, self._led, self._drill = False, False, None
            if kinds.ends_run(kind, event):
                self._members, self._earlier, self._left = set(), set(), []
        elif kind == kinds.RANK_STARTED:
            # Lines of other ranks may come late into a file that several machines write.
            in_order = event.get("rank") == 0 or (self._open and not self._members)
            if in_order and self._is_first_attempt(event):
                self._begin_command()
        elif kind == kinds.RUN_STARTED:
            if self._is_first_attempt(event):
                self._begin_command()
            self._see_start(event)
        elif kind == kinds.START_TIMES:
            self._see_times(event)
        elif kind == kinds.STEP:
            self._see_step(event)
        elif kind == kinds.PROGRESS:
            self._reached = event["step"]
        elif kind == kinds.ROLLED_BACK:  # what follows is trained on other data, or on a state without damage
            self._reached, self._drill = event["to_step"], None
            self._redone.clear()
        if kind in _SIGNS:
            self._sign = event["time"]

    def _is_first_attempt(self, event: dict) -> bool:
        return event.get("attempt") == 0 and not self._led

    def _see_node(self, event: dict) -> None:
        who, action = kinds.launcher_of(event), event.get("action")
        if action == "leads":
            self._led = True
            if who in self._members:
                self._restarted = True
            else:
                self._members, self._earlier = set(), self._members
                if self._open and (self._open[-1].rank, self._open[-1].failure) == (0, "node"):
                    self._open[-1].detected_at = self._sign  # this leader recorded the loss of the one before it
                self._begin_command()
                self._left, self._led_to = list(self._open), None
        elif action == "joined":
            if who in self._earlier:  # the same job, under a leader that is new to it
                self._new_command, self._restarted = False, True
                self._take_back_end()
        else:
            return
        self._members.add(who)

    def _take_back_end(self) -> None:
        """Count the faults before the newest leader as those of its job, also if its ranks began before that showed."""
        if self._left and self._left[-1].by_command:
            self._left[-1].by_command = False
            if self._led_to is None:
                self._open[:0] = self._left
            for fault in self._left:
                fault.trained_at = self._led_to
        self._left = []

    def _begin_command(self) -> None:
        if self._alive:
            self._drill = None  # nothing noticed what it did
            self._see_fault({"time": self._sign, "cause": _UNLOGGED})
        self._new_command = True

    def _see_fault(self, event: dict) -> None:
        drill = self._drill or {}
        fault_step = max(drill.get("step") or 0, self._reached)
        found = fault_of(event, fault_step=fault_step, injected_at=drill.get("time"))
        found.before_training = bool(self._lost)
        if not self._lost:
            self._redone.append(_RedoneSteps(found, self._reached))
        self._drill, self._alive, self._led = None, False, False
        if self._open:
            self._open[-1].next_fault_at = found.detected_at
            if self._new_command or not self._restarted:
                self._open[-1].by_command = True
                self._open.clear()
        self._new_command = self._restarted = False
        for faults in (self._open, self._lost, self.found):
            faults.append(found)

    def _see_start(self, event: dict) -> None:
        self._timed = None
        self._led_to = event["time"] if self._led_to is None else self._led_to
        for fault in self._lost:
            fault.resumed_from = event["from_step"]
        self._lost.clear()
        if self._open:
            last = self._open[-1]
            last.resumed_at, last.by_command = event["time"], self._new_command
            if not self._new_command:
                self._timed = last
                for fault in self._open:
                    fault.trained_at = event["time"]
            self._open.clear()
        self._new_command = self._restarted = self._led = False
        self._alive, self._reached = True, event["from_step"]

    def _see_times(self, event: dict) -> None:
        seconds = event.get("seconds")
        # Without a time in which ranks ended, it is the start of a launcher: that of the next leader, for example.
        if self._timed and isinstance(seconds, dict) and seconds.get("kill") is not None:
            self._timed.restart_seconds = event["total_seconds"]

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
