"""A plug-in that loses rank 1 once, and spoils the weights of every later attempt in its third step, as a state does
that was damaged where it was kept."""

import os
import signal
from pathlib import Path

from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback

LOST_AT, SPOILED_IN = 13, 3


class Poison(StepCallback):
    def __init__(self, run, options):
        self.run, self.steps = run, 0
        self.lost = Path(os.environ["INGOT_DRILL_RUN"] + ".lost")
        self.is_restart = self.lost.exists()

    def on_gradients(self, step):
        self.steps += 1
        if self.is_restart and self.steps == SPOILED_IN:
            for piece in self.run.pieces:
                if piece.grad is not None:
                    piece.grad.fill_(float("nan"))  # its norm was judged before
        if not self.is_restart and step == LOST_AT and self.run.rank == 1:
            self.lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)


CALLBACKS.register(CallbackPart(name="poison", make=Poison))
