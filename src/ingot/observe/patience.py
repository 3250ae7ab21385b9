"""Calls of a sink that raise: a tracker that is away gets them later, and a call that is itself at fault is left out.

A call that raises is tried again, after pauses that double. If it still raises after some attempts, it is held, and the
next call of the same method is tried: if that returns, the fault is that of the held call, and it is left out; if that
raises, too, the tracker is away, and both wait. A call that no other of its method follows is left out if it still
raises after an hour, while calls of other methods return.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 300.0
_ATTEMPTS = 5  # in a row, before a call is held
_MOST_HELD = 64  # of a method; if all of them raise, the next one waits for as long as that takes
_HELD_SECONDS = 3600.0  # at most, while calls of other methods return
# Errors that are the same in the next attempt. Those of connections and disks are others.
_OF_THE_CALL = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)


class LogPlace(NamedTuple):
    """A place in the event log between two calls of a sink. position: the end of the event before. begun: starts of
    ranks and roll-backs until there. done: calls of the event that came before this place."""

    position: int
    begun: int
    done: int


@dataclass(frozen=True)
class SinkCall:
    """A call of a sink. method: its name. call: makes it. place: before it. is_empty: the sink has no such method of
    its own, so the call returns also while its tracker is away. made_at: by time.monotonic()."""

    method: str
    call: Callable[[], None]
    place: LogPlace
    is_empty: bool = False
    made_at: float = field(default_factory=time.monotonic)


class RunEnds(Exception):
    """The run ends while a call raises."""


class PatientCalls:
    """The calls of one sink, which are given in order.

    begins: called before each attempt of a call, with its place. raised: called with each error. wait: waits for so
    many seconds, and returns True if the run ends and its time is over. sent, left_out: the numbers of calls so far.
    """

    def __init__(
        self, begins: Callable[[LogPlace], None], raised: Callable[[Exception], None], wait: Callable[[float], bool]
    ):
        self._begins, self._raised, self._wait = begins, raised, wait
        self._held: dict[str, deque[SinkCall]] = {}
        self.sent = self.left_out = 0

    @property
    def first_held(self) -> LogPlace | None:
        """The place before the first call that is held; None without one."""
        return min((calls[0].place for calls in self._held.values() if calls), default=None)

    def give(self, one: SinkCall) -> None:
        """Make a call, until it returns, is held or left out. Raises RunEnds."""
        held, attempts, pause = self._held.setdefault(one.method, deque()), 0, _FIRST_PAUSE_SECONDS
        while True:
            if held and self._returns(held[0]):
                held.popleft()
                attempts, pause = 0, _FIRST_PAUSE_SECONDS
                continue
            error = self._error_of(one)
            if error is None:
                while held:  # these raise although others do not
                    self._decide(held)
                if not one.is_empty:
                    self.decide(_HELD_SECONDS)
                return
            attempts += 1
            if isinstance(error, _OF_THE_CALL) and not isinstance(error, OSError):
                self.left_out += 1
                return
            if attempts >= _ATTEMPTS and len(held) < _MOST_HELD:
                held.append(one)
                return
            if self._wait(pause):
                raise RunEnds
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def finish(self) -> None:
        """Make the calls that are held once more, at the end of the run."""
        for held in self._held.values():
            while held and self._returns(held[0]):
                held.popleft()

    def decide(self, seconds: float) -> None:
        """Make the calls that were given more than `seconds` ago, and are held, for the last time."""
        for held in self._held.values():
            while held and time.monotonic() >= held[0].made_at + seconds:
                self._decide(held)

    def _decide(self, held: deque[SinkCall]) -> None:
        """Make the first of the calls that are held for the last time."""
        self.left_out += not self._returns(held[0])
        held.popleft()  # not before: a process that ends in the call must not lose it

    def _returns(self, one: SinkCall) -> bool:
        return self._error_of(one) is None

    def _error_of(self, one: SinkCall) -> Exception | None:
        self._begins(one.place)
        try:
            one.call()
        except Exception as error:
            self._raised(error)
            return error
        self.sent += 1
        return None
