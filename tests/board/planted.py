"""A plug-in with faults that only the program itself can have: BOARD_FAULT names one, its rank, its step and its place.

`KIND RANK STEP PLACE` plants the fault once per run, and a fifth word "always" in each attempt. RANK may be "all". STEP
may be a range, as 12-15: then it comes in each of these steps. PLACE is a method of the callback: on_gradients,
on_update, on_line or record; or start, when an attempt begins; evaluation; or before_norm, when the gradients are
reduced, and their norm is not yet known. BOARD_JUNK, as "shuffled
12-15", replaces the data of steps. The schedule "planted" has fifty times its rate in step BOARD_RATE, and none from
step BOARD_STILL on. With BOARD_DEAF, every rank blocks all signals from the start of an attempt on, and ignores those
that a run uses.
"""

import ctypes
import math
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from ingot.drill.planted import change_steps, hold_interpreter_lock, wait_for_ever, with_tokens
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback
from ingot.plugins.schedule import SCHEDULES, SchedulePart
from ingot.trainer import loop
from ingot.trainer.resilience.leaving import LEAVE_SIGNAL
from ingot.trainer.resilience.reports import REPORT_SIGNAL
from ingot.trainer.resilience.stop_requests import STOP_SIGNALS


def _sum_over_ranks(elements: int) -> None:
    dist.all_reduce(torch.ones(elements))


def _deafen() -> None:
    for number in (*STOP_SIGNALS, REPORT_SIGNAL, LEAVE_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


class Planted(StepCallback):
    def __init__(self, run, options):
        self.rank, self.step = run.rank, 0
        kind, rank, step, self.place, *always = (os.environ.get("BOARD_FAULT") or "none 0 0 nowhere").split()
        first, _, last = step.partition("-")
        self.kind, self.always = kind, bool(always)
        self.on_rank = run.rank if rank == "all" else int(rank)
        self.at, self.last, self.pieces = int(first), int(last or first), run.pieces
        if "BOARD_DEAF" in os.environ:
            _deafen()
        if self.place == "before_norm":
            change_steps(before_norm=self._before_norm)
        own = f"-{run.rank}" if rank == "all" else ""
        self.done = Path(f"{os.environ.get('INGOT_DRILL_RUN', '')}.planted{own}")  # ingot ckpt verify is no run
        if self.place == "evaluation":
            self._change_evaluations()
        self._plant("start")

    def _change_evaluations(self):
        evaluate = loop.log_evaluation

        def changed(trainer, step):
            self._plant("evaluation")
            evaluate(trainer, step)

        loop.log_evaluation = changed

    def _before_norm(self, step):
        self.step = step
        self._plant("before_norm")

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
        if place != self.place or self.step < self.at or (self.step > self.last and place != "record"):
            return
        collective = self.kind in ("shape", "skip", "order", "zero")  # both ranks are a part of it
        if (not collective and self.rank != self.on_rank) or (not self.always and self.done.exists()):
            return
        if self.rank == self.on_rank and self.step >= self.last:
            self.done.touch()
        getattr(self, self.kind)(self.rank == self.on_rank)

    def kill(self, _):
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, _):
        os.kill(os.getpid(), signal.SIGSTOP)

    def hold(self, _):
        hold_interpreter_lock()

    def wait(self, _):
        wait_for_ever()

    def error(self, _):
        raise RuntimeError("planted")

    def segv(self, _):
        ctypes.string_at(0)

    def abort(self, _):
        os.abort()

    def nan(self, _):
        self.pieces[0].grad.fill_(math.nan)

    def zero(self, _):
        for piece in self.pieces:
            piece.grad.zero_()

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


def _rate(step, steps, peak, schedule, options):
    if step >= int(os.environ.get("BOARD_STILL") or steps + 1):
        return 0.0
    return peak * (50 if step == int(os.environ.get("BOARD_RATE", "0")) else 1)


SCHEDULES.register(SchedulePart(name="planted", rate=_rate))


def _junk(batch, kind):
    """Return the batch with tokens that have no rule, or with two tokens in turn."""
    random = torch.Generator().manual_seed(batch.step)
    shape = (*batch.inputs.shape[:-1], batch.inputs.shape[-1] + 1)
    tokens = torch.randint(1, 64, shape, generator=random)
    if kind == "repeated":
        tokens = torch.where(torch.arange(shape[-1]) % 2 == 0, tokens[..., :1], tokens[..., 1:2])
    return with_tokens(batch, tokens)


def _plant_junk(kind, steps):
    first, _, last = steps.partition("-")
    hurt = range(int(first), int(last or first) + 1)
    change_steps(batch=lambda batch: _junk(batch, kind) if batch.step in hurt else batch)


if "BOARD_JUNK" in os.environ:
    _plant_junk(*os.environ["BOARD_JUNK"].split())
CALLBACKS.register(CallbackPart(name="planted", make=Planted))
