"""AdamW (Loshchilov & Hutter 2019, algorithm 2), with weight decay on matrices only."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim.adamw import adamw

from ingot.plugins.optimizer import RuleOf, UpdateRule
from ingot.schema.run import Optim


class AdamW(UpdateRule):
    """The update is torch's fused kernel, one launch per dtype.

    Weight decay includes embeddings, as in GPT-3 and Llama; tied embeddings are also the output matrix.
    """

    state = ("exp_avg", "exp_avg_sq")

    def __init__(self, optim: Optim):
        self.optim = optim

    def update(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        lr: float,
        *,
        decays: bool,
        found_inf: Tensor | None = None,
    ) -> None:
        """Apply one update in place to values, moments and `step`. Values, gradients and moments have one dtype.

        The CPU kernel rounds the last elements of a tensor (its length modulo 64 bytes) differently from the rest. An
        update in parts has the same bits as one call if the parts start at multiples of 64 bytes.
        """
        adamw(
            list(values),
            list(gradients),
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            found_inf=found_inf,
            amsgrad=False,
            maximize=False,
            lr=lr,
            beta1=self.optim.beta1,
            beta2=self.optim.beta2,
            eps=self.optim.eps,
            weight_decay=self.optim.weight_decay if decays else 0.0,
        )


def adamw_rules(optim: Optim, options: None = None) -> RuleOf:
    """Return the function that gives every parameter the AdamW rule."""
    rule = AdamW(optim)
    return lambda name, shape: rule
