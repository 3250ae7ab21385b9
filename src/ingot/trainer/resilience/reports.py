"""The reports of this rank for a supervisor that finds it hung: Python stacks, and the collectives that it is in.

A signal asks for them. faulthandler writes the stacks of all threads within the signal handler, also while the
interpreter lock is held in native code. A thread writes the collectives; it needs that lock, so a rank that does not
answer holds it. Both write to memory files, which the supervisor opens through /proc; they end with the process. The
same thread carries out the order to leave lost peers (leaving.py).
"""

import faulthandler
import fcntl
import json
import os
import signal
import sys
import threading
import traceback

from ingot.trainer.resilience.collective_calls import CollectiveCall, as_json, newest_calls
from ingot.trainer.resilience.leaving import LEAVE_SIGNAL, install_leaving, obey

REPORT_SIGNAL = signal.SIGUSR2


class Reports:
    """The two memory files of this process, by their file descriptors."""

    def __init__(self):
        self.stacks, self.collectives = os.memfd_create("ingot-stacks"), os.memfd_create("ingot-collectives")
        for fd in (self.stacks, self.collectives):  # the supervisor truncates them before it asks again
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
        self._asked, asks = os.pipe()
        os.set_blocking(asks, False)
        signal.signal(REPORT_SIGNAL, lambda *_: None)
        install_leaving()
        # The program that started the run may have blocked them. A plug-in that does so later blocks its own thread:
        # another one takes them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (REPORT_SIGNAL, LEAVE_SIGNAL))
        signal.set_wakeup_fd(asks, warn_on_full_buffer=False)
        faulthandler.enable(file=2)  # stacks on standard error before a fatal signal ends the process
        # After the stacks, the handler of Python follows; it writes the number of the signal to `asks`.
        faulthandler.register(REPORT_SIGNAL, file=self.stacks, all_threads=True, chain=True)
        threading.Thread(target=self._answer, name="ingot-reports", daemon=True).start()

    def _answer(self) -> None:
        while signals := os.read(self._asked, 64):
            try:
                if REPORT_SIGNAL in signals:
                    os.write(self.collectives, json.dumps(as_json(calls_of_this_process())).encode() + b"\n")
                if LEAVE_SIGNAL in signals:
                    obey()
            except Exception:  # the thread has to answer the next signal, too
                traceback.print_exc()


_forgotten = 0  # the time of the newest collective of groups that this process has left [ns]


def forget_calls() -> None:
    """Leave the collectives so far out of `calls_of_this_process`: their groups are gone, and new ones get their
    names."""
    global _forgotten
    if "torch.distributed" in sys.modules:
        from ingot.trainer.torch_private import recorded_collectives

        _forgotten = max((entry["time_created_ns"] for entry in recorded_collectives()), default=0)


def calls_of_this_process() -> tuple[CollectiveCall, ...]:
    """Return the newest collectives that this process called (newest_calls); none if it has not imported torch."""
    if "torch.distributed" not in sys.modules:
        return ()
    from ingot.trainer.torch_private import ranks_of_groups, recorded_collectives

    records = [entry for entry in recorded_collectives() if entry["time_created_ns"] > _forgotten]
    return newest_calls(records, ranks_of_groups())
