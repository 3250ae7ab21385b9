"""The watch for operations that are not finite: those that matter are named, and nothing changes."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from ingot.rehearse.replay.opened import RecordedSkips
from ingot.rehearse.replay.watch import FiniteWatch

MASK = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])


class Harmless(nn.Module):
    """A masked softmax, and quotients by zero that are discarded."""

    def forward(self, x):
        weights = torch.zeros(3, 3).masked_fill(~MASK, -torch.inf).softmax(-1)
        ratio = torch.where(x > 0, x / torch.relu(x), 0.0).detach()
        buffer = torch.empty_like(x)
        buffer[:2] = x[:2]
        buffer[2:] = x[2:]
        return weights @ (ratio + buffer)


class Root(nn.Module):
    def forward(self, x):
        return x.abs().sqrt()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.harmless, self.root = Harmless(), Root()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.root(self.harmless(x * self.scale)).sum()


def watched(model, x):
    """Return the watch after a forward and a backward, and the loss."""
    watch = FiniteWatch(model)
    with watch.watching():
        loss = model(x)
        loss.backward()
    return watch, loss


def test_infinities_that_are_meant_or_discarded_are_not_blamed():
    x = torch.tensor([[1.0, 2.0, -3.0], [0.5, -1.0, 2.5], [1.0, 1.0, 1.0]])
    model, plain = Model(), Model()
    plain(x).backward()
    watch, loss = watched(model, x)
    assert watch.origin_of(loss) is None and torch.equal(model.scale.grad, plain.scale.grad)


def test_an_operation_of_the_backward_is_found_in_its_module():
    watch, loss = watched(model := Model(), torch.zeros(3, 3))
    assert watch.origin_of(loss) is None  # the root of 0 is finite, but not its slope
    origin = watch.origin_of(model.scale.grad)
    assert (origin.module, origin.module_class, origin.phase) == ("root", "Root", "backward")
    assert (origin.operation, origin.node) == ("aten.div", "SqrtBackward0")


def test_a_row_that_is_masked_altogether_is_blamed_on_the_softmax():
    class Masked(nn.Module):
        def forward(self, x):
            return x.masked_fill(torch.ones(3, 3, dtype=torch.bool), -torch.inf).softmax(-1).sum()

    watch = FiniteWatch(model := Masked())
    with watch.watching():
        result = model(torch.ones(3, 3))
    assert watch.origin_of(result).operation == "aten._softmax"


def test_updates_that_the_run_skipped_are_skipped_again():
    policy = RecordedSkips([3])
    vetoes = []
    for policy.step in (2, 3):
        vetoes.append(bool(policy.veto(torch.ones(()), torch.ones(()))))
    assert vetoes == [False, True] and bool(policy.veto(torch.ones(()), torch.tensor(torch.inf)))
