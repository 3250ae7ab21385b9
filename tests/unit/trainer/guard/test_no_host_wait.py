"""No step waits for the device between two log lines: nothing in it reads a tensor's values on the host.

A CPU has nothing to wait for, so the operations that would wait on a device are refused as they come: those whose
result or shape depends on values, and the methods that copy a tensor to the host. tests/gpu/test_train.py lets CUDA
refuse them.
"""

from contextlib import ExitStack

import pytest
import torch
from tests.unit.trainer.test_loop import run_rank
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.trainer import loop
from ingot.trainer.resilience.stop_vote import StopVote
from ingot.trainer.step import train_step

STEPS, LINE = 22, 11  # the state is hashed after step 20 and before step 21
_TO_HOST = {torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}


class NoValues(TorchDispatchMode):
    """Refuse operations whose result or shape depends on the values of a tensor. seen: the number of operations."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        by_value = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}
        if func is torch.ops.aten.index.Tensor:  # by places, or by a mask, whose number of places is a value
            by_value = any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
        assert not by_value, f"the host waits for {func}"
        return func(*args, **kwargs or {})


class NoCopies(TorchFunctionMode):
    """Refuse methods that copy a tensor to the host. is_off: let them pass."""

    is_off = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert self.is_off or func not in _TO_HOST, f"the host waits for {func.__name__}"
        return func(*args, **kwargs or {})


def vote(votes, **facts):
    """Vote about a stop, as usual: with numbers of the host, which no device has."""
    NoCopies.is_off = True
    try:
        return after_step(votes, **facts)
    finally:
        NoCopies.is_off = False


after_step = StopVote.after_step


def watched_run(rank, ranks, folder) -> dict[int, int]:
    """Train `folder` with watched steps. Returns the number of operations of each step, without those of its line."""
    seen = {}

    def watched(step, function, *arguments):
        with ExitStack() as modes:
            values = modes.enter_context(NoValues())
            modes.enter_context(NoCopies())
            result = function(*arguments)
        seen[step] = seen.get(step, 0) + values.seen
        return result

    judge = loop.RunLoop.judge

    def judged(self, batch, result):
        if batch.step % LINE:
            watched(batch.step, judge, self, batch, result)
        else:
            judge(self, batch, result)

    loop.train_step = lambda parts, batch, lr: watched(batch.step, train_step, parts, batch, lr)
    loop.RunLoop.judge, StopVote.after_step = judged, vote
    assert run_rank(rank, ranks, folder)[0] == (STEPS, False)
    return seen


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_nothing_in_a_step_reads_values_on_the_host(fork_ranks, make_run, precision):
    """The guard and the hashes of the state have their defaults; in fp16 there is a loss scale, too."""
    folder = make_run(dp_shard=2, steps=STEPS, log_every=LINE, every_steps=STEPS, precision=precision)
    for seen in fork_ranks(watched_run, 2, folder):
        assert sorted(seen) == list(range(1, STEPS + 1))
        assert seen[20] > seen[19] and seen[21] > seen[19]  # these have hashes


def test_the_watch_finds_what_reads_values():
    mask = torch.tensor([True, False])
    for read in (
        lambda: mask.any().item(),
        lambda: bool(mask.any()),
        lambda: mask.nonzero(),
        lambda: torch.ones(2)[mask],
        lambda: mask.tolist(),
        lambda: mask.numpy(),
        lambda: mask.cpu(),
    ):
        with pytest.raises(AssertionError, match="the host waits for"), NoValues(), NoCopies():
            read()
