"""A plug-in that flips bits of weights: BOARD_FLIPS = "WHO STEP BIT PLACE [always]", several of them separated by ",".

WHO is a rank, or the name of a node. PLACE: "gradients" (before the update), "optimizer" (after the update, before the
state is hashed), "update" (after that), or "line". A flip comes once per run; with "always" in each step from STEP on.
"""

import os
from pathlib import Path

from ingot.drill.planted import flip_bit
from ingot.machine.health.report import node_name
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback
from ingot.trainer.optim.optimizer import Optimizer


class Flipped(StepCallback):
    def __init__(self, run, options):
        self.pieces, self.step, self.names = run.pieces, 0, {str(run.rank), node_name()}
        self.flips = [flip.split() for flip in os.environ.get("BOARD_FLIPS", "").split(",") if flip]
        self.marks = os.environ["INGOT_DRILL_RUN"] + ".flipped-"
        update = Optimizer.step

        def step(optimizer, *args, **kwargs):
            update(optimizer, *args, **kwargs)
            self.flip("optimizer")

        Optimizer.step = step

    def on_gradients(self, step):
        self.step = step
        self.flip("gradients")

    def on_update(self, step):
        self.flip("update")

    def on_line(self, steps):
        self.flip("line")
        return {}

    def flip(self, at):
        for number, (who, step, bit, place, *always) in enumerate(self.flips):
            due = self.step >= int(step) if always else self.step == int(step)
            mark = Path(f"{self.marks}{number}")
            if due and who in self.names and place == at and (always or not mark.exists()):
                mark.touch()
                value = next(piece.value for piece in self.pieces if piece.name == "blocks.1.mlp.down.weight")
                flip_bit(value, 5, int(bit))


CALLBACKS.register(CallbackPart(name="flipped", make=Flipped))
