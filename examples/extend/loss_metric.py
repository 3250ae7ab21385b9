"""A metric with its own state in the checkpoint: the mean loss of all steps so far, and the lowest loss with its step.

Run file: [callbacks.best_loss], with patience = 500 to stop after 500 steps without a new lowest loss.
"""

from dataclasses import dataclass

from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback, Verdict
from ingot.ranges import Steps


@dataclass(frozen=True, kw_only=True)
class Options:
    patience: Steps = 0  # 0: never stop


class BestLoss(StepCallback):
    def __init__(self, run, options):
        self.options = options
        self.sum, self.steps, self.lowest, self.lowest_step = 0.0, 0, float("inf"), 0

    def on_line(self, steps):
        for one in (one for one in steps if one.is_finite):
            self.sum, self.steps = self.sum + one.loss, self.steps + 1
            if one.loss < self.lowest:
                self.lowest, self.lowest_step = one.loss, one.step
        if not self.steps:
            return {}
        return {"mean_loss": self.sum / self.steps, "lowest_loss": self.lowest, "lowest_step": self.lowest_step}

    def verdict(self, steps):
        waited = steps[-1].step - self.lowest_step
        return Verdict.STOP if 0 < self.options.patience <= waited else Verdict.CONTINUE

    def record(self):
        own = {"sum": self.sum, "steps": self.steps, "lowest": self.lowest, "lowest_step": self.lowest_step}
        return own if self.steps else None  # JSON has no infinity

    def restore(self, record):
        self.sum, self.steps = record["sum"], record["steps"]
        self.lowest, self.lowest_step = record["lowest"], record["lowest_step"]


CALLBACKS.register(CallbackPart(name="best_loss", make=BestLoss, settings=Options))
