"""The process from which the ranks of one machine are forked, in one attempt after the other. No torch of its own.

It imports what the ranks need once, so a rank starts in milliseconds, also after a restart: importing torch takes 1.5 s
of CPU time per process. It stays without threads and without a CUDA context, which a fork would not copy.

Command line: `python -m ingot.trainer.launch.fork_server ORDERS REPORTS RANKS PRELOAD MODULE ARGUMENTS...`. ORDERS and
REPORTS are file descriptors of pipes; PRELOAD has names of modules, separated by commas. Messages are lines of JSON.
The supervisor orders an attempt: {"attempt": 1, "log": PATH, "start": TEXT} (resilience/start_times.py). The answers
are {"ordered": 1, "port": P} at once, {"rank": 0, "code": -9, "at": 12.5} when a rank has ended (negative: signal
number; the time on the monotonic clock), and {"attempt": 1} when all have. An order without "attempt" asks for the
imports only. Without the supervisor, this process and all ranks are killed by the kernel (resilience/endings.py).

The ranks find each other in a store that rank 0 opens on a socket made here: no port is chosen before it is bound. It
listens on the loopback address only, unless the order has a "share" of a job on several machines (NodeShare).
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

from ingot.machine.processes import die_with_parent
from ingot.trainer.mesh.start import NodeShare, enter_rank
from ingot.trainer.resilience.endings import SUPERVISOR_VARIABLE
from ingot.trainer.resilience.reports import REPORT_SIGNAL
from ingot.trainer.resilience.start_times import START_VARIABLE, Ordered
from ingot.trainer.resilience.stop_requests import STOP_SIGNALS

_LOOPBACK = "127.0.0.1"


def main() -> None:
    """Serve orders until the supervisor closes their pipe. In a forked rank: run the job's module and return."""
    die_with_parent()
    if os.getppid() != int(os.environ[SUPERVISOR_VARIABLE]):
        return  # the supervisor died before that took effect
    orders, reports, ranks = os.fdopen(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    preload, job = sys.argv[4].split(","), sys.argv[5:]
    # A scheduler may signal all processes of a job. The supervisor alone decides then: it asks the ranks to save and
    # stop. A handler that does nothing, not SIG_IGN, which programs that a rank starts would inherit.
    # The supervisor may also ask a rank for its reports before that is ready to give them.
    for number in (*STOP_SIGNALS, REPORT_SIGNAL):
        signal.signal(number, lambda *_: None)
    for line in orders:
        order = json.loads(line)
        share = NodeShare(**order["share"]) if order.get("share") else None
        listener = _listener(ranks, share) if "attempt" in order else None
        _report(reports, ordered=order.get("attempt"), port=listener.getsockname()[1] if listener else 0)
        _redirect_errors(order["log"])
        began = time.monotonic()
        for module in filter(None, preload):
            try:
                importlib.import_module(module)
            except Exception:  # a rank imports it again, and may then fail in another way: this is the cause
                traceback.print_exc()
        gc.freeze()  # a collection in a rank would visit, and so copy, all objects of this process
        if "attempt" not in order:
            continue
        imported = time.monotonic() - began
        os.environ[START_VARIABLE] = Ordered.of_text(order["start"]).after_imports(imported).to_text()
        running = _fork(ranks, order["attempt"], listener, share)
        if running is None:
            orders.close()
            os.close(reports)
            _run(job)
            return
        while running:
            pid, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
            _report(reports, rank=running.pop(pid), code=code, at=time.monotonic())
        _report(reports, attempt=order["attempt"])


def _redirect_errors(log: str) -> None:
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 2)


def _listener(ranks: int, share: NodeShare | None) -> socket.socket | None:
    """Return the socket of the store of the ranks; None if rank 0 is on another machine."""
    if share is None:
        return socket.create_server((_LOOPBACK, 0), backlog=ranks)
    return None if share.first else socket.create_server((share.host, 0), backlog=share.world)


def _fork(ranks: int, attempt: int, listener: socket.socket | None, share: NodeShare | None) -> dict[int, int] | None:
    """Fork the ranks. Returns process id -> rank; None in a rank, whose environment then describes its place."""
    running = {}
    if share and listener:
        share = replace(share, port=listener.getsockname()[1])
    for local_rank in range(ranks):
        if pid := os.fork():
            running[pid] = local_rank + (share.first if share else 0)
            continue
        enter_rank(local_rank, ranks, listener, attempt, share)
        return None
    if listener:
        listener.close()
    return running


def _run(job: list[str]) -> None:
    """Run the module job[0] with the other strings as its arguments, like `python -m`."""
    sys.argv = job
    runpy.run_module(job[0], run_name="__main__", alter_sys=True)


def _report(pipe: int, **message: float | None) -> None:
    os.write(pipe, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
