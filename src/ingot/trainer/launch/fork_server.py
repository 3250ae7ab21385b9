"""The process from which the ranks of one machine are forked, in one attempt after the other. No torch of its own.

It imports what the ranks need once, so a rank starts in milliseconds, also after a restart: importing torch takes 1.5 s
of CPU time per process. It stays without threads and without a CUDA context, which a fork would not copy.

Command line: `python -m ingot.trainer.launch.fork_server ORDERS REPORTS RANKS PRELOAD MODULE ARGUMENTS...`. ORDERS and
REPORTS are file descriptors of pipes; PRELOAD has names of modules, separated by commas. Messages are lines of JSON.
The supervisor orders an attempt: {"attempt": 1, "log": PATH, "start": TEXT, "partial": false}
(resilience/start_times.py), with "overrides" of the run file if the attempt has another layout (launch/layouts.py). The
answers are {"ordered": 1, "port": P} at once, {"of": 1, "rank": 0, "code": -9, "at": 12.5, "left": null} when a rank of
attempt 1 has ended (negative: signal number; the time on the monotonic clock), and {"attempt": 1} when all have. An
order without "attempt" asks for the imports only; their end is {"prepared": true}. Without the supervisor, this process
and all ranks are killed by the kernel (resilience/endings.py).

If an attempt is "partial", a rank that loses its peers, or ends for a planned restart, keeps its process: it leaves its
groups and waits (resilience/again.py). The answer is then that it has ended with code 1, and "left" is its process id.
The next attempt begins with those that wait, and forks the others. When one of them ends before, that is reported
likewise.

The ranks find each other in a store that rank 0 opens on a socket made here: no port is chosen before it is bound. It
listens on the loopback address only, unless the order has a "share" of a job on several machines (NodeShare).
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

from ingot.machine.processes import die_with_parent
from ingot.trainer.mesh.environment import SUPERVISOR_VARIABLE
from ingot.trainer.mesh.start import NodeShare
from ingot.trainer.resilience.again import LINE_VARIABLE, Place, line_of_ranks, redirect_errors, send_place
from ingot.trainer.resilience.leaving import LEAVE_SIGNAL
from ingot.trainer.resilience.reports import REPORT_SIGNAL
from ingot.trainer.resilience.start_times import Ordered
from ingot.trainer.resilience.stop_requests import STOP_SIGNALS

_LOOPBACK = "127.0.0.1"


@dataclass
class _Rank:
    """A rank that was forked. place: in its newest attempt. pid_fd: readable when it has ended. line: None if it ends
    when it loses its peers. left: it has left its groups, and waits for the next attempt."""

    place: Place
    pid: int
    pid_fd: int
    line: socket.socket | None
    left: bool = False

    @property
    def number(self) -> int:
        return self.place.share.first + self.place.local_rank


class _Server:
    """The ranks of this machine. orders, reports: file descriptors. ranks: their number. preload: names of modules."""

    def __init__(self, orders: int, reports: int, ranks: int, preload: list[str]):
        self._orders, self._reports, self._number, self._preload = orders, reports, ranks, preload
        self._unread = b""
        self._ranks: dict[int, _Rank] = {}  # by local rank
        self._attempt: int | None = None  # until all its ranks have ended or left
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ)

    def serve(self) -> bool:
        """Serve orders until the supervisor closes their pipe. Returns True in a forked rank."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._hear(key.data, line=key.fileobj is key.data.line)
                    continue
                if not (data := os.read(self._orders, 1 << 16)):
                    return False
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    if self._obey(json.loads(line)):
                        return True
            if self._attempt is not None and all(rank.left for rank in self._ranks.values()):
                self._report(attempt=self._attempt)
                self._attempt = None

    def _hear(self, rank: _Rank, *, line: bool) -> None:
        """Take in that a rank has left its groups, or has ended."""
        if self._ranks.get(rank.place.local_rank) is not rank:
            return  # heard in the same round
        if line and rank.line and _hears(rank.line):
            rank.left = True
            self._report(of=rank.place.attempt, rank=rank.number, code=1, at=time.monotonic(), left=rank.pid)
        elif line and rank.line:
            self._selector.unregister(rank.line)  # it ends
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
            self._forget(rank)
            self._report(of=rank.place.attempt, rank=rank.number, code=code, at=time.monotonic(), left=None)

    def _forget(self, rank: _Rank) -> None:
        del self._ranks[rank.place.local_rank]
        for file in (rank.pid_fd, rank.line):
            with contextlib.suppress(KeyError):
                if file is not None:
                    self._selector.unregister(file)
        os.close(rank.pid_fd)
        if rank.line:
            rank.line.close()

    def _obey(self, order: dict[str, Any]) -> bool:
        """Carry out an order. Returns True in a forked rank."""
        share = NodeShare(**order["share"]) if order.get("share") else None
        listener = self._listener(share) if "attempt" in order else None
        self._report(ordered=order.get("attempt"), port=listener.getsockname()[1] if listener else 0)
        redirect_errors(order["log"])
        began = time.monotonic()
        for module in filter(None, self._preload):
            try:
                importlib.import_module(module)
            except Exception:  # a rank imports it again, and may then fail in another way: this is the cause
                traceback.print_exc()
        gc.freeze()  # a collection in a rank would visit, and so copy, all objects of this process
        if "attempt" not in order:
            self._report(prepared=True)
            return False
        start = Ordered.of_text(order["start"]).after_imports(time.monotonic() - began).to_text()
        if share is None:
            assert listener is not None
            share = NodeShare(first=0, world=self._number, host=_LOOPBACK, port=listener.getsockname()[1])
        elif listener:
            share = replace(share, port=listener.getsockname()[1])
        self._attempt = order["attempt"]
        for local_rank in range(self._number):
            place = Place(
                attempt=order["attempt"],
                local_rank=local_rank,
                ranks=self._number,
                share=share,
                log=order["log"],
                start=start,
                overrides=tuple(order["overrides"]),
            )
            own = listener if share.first + local_rank == 0 else None
            if not self._starts_again(place, own) and self._fork(place, listener, partial=order["partial"]):
                return True
        if listener:
            listener.close()
        return False

    def _listener(self, share: NodeShare | None) -> socket.socket | None:
        """Return the socket of the store of the ranks; None if rank 0 is on another machine."""
        if share is None:
            return socket.create_server((_LOOPBACK, 0), backlog=self._number)
        return None if share.first else socket.create_server((share.host, 0), backlog=share.world)

    def _starts_again(self, place: Place, listener: socket.socket | None) -> bool:
        """Order the rank that waits for this place, if there is one. Returns False if there is none."""
        rank = self._ranks.get(place.local_rank)
        if rank is None or rank.line is None:
            return False
        try:
            send_place(rank.line, place, listener)
        except OSError:  # it has just ended
            os.waitpid(rank.pid, 0)
            self._forget(rank)
            return False
        rank.place, rank.left = place, False
        return True

    def _fork(self, place: Place, listener: socket.socket | None, *, partial: bool) -> bool:
        """Fork a rank. Returns True in the rank, whose environment then describes its place."""
        ours, theirs = line_of_ranks() if partial else (None, None)
        server = os.getpid()
        if pid := os.fork():
            rank = _Rank(place, pid, os.pidfd_open(pid), ours)
            self._ranks[place.local_rank] = rank
            self._selector.register(rank.pid_fd, selectors.EVENT_READ, rank)
            if ours and theirs:
                self._selector.register(ours, selectors.EVENT_READ, rank)
                theirs.close()
            return False
        # At once, not when the rank's module does it: a rank that is stopped before would outlive its launcher.
        die_with_parent()
        if os.getppid() != server:
            os._exit(1)
        self._selector.close()
        for rank in self._ranks.values():
            os.close(rank.pid_fd)
            if rank.line:
                rank.line.close()
        os.close(self._orders)
        os.close(self._reports)
        if ours and theirs:
            ours.close()
            os.environ[LINE_VARIABLE] = str(theirs.detach())
        place.enter(listener)
        return True

    def _report(self, **message: float | None) -> None:
        os.write(self._reports, json.dumps(message).encode() + b"\n")


def _hears(line: socket.socket) -> bool:
    """Return whether a rank has reported that it left; False if it ends."""
    try:
        return bool(line.recv(16))
    except OSError:  # it ended before it read its order
        return False


def main() -> None:
    """Serve orders until the supervisor closes their pipe. In a forked rank: run the job's module and return."""
    die_with_parent()
    if os.getppid() != int(os.environ[SUPERVISOR_VARIABLE]):
        return  # the supervisor died before that took effect
    orders, reports, ranks = map(int, sys.argv[1:4])
    preload, job = sys.argv[4].split(","), sys.argv[5:]
    # A scheduler may signal all processes of a job. The supervisor alone decides then: it asks the ranks to save and
    # stop. A handler that does nothing, not SIG_IGN, which programs that a rank starts would inherit.
    # The supervisor may also ask a rank for its reports, or to leave, before that is ready to do so.
    for number in (*STOP_SIGNALS, REPORT_SIGNAL, LEAVE_SIGNAL):
        signal.signal(number, lambda *_: None)
    if _Server(orders, reports, ranks, preload).serve():
        sys.argv = job  # like `python -m`
        runpy.run_module(job[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
