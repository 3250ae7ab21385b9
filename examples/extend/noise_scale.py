"""The gradient noise scale (McCandlish et al. 2018, eq. 2.9): the batch size, in tokens, above which more tokens per
step are of little use. Two successive gradients stand for two batches; their weights differ by one update.

Run file: [callbacks.noise_scale]
"""

from dataclasses import dataclass

import torch

from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback
from ingot.ranges import Share


@dataclass(frozen=True, kw_only=True)
class Options:
    smoothing: Share = 0.9


class NoiseScale(StepCallback):
    def __init__(self, run, options):
        self.run, self.options = run, options
        self.own = [piece for piece in run.pieces if piece.value.numel()]
        self.previous = {piece.name: torch.zeros_like(piece.value) for piece in self.own}
        self.squares = torch.zeros(2, dtype=torch.float64, device=run.device)  # of the gradient, of its noise
        self.steps = torch.zeros((), dtype=torch.int64, device=run.device)

    def on_gradients(self, step):
        sums = torch.zeros(2, dtype=torch.float64, device=self.run.device)  # g . previous, |g - previous|^2 / 2
        scale = 1.0 if self.run.loss_scale is None else self.run.loss_scale
        for piece in self.own:
            gradient, previous = piece.grad.to(piece.value.dtype) / scale, self.previous[piece.name]
            if piece.owner:
                sums[0] += (gradient * previous).sum(dtype=torch.float64)
                sums[1] += (gradient - previous).square().sum(dtype=torch.float64) / 2
            previous.copy_(gradient)
        sums = self.run.sum_over_ranks(sums)
        known = (self.steps > 0) & sums.isfinite().all()  # not the first step; no step with a broken gradient
        weight = torch.where(known, 1 - self.options.smoothing, 0.0)
        self.squares.mul_(1 - weight).add_(sums.nan_to_num(0.0, 0.0, 0.0) * weight)
        self.steps.add_(1)

    def on_line(self, steps):
        signal, noise = self.squares.tolist()
        return {"noise_scale_tokens": noise * self.run.config.tokens_per_step / signal} if signal > 0 else {}

    def tensors(self):
        return {"previous": self.previous, "squares": self.squares, "steps": self.steps}


CALLBACKS.register(CallbackPart(name="noise_scale", make=NoiseScale, settings=Options, pieces=1))
