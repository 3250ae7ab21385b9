"""The repetition of reads of token shards that fail for a while, counted and reported. No torch."""

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
# Errors of a disk, a mount or a network that may pass. A missing file or a permission does not.
_PASSING = {
    errno.EIO,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ETIMEDOUT,
    errno.ESTALE,
    errno.EREMOTEIO,
    errno.ECONNRESET,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENOTCONN,
}
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 5.0  # seconds, doubled with each try


@dataclass(frozen=True, kw_only=True)
class DataTrouble:
    """A read that succeeded in the end. path: "" for a thread that was replaced. reason: of its failure. tries: how
    often it failed. seconds: how long that took."""

    path: str
    reason: str
    tries: int
    seconds: float


class Retries:
    """Repeats reads for at most `seconds` each; 0: not at all."""

    def __init__(self, seconds: float = 0.0):
        self._seconds = seconds
        self._troubles: list[DataTrouble] = []

    def read(self, read: Callable[[], T]) -> T:
        """Return what `read` returns. Raises its OSError if that cannot pass, or does not in time."""
        began, tries, wait, failure = time.monotonic(), 0, _FIRST_WAIT, None
        while True:
            try:
                result = read()
            except OSError as error:
                if error.errno not in _PASSING or time.monotonic() + wait > began + self._seconds:
                    raise
                failure, tries = error, tries + 1
                time.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
                continue
            if failure is not None:
                path, seconds = str(failure.filename or ""), time.monotonic() - began
                reason = failure.strerror or str(failure)
                self._troubles.append(DataTrouble(path=path, reason=reason, tries=tries, seconds=seconds))
            return result

    def take(self) -> tuple[DataTrouble, ...]:
        """Return what went wrong since the last call."""
        troubles, self._troubles = tuple(self._troubles), []
        return troubles
