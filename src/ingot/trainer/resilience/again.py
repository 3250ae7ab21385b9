"""A rank that starts again in its own process, after it lost a peer, or for a planned restart. No torch.

A rank that lost its peers is healthy: its process, what it imported and compiled, and its device stay, if the run
wants that (launch.restart = "partial"). It leaves its groups, reports that to its fork server, and waits for the next
attempt, in which it may have another rank and layout. Its model is built anew, and the state comes from where every
start takes it (trainer/restore.py). A rank that has saved and ended for a planned restart does the same.
"""

import gc
import json
import os
import socket
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.config import from_dict
from ingot.trainer.mesh.environment import order_overrides
from ingot.trainer.mesh.start import NodeShare, enter_rank, stop
from ingot.trainer.resilience.reports import forget_calls
from ingot.trainer.resilience.start_times import START_VARIABLE

LINE_VARIABLE = "INGOT_LINE_FD"  # the file descriptor of the line to the fork server, in the environment of a rank
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a rank in an attempt, as its fork server orders it. log: the path of its standard error. start: see
    START_VARIABLE. overrides: see order_overrides. The rest as in enter_rank."""

    attempt: int
    local_rank: int
    ranks: int
    share: NodeShare
    log: str
    start: str
    overrides: tuple[str, ...] = ()

    def enter(self, listener: socket.socket | None) -> None:
        """Make this process the rank. listener: of the store, with rank 0."""
        redirect_errors(self.log)
        os.environ[START_VARIABLE] = self.start
        order_overrides(self.overrides)
        enter_rank(self.local_rank, self.ranks, listener, self.attempt, self.share)


def line_of_ranks() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a line: the fork server's and the rank's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_place(line: socket.socket, place: Place, listener: socket.socket | None) -> None:
    """Order the rank at the other end of `line` to start again. Raises OSError if it is gone."""
    fds = [] if listener is None else [listener.fileno()]
    socket.send_fds(line, [json.dumps(asdict(place)).encode()], fds)


class RankLine:
    """The line of this rank to its fork server."""

    def __init__(self, end: socket.socket):
        self._end = end

    def start_again(self) -> None:
        """Leave the job, and wait for the next attempt; then the environment describes this rank's place in it.

        Ends the process if there is none: the fork server is gone.
        """
        gc.collect()  # the model is in cycles of references
        stop()  # peers that wait for this rank lose it now, and leave as well
        forget_calls()
        try:
            self._end.sendall(b"left")
            message, fds, *_ = socket.recv_fds(self._end, _MOST_BYTES, 1)
        except OSError:
            message, fds = b"", []
        if not message:
            os._exit(1)
        from_dict(Place, json.loads(message)).enter(socket.socket(fileno=fds[0]) if fds else None)


def open_line() -> RankLine | None:
    """Return the line of this process; None if it cannot start again."""
    fd = os.environ.get(LINE_VARIABLE)
    return None if fd is None else RankLine(socket.socket(fileno=int(fd)))


def forget(error: BaseException | None) -> None:
    """Release what the frames of an error and of its causes hold: the whole model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def redirect_errors(log: str) -> None:
    """Write the standard error of this process to the end of the file `log`."""
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 2)
