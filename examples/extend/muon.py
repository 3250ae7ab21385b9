"""Muon (Jordan et al. 2024): momentum whose matrix is made orthogonal, for the matrices inside the blocks.

Embedding, head, norms and routers are updated by AdamW. Run file: optim.kind = "muon".
"""

from dataclasses import dataclass

from ingot.plugins.optimizer import OPTIMIZERS, MatrixRule, OptimizerPart
from ingot.ranges import Share
from ingot.trainer.optim.adamw import AdamW

A, B, C = 3.4445, -4.7750, 2.0315  # of the quintic iteration: fast, not exact (Jordan et al. 2024)
ITERATIONS = 5


@dataclass(frozen=True, kw_only=True)
class Options:
    momentum: Share = 0.95


class Muon(MatrixRule):
    state = ("momentum",)

    def __init__(self, optim, options):
        self.decay, self.momentum = optim.weight_decay, options.momentum

    def direction(self, gradient, state):
        momentum = state["momentum"] * self.momentum + gradient
        return gradient + self.momentum * momentum, {"momentum": momentum}  # Nesterov

    def of_matrix(self, direction):
        tall = direction.shape[0] > direction.shape[1]
        x = (direction.T if tall else direction) / (direction.norm() + 1e-7)
        for _ in range(ITERATIONS):
            gram = x @ x.T
            x = A * x + (B * gram + C * gram @ gram) @ x
        return (x.T if tall else x) * 0.2 * max(x.shape) ** 0.5  # the size of AdamW's updates (Liu et al. 2025, eq. 4)

    def apply(self, value, update, lr, *, decays):
        return value * (1 - lr * self.decay) - lr * update


def is_hidden(name, dims):
    return name.startswith("blocks.") and dims == 2 and "router" not in name


def make(optim, options):
    muon, adamw = Muon(optim, options), AdamW(optim)
    return lambda name, shape: muon if is_hidden(name, len(shape)) else adamw


def matrix_flops(rows, columns):
    short, long = sorted((rows, columns))
    return ITERATIONS * (4 * short**2 * long + 2 * short**3)


costs = {"moments": lambda name, dims: 1 if is_hidden(name, dims) else 2, "matrix_flops": matrix_flops}
OPTIMIZERS.register(OptimizerPart(name="muon", make=make, settings=Options, whole_matrices=True, **costs))
