"""A plug-in with faults that only the program itself can have: BOARD_FAULT names one, its rank, its step and its place.

`KIND RANK STEP PLACE` plants the fault once per run, and a fifth word "always" in each attempt. PLACE is a method of
the callback: on_gradients, on_update, on_line or record.
"""

import ctypes
import itertools
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback


def _sum_over_ranks(elements: int) -> None:
    dist.all_reduce(torch.ones(elements))


class Planted(StepCallback):
    def __init__(self, run, options):
        self.rank, self.step = run.rank, 0
        kind, rank, step, self.place, *always = (os.environ.get("BOARD_FAULT") or "none 0 0 nowhere").split()
        self.kind, self.on_rank, self.at, self.always = kind, int(rank), int(step), bool(always)
        self.done = Path(os.environ["INGOT_DRILL_RUN"] + ".planted")

    def on_gradients(self, step):
        self.step = step
        self._plant("on_gradients")

    def on_update(self, step):
        self._plant("on_update")

    def on_line(self, steps):
        self._plant("on_line")
        return {}

    def record(self):
        self._plant("record")

    def _plant(self, place):
        if place != self.place or self.step < self.at or (self.step > self.at and place != "record"):
            return
        collective = self.kind in ("shape", "skip", "order")  # both ranks are a part of it
        if (not collective and self.rank != self.on_rank) or (not self.always and self.done.exists()):
            return
        if self.rank == self.on_rank:
            self.done.touch()
        getattr(self, self.kind)(self.rank == self.on_rank)

    def kill(self, _):
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, _):
        os.kill(os.getpid(), signal.SIGSTOP)

    def hold(self, _):
        sum(itertools.repeat(0))  # native code that never releases the interpreter lock, without end

    def wait(self, _):
        signal.sigwait([signal.SIGWINCH])  # as a program that waits for something else than a collective

    def error(self, _):
        raise RuntimeError("planted")

    def segv(self, _):
        ctypes.string_at(0)

    def abort(self, _):
        os.abort()

    def memory(self, _):
        torch.empty(1 << 60, dtype=torch.uint8)

    def shape(self, wrong):
        _sum_over_ranks(3 if wrong else 5)

    def skip(self, wrong):
        if not wrong:
            _sum_over_ranks(7)

    def order(self, wrong):
        for elements in (2, 9) if wrong else (9, 2):
            _sum_over_ranks(elements)


CALLBACKS.register(CallbackPart(name="planted", make=Planted))
