"""The loss of a peer in the middle of training, as a rank sees it, and the order to leave the others. No torch.

Gloo raises an error in a rank whose peer is gone. NCCL may not: the device waits for the peer, and the host for the
device, until a timeout. So the launcher sends LEAVE_SIGNAL to each rank that has not left soon after a loss. A thread
of the rank aborts its communicators, which ends the wait of the device, and the main thread raises PeerLost as soon as
it is back in Python: the content of the device's memory is no result, and no code of the step may see it. A rank on a
CPU that computes leaves in the same way.
"""

import contextlib
import re
import signal
import sys
import threading
from collections.abc import Iterator

from ingot.errors import IngotError

LEAVE_SIGNAL = signal.Signals(signal.SIGRTMIN)  # programs that a rank runs may use the other ones

# Messages of Gloo, NCCL and the store (which is on rank 0) about a lost peer. Such an error is an echo: its cause is
# another rank's end.
_ECHO = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|NCCL|gloo|timed out waiting|socket timeout"
    r"|remote server shutdown",
    re.I,
)
_leaves = False  # only the main thread changes it
_ending = threading.Lock()  # a group is not left while another thread aborts it


class PeerLost(Exception):
    """A rank lost its peers in the middle of training. Its own state is healthy, and its threads have ended."""


def is_about_a_peer(message: str) -> bool:
    """Return whether the message of an error is about another rank that was lost, or about the connection to it."""
    return bool(_ECHO.search(message))


@contextlib.contextmanager
def with_peers() -> Iterator[None]:
    """Raise PeerLost for each error of this block that is about a peer, and for LEAVE_SIGNAL, which has no effect
    elsewhere. For the main thread. Nothing of the device waits for a lost peer then."""
    global _leaves
    _leaves = True
    try:
        yield
    except Exception as error:
        if isinstance(error, IngotError) or not is_about_a_peer(str(error)):
            raise
        _leaves = False  # the order to leave must not interrupt this, nor do it again
        end_waits()  # to free the model waits for the device
        raise PeerLost(str(error)) from error
    finally:
        _leaves = False


def install_leaving() -> None:
    """Install the handler of LEAVE_SIGNAL. The thread that is woken by signals has to call `obey`."""
    signal.signal(LEAVE_SIGNAL, _leave)


def obey() -> None:
    """End the waits for a lost peer if this rank is in training. For another thread than the main one, which may wait
    for the device."""
    with _ending:
        if _leaves:
            _abort()


def end_waits() -> None:
    """End the waits of the device of this rank for a lost peer, and wait until they have ended. Its groups are of no
    use after that, but to be left."""
    with _ending:
        _abort()


def _abort() -> None:
    if "torch.distributed" in sys.modules:
        from ingot.trainer.torch_private import abort_communicators

        abort_communicators()


def _leave(*_: object) -> None:
    if _leaves:
        raise PeerLost("connection closed by peer: the launcher reports that a rank is lost")
