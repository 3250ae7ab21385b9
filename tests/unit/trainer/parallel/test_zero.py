"""The states of a bucket's gradients: which may follow which."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.trainer.parallel.bucket import (
    TRANSITIONS,
    Bucket,
    BucketState,
    IllegalTransition,
    Reduction,
    clear_missing,
)
from ingot.trainer.parallel.zero import copy_rows


def bucket(state: BucketState) -> Bucket:
    return Bucket(unit=3, view="shard", ranks=2, reduction=Reduction.SCATTER_EACH, state=state)


@pytest.mark.parametrize("before", BucketState)
@pytest.mark.parametrize("after", BucketState)
def test_only_listed_transitions_are_legal(before, after):
    found = bucket(before)
    if after in TRANSITIONS[before]:
        found.move(after)
        assert found.state is after
        return
    with pytest.raises(IllegalTransition) as caught:
        found.move(after)
    assert found.state is before
    for part in ("unit 3", "view shard", before.value, after.value):
        assert part in str(caught.value)


def test_every_state_is_reached_and_a_step_ends_where_it_began():
    assert TRANSITIONS.keys() == set(BucketState) == set().union(*TRANSITIONS.values())
    names = "filling scattering scattered filling scattering scattered summing reduced empty"
    found = bucket(BucketState.EMPTY)
    for name in names.split():
        found.move(BucketState(name))


def test_no_gradient_may_follow_the_sum_over_copies():
    """A late micro-batch would be lost on the other copies of the model."""
    for state in (BucketState.SUMMING, BucketState.REDUCED):
        with pytest.raises(IllegalTransition):
            bucket(state).move(BucketState.FILLING)


def test_a_buffer_without_gradients_counts_as_zeros():
    found = bucket(BucketState.EMPTY)
    found.whole = torch.ones(2, 3)
    clear_missing(found)
    assert found.state is BucketState.FILLING


class Writes(TorchDispatchMode):
    """The number of elements that operations write, views and empty tensors excluded."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.elements += made.numel()
        return made


@pytest.mark.parametrize("rows", [4, 5, 6, 1])
def test_a_gathered_parameter_is_copied_once(rows):
    """Three ranks gather it; the last ones may have fewer rows, or none."""
    part = -(-rows // 3) * 7
    buffer = torch.arange(3.0 * (part + 5)).view(3, part + 5)
    parameter = torch.zeros(rows, 7)
    with Writes() as writes:
        copy_rows(buffer[:, 2 : 2 + part], parameter)
    assert writes.elements == parameter.numel()
    assert torch.equal(parameter.view(-1), buffer[:, 2 : 2 + part].reshape(-1)[: parameter.numel()])
