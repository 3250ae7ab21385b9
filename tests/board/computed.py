"""A plug-in with bits that flip in what a rank computes: BOARD_WRONG = "RANK STEP BIT PLACE [always],...".

PLACE: "gradient" (before it is reduced), "activation" (of a feed-forward), or "moment" (of the optimizer, before its
update). A flip comes once per run; with "always" in each step from STEP on, each time that the step is trained.
"""

import os
from pathlib import Path

import torch

from ingot.drill.planted import flip_bit
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback
from ingot.trainer.integrity.recompute import RecomputedGradients
from ingot.trainer.optim.optimizer import Optimizer


class Computed(StepCallback):
    def __init__(self, run, options):
        self.rank, self.due, self.optimizer = run.rank, [], None
        self.flips = [flip.split() for flip in os.environ.get("BOARD_WRONG", "").split(",") if flip]
        self.marks = os.environ["INGOT_DRILL_RUN"] + ".computed-"
        recompute, take, update = RecomputedGradients.recompute, RecomputedGradients.take, Optimizer.step

        def planted_recompute(gradients, step, scale):
            self.due = []  # until the rank's own part of the batch is computed
            recompute(gradients, step, scale)
            self.due = [flip for flip in enumerate(self.flips) if self.is_due(step, *flip)]

        def planted_take(gradients, number, buffer):
            self.flip("gradient", buffer)
            take(gradients, number, buffer)

        def planted_update(optimizer, *args, **kwargs):
            self.optimizer = optimizer
            update(optimizer, *args, **kwargs)

        def planted_forward(module, inputs, output):
            if self.due and type(module).__name__ == "SwiGLU":
                with torch.no_grad():
                    self.flip("activation", output)

        RecomputedGradients.recompute, RecomputedGradients.take = planted_recompute, planted_take
        Optimizer.step = planted_update
        torch.nn.modules.module.register_module_forward_hook(planted_forward)

    def on_gradients(self, step):
        if self.due and self.optimizer is not None:
            self.flip("moment", self.optimizer.moments()["blocks.1.mlp.down.weight"]["exp_avg"])

    def is_due(self, now, number, flip):
        rank, step, _, _, *always = flip
        is_new = always or not Path(f"{self.marks}{number}").exists()
        return int(rank) == self.rank and is_new and (now >= int(step) if always else now == int(step))

    def flip(self, at, tensor):
        for number, flip in [one for one in self.due if one[1][3] == at]:
            self.due.remove((number, flip))
            Path(f"{self.marks}{number}").touch()
            flip_bit(tensor, 5, int(flip[2]))


CALLBACKS.register(CallbackPart(name="computed", make=Computed))
