"""The second try of a step: what a forward and a backward change besides gradients is as before the first one."""

from types import SimpleNamespace

import torch
from torch import nn

from ingot.trainer.guard.step_judge import CORRUPTION, LOSS_SPIKE, NORM_NOT_FINITE, NORM_SPIKE
from ingot.trainer.retry import RetriedStep, StepRetry


def judged(bits):
    return torch.tensor([float(bits), 0.0, 0.0, 0.0], dtype=torch.float64)


def test_the_first_try_leaves_no_trace():
    stage, term, empty = nn.Linear(2, 2), SimpleNamespace(sums=torch.ones(2)), SimpleNamespace(sums=None)
    stage.seen, stage.terms = None, [term, empty]
    shard, published = SimpleNamespace(grad=None), []
    model = SimpleNamespace(shards=[shard], publish=lambda: published.append(1))
    retry = StepRetry({0: stage}, torch.device("cpu"), scaled_loss=False)
    retry.keep()
    first = torch.rand(3)
    stage.seen, shard.grad = torch.ones(4), torch.ones(1)
    term.sums += 5  # in place
    empty.sums = torch.ones(1)
    retry.undo(model)
    assert stage.seen is shard.grad is empty.sums is None and published == [1]
    assert term.sums.tolist() == [1.0, 1.0] and torch.equal(torch.rand(3), first)


def test_which_findings_are_tried_again_and_what_is_recorded():
    retry, fp16 = (StepRetry({}, torch.device("cpu"), scaled_loss=scaled) for scaled in (False, True))
    for bits, plain, scaled in ((0, False, False), (LOSS_SPIKE, True, True), (NORM_NOT_FINITE, True, False)):
        assert (retry.is_needed(judged(bits)), fp16.is_needed(judged(bits))) == (plain, scaled)
    loss, norm, other = torch.tensor(2.0), torch.tensor(1.0), torch.tensor(9.0)
    found = judged(NORM_SPIKE | CORRUPTION)
    retry.record(7, (loss, other), (loss, norm), (found, judged(0)))
    retry.record(8, (loss, other), (loss, other), (found, found))
    kinds = ("gradient spike", "suspected corruption")
    assert retry.take() == [RetriedStep(7, kinds, True, False), RetriedStep(8, kinds, False, True)]
    assert retry.take() == []
