"""The second try of a step: what a forward and a backward change besides gradients is as before the first one."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ingot.events import EventLog, read_events
from ingot.schema.alert import alert_of, described
from ingot.schema.run_folder import RunFolder
from ingot.trainer.guard.step_judge import CORRUPTION, LOSS_SPIKE, NORM_NOT_FINITE, NORM_SPIKE
from ingot.trainer.log import log_retries
from ingot.trainer.retry import RetriedStep, StepRetry, Try


def judged(bits):
    return torch.tensor([float(bits), 0.0, 0.0, 0.0], dtype=torch.float64)


def retry_of(rank=0, ranks=1, *, scaled=False, stages=(), copy=1):
    """The second tries of a rank. copy: how many ranks have a copy of the model together."""
    return StepRetry(
        dict(enumerate(stages)), torch.device("cpu"), scaled_loss=scaled, data_rank=rank // copy, ranks=ranks
    )


def tried(bits, *shared, own=(1.0,)):
    return Try(judged(bits), *(tuple(torch.tensor(value) for value in values) for values in (shared, own)))


def test_the_first_try_leaves_no_trace():
    stage, term, empty = nn.Linear(2, 2), SimpleNamespace(sums=torch.ones(2)), SimpleNamespace(sums=None)
    stage.seen, stage.terms = None, [term, empty]
    shard, published = SimpleNamespace(grad=None), []
    model = SimpleNamespace(shards=[shard], publish=lambda: published.append(1))
    retry = retry_of(stages=[stage])
    retry.keep()
    first = torch.rand(3)
    stage.seen, shard.grad = torch.ones(4), torch.ones(1)
    term.sums += 5  # in place
    empty.sums = torch.ones(1)
    retry.undo(model)
    assert stage.seen is shard.grad is empty.sums is None and published == [1]
    assert term.sums.tolist() == [1.0, 1.0] and torch.equal(torch.rand(3), first)


def test_which_findings_are_tried_again_and_what_is_recorded(fork_ranks):
    def rank_of(rank, ranks):
        retry, fp16 = retry_of(), retry_of(scaled=True)
        found = [(retry.is_needed(judged(bits)), fp16.is_needed(judged(bits))) for bits in (0, 4, NORM_NOT_FINITE)]
        assert retry.is_needed(judged(NORM_SPIKE | CORRUPTION))
        bits = NORM_SPIKE | CORRUPTION
        retry.record(7, tried(bits, 2.0, 9.0), tried(0, 2.0, 1.0))
        retry.record(8, tried(bits, 2.0, 9.0), tried(bits, 2.0, 9.0))
        retry.record(9, tried(bits, 2.0, math.nan, own=(math.nan,)), tried(bits, 2.0, math.nan, own=(math.nan,)))
        retry.record(10, tried(bits, 2.0, 0.0), tried(bits, 2.0, -0.0))
        return found, retry.take(), retry.take()

    assert LOSS_SPIKE == 4
    ((found, taken, after),) = fork_ranks(rank_of, 1)
    assert found == [(False, False), (True, True), (True, False)] and after == []
    kinds = ("gradient spike", "suspected corruption")
    assert taken == [
        RetriedStep(7, kinds, True, False),
        RetriedStep(8, kinds, False, True),
        RetriedStep(9, kinds, False, True),  # NaN with the same bits
        RetriedStep(10, kinds, False, False),
    ]


def test_all_ranks_try_again_or_none(fork_ranks):
    """The window of rank 1 is damaged, and finds what no other finds."""

    def rank_of(rank, ranks):
        retry = retry_of(rank, ranks)
        needed = retry.is_needed(judged(LOSS_SPIKE if rank else 0))
        retry.record(7, tried(0, 2.0), tried(0, 2.0))
        return needed, retry.take()[0].found

    assert fork_ranks(rank_of, 2) == [(True, ("loss spike",))] * 2


@pytest.mark.parametrize(
    ("copy", "changed", "named"), [(1, {2}, (2,)), (2, {3}, (2, 3)), (2, {0, 3}, ()), (1, set(), ())]
)
def test_the_ranks_whose_own_bits_changed_are_named_with_their_copy(fork_ranks, copy, changed, named):
    """The rank of the last stage has the loss, wherever in its copy of the model the fault was."""

    def rank_of(rank, ranks):
        retry = retry_of(rank, ranks, copy=copy)
        retry.record(7, tried(4, 2.0), tried(0, 1.0, own=(0.5 if rank in changed else 1.0,)))
        return retry.take()[0].ranks

    assert fork_ranks(rank_of, 4) == [named] * 4


def test_repeated_faults_are_an_alert(tmp_path):
    """At the third that a second try healed, the sixth and the twelfth, of all attempts."""
    folder, lines = RunFolder(tmp_path), []
    for steps in (range(1, 5), range(5, 14)):
        log = EventLog(folder.events)
        own = {"place": SimpleNamespace(is_first=True), "retry": retry_of()}
        trainer = SimpleNamespace(folder=folder, log=log.write, say=lines.append, **own)
        for step in steps:
            own = RetriedStep(step, ("loss spike",), True, False, (3,) if step % 2 else ())
            log_retries(trainer, [own, RetriedStep(step, ("loss spike",), False, True)])  # of its data: no fault
        log.close()
    found = [alert_of(event) for event in read_events(folder.events, "alert")]
    assert [(one.step, one.since, one.value, one.limit) for one in found] == [
        (3, 1, 3, 3),
        (6, 1, 6, 6),
        (12, 1, 12, 12),
    ]
    assert found[-1].places == ("rank 3 (6 times)",)
    assert "12 steps had a fault that was gone in the second try" in described(found[-1])
    assert (
        any("one computed other bits" in line for line in lines)
        and sum(line.startswith("alert") for line in lines) == 3
    )
