"""Muon (Jordan et al. 2024): momentum whose matrix is made orthogonal, for the matrices inside the blocks.

Embedding, head, norms and routers are updated by AdamW. Run file: optim.kind = "muon".
"""

from dataclasses import dataclass

from ingot.plugins.optimizer import OPTIMIZERS, MatrixRule, OptimizerPart
from ingot.ranges import PositiveCount, Share
from ingot.trainer.optim.adamw import AdamW

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration: fast, not exact (Jordan et al. 2024)


@dataclass(frozen=True, kw_only=True)
class Options:
    momentum: Share = 0.95
    iterations: PositiveCount = 5


class Muon(MatrixRule):
    state = ("momentum",)

    def __init__(self, optim, options):
        self.optim, self.options = optim, options

    def direction(self, gradient, state):
        momentum = state["momentum"] * self.options.momentum + gradient
        return gradient + self.options.momentum * momentum, {"momentum": momentum}  # Nesterov

    def of_matrix(self, direction):
        x = direction / (direction.norm() + 1e-7)
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        a, b, c = COEFFICIENTS
        for _ in range(self.options.iterations):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return (x.T if tall else x) * 0.2 * max(x.shape) ** 0.5  # the size of AdamW's updates (Liu et al. 2025, eq. 4)

    def apply(self, value, update, lr, *, decays):
        return value * (1 - lr * self.optim.weight_decay) - lr * update


def is_hidden(name, dims):
    return name.startswith("blocks.") and dims == 2 and "router" not in name


def make(optim, options):
    muon, adamw = Muon(optim, options), AdamW(optim)
    return lambda name, shape: muon if is_hidden(name, len(shape)) else adamw


def moments(name, dims):
    return 1 if is_hidden(name, dims) else 2


OPTIMIZERS.register(OptimizerPart(name="muon", make=make, moments=moments, settings=Options, whole_matrices=True))
