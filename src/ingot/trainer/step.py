"""One optimizer step. Measured values stay on the device until the log reads them, so the host does not wait for it;
with guard.retry it does, once in each step."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ingot.errors import RunFailed
from ingot.plugins.optimizer import OPTIMIZERS
from ingot.plugins.registry import INGOT
from ingot.schema.guard_record import clip_factor as limit_factor
from ingot.trainer.blame import blamed
from ingot.trainer.guard.step_judge import StepJudge
from ingot.trainer.optim.gradients import clip_factor, gradient_norm_and_loss
from ingot.trainer.parallel.pipeline import MicroBatches
from ingot.trainer.parts import StepParts
from ingot.trainer.resilience.policy import StepResult
from ingot.trainer.retry import Try


def train_step(parts: StepParts, batch: MicroBatches, lr: float) -> StepResult:
    """Run forward and backward of every micro-batch, reduce, clip, update, balance experts. Collective.

    With guard.retry, a step in which the guard finds something is tried once more before its update. Steps whose
    gradients two ranks compute are not: a finding there skips the update, and a difference between the ranks lets the
    run go back. With guard.recompute_every = 1, and while steps are trained again because of damage, these are all.
    """
    retry, step = parts.retry, batch.step
    if retry is None or (parts.gradients is not None and parts.gradients.is_due(step)):
        return update(parts, step, forward_backward(parts, batch), lr)
    retry.keep()
    first = measure(parts, step, forward_backward(parts, batch))
    if first.judged is None or not retry.is_needed(first.judged):
        return update_measured(parts, step, first, lr)
    before = _tried(parts, step, first)
    retry.undo(parts.model)
    second = measure(parts, step, forward_backward(parts, batch))
    retry.record(step, before, _tried(parts, step, second))
    return update_measured(parts, step, second, lr)


def forward_backward(parts: StepParts, batch: MicroBatches) -> Tensor:
    """Run forward and backward of every micro-batch. Returns the loss of this rank's tokens. Collective.

    Each rank that reads tokens divides its loss by its own number of tokens, and gradients are averaged over these
    ranks (data x cp). All have equally many tokens, so this is the gradient of the mean over the global batch.
    """
    if (gradients := parts.gradients) is not None:
        gradients.recompute(batch.step, loss_scale(parts))
    return parts.program.train(batch, loss_scale(parts))


def backward(parts: StepParts, loss: Tensor, *, last: bool) -> None:
    """Run the backward of one micro-batch whose loss a program computed with the only stage of the model.

    loss: the micro-batch's part of this rank's loss. last: it is the last micro-batch of the step. Collective.
    """
    (stage,) = parts.model.stages.values()
    scale = loss_scale(parts)
    parts.model.data.before_backward(stage, last)
    (loss if scale is None else loss * scale).backward()
    parts.model.data.after_backward(stage, last)


def update(parts: StepParts, step: int, loss: Tensor, lr: float) -> StepResult:
    """Reduce the gradients of `step`, clip, update unless the policy vetoes, publish, balance experts. Collective."""
    return update_measured(parts, step, measure(parts, step, loss), lr)


@dataclass(frozen=True)
class JudgedStep:
    """A step before its update. loss: of this rank's tokens. mean_loss, grad_norm: of the step, the same on all ranks.
    scale: of the loss. judged: what the guard found; None without one."""

    loss: Tensor
    mean_loss: Tensor
    grad_norm: Tensor
    scale: Tensor | None
    judged: Tensor | None


def measure(parts: StepParts, step: int, loss: Tensor) -> JudgedStep:
    """Reduce the gradients of `step`, and judge it. Collective."""
    scale = loss_scale(parts)
    parts.model.reduce()
    if parts.gradients is not None:
        parts.gradients.reduced(step)
    if parts.hashes is not None and parts.hashes.samples is not None:
        parts.hashes.samples.reduced(step, loss)
    grad_norm, mean_loss = gradient_norm_and_loss(parts.model.shards, loss, parts.loss_share, scale=scale)
    return JudgedStep(loss, mean_loss, grad_norm, scale, _judged(parts.step_judge, step, mean_loss, grad_norm))


def _tried(parts: StepParts, step: int, measured: JudgedStep) -> Try:
    """Return the numbers of a try of `step`, by which it is compared with the other one."""
    samples = parts.hashes.samples if parts.hashes is not None else None
    own = (measured.loss,) if samples is None else (measured.loss, samples.of_step(step))
    assert measured.judged is not None
    return Try(measured.judged, (measured.mean_loss, measured.grad_norm), own)


def update_measured(parts: StepParts, step: int, measured: JudgedStep, lr: float) -> StepResult:
    """Clip, update unless the step is vetoed, publish, balance experts. Collective."""
    loss, grad_norm, scale, judged = measured.loss, measured.grad_norm, measured.scale, measured.judged
    if parts.gradient_range is not None:
        parts.gradient_range.look(step)
    if parts.layer_sizes is not None:
        parts.layer_sizes.before_update(step, scale)
    parts.callbacks.gradients(step)
    if parts.hashes is not None:
        parts.hashes.before_update(step)
    if parts.update_size is not None:
        parts.update_size.before_update(step)
    overflow = parts.policy.veto(loss, grad_norm)
    veto = _veto(parts.step_judge, measured, overflow)
    times = parts.program.times
    with _errors_of_rules(parts.config.optim.kind), times.phase("optimizer") if times else nullcontext():
        optim = parts.config.optim
        limit = optim.clip_norm * limit_factor(parts.policy.measures(), step, optim.lr)
        factor = clip_factor(grad_norm, limit, scale=scale)
        parts.optimizer.step(lr, scale=factor, found_inf=veto)
    if parts.loss_scale and overflow is not None:
        parts.loss_scale.update(overflow)
    if parts.update_size is not None:
        parts.update_size.after_update()
    parts.model.publish()
    if parts.hashes is not None:
        parts.hashes.after_update(step)
    parts.callbacks.updated(step)
    experts = parts.balance.step(step, veto) if parts.balance else None
    return StepResult(step, lr, loss, grad_norm, veto, parts.token_readers, experts=experts, judged=judged)


def _judged(judge: StepJudge | None, step: int, loss: Tensor, grad_norm: Tensor) -> Tensor | None:
    """Return what the guard finds in the step; None without a guard."""
    if judge is None:
        return None
    if step in judge.begins:
        judge.forget()
    return judge.judge(loss, grad_norm, settled=step > judge.settled_after)


def _veto(judge: StepJudge | None, measured: JudgedStep, veto: Tensor | None) -> Tensor | None:
    """Return whether to skip the update, and take the step into the window of the guard. veto: the policy's."""
    if judge is None or measured.judged is None:
        return veto
    found = measured.judged[0] > 0
    if judge.guard.acts:
        veto = found if veto is None else found | veto
    judge.add(measured.mean_loss, measured.grad_norm, found if veto is None else veto)
    return veto


def _errors_of_rules(kind: str) -> AbstractContextManager[None]:
    """Return the context that turns an error of a plug-in's update rule into a RunFailed."""
    return nullcontext() if OPTIMIZERS.module_of(kind) == INGOT else blamed(partial(_broken_rule, kind))


def _broken_rule(kind: str, found: str, file: str, line: int) -> RunFailed:
    return RunFailed(
        "E-OPTIMIZER-RAISED",
        f"the update of optimizer {kind!r} {found}",
        rule="an update rule raises nothing, for any piece of a parameter (plugins/optimizer.py)",
        fix="correct the plug-in of optim.kind; if the device has too little memory, use more ranks or smaller batches",
        optimizer=kind,
        file=file,
        line=line,
    )


def loss_scale(parts: StepParts) -> Tensor | None:
    """Return the factor of the loss that is minimized: the loss scale of fp16, None in other precisions."""
    return parts.loss_scale.scale if parts.loss_scale else None
