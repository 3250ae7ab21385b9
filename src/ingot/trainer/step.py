"""One optimizer step. Nothing in it waits for the device: what it measures stays there until the log wants it."""

from typing import TYPE_CHECKING

from ingot.trainer.optim.clip import clip_factor, gradient_norm
from ingot.trainer.resilience.policy import Facts

if TYPE_CHECKING:
    from ingot.trainer.parallel.pipeline import MicroBatches
    from ingot.trainer.parts import Parts


def train_step(run: "Parts", batch: "MicroBatches", lr: float) -> Facts:
    """Forward and backward of every micro-batch, reduce, clip, update, balance experts.

    Each rank that reads tokens divides its loss by its own number of them, and gradients are averaged over these ranks
    (data x cp); all have equally many tokens, so this is the gradient of the mean over the global batch.
    """
    scale = run.loss_scale.scale if run.loss_scale else None
    loss = run.program.train(batch, scale)
    run.model.reduce()
    grad_norm = gradient_norm(run.model.shards, scale=scale)
    veto = run.policy.veto(loss, grad_norm)
    run.optimizer.step(lr, scale=clip_factor(grad_norm, run.config.optim.clip_norm, scale=scale), found_inf=veto)
    if run.loss_scale and veto is not None:
        run.loss_scale.update(veto)
    run.model.publish()
    experts = run.balance.step(batch.step, veto) if run.balance else None
    return Facts(batch.step, lr, loss, grad_norm, veto, run.token_readers, experts=experts)
