"""The clock of waits counts the time until other ranks come, however it is waited for."""

import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ingot.trainer.mesh import waiting
from ingot.trainer.mesh.collectives import all_sum, start_all_sum
from ingot.trainer.mesh.waiting import WaitClock

LATE_SECONDS = 0.3


def seconds(rank, world, exchange, inner=False):
    """Return what this rank's clock counts of an exchange for which rank 1 is late. inner: in another thread."""
    clock = WaitClock()
    clock.start()
    dist.barrier()
    before = clock.seconds
    if rank == 1:
        time.sleep(LATE_SECONDS)
    if inner:
        thread = threading.Thread(target=exchange)
        thread.start()
        thread.join()
    else:
        exchange()
    counted = clock.seconds - before
    clock.stop()
    return counted


def blocking():
    dist.all_reduce(torch.ones(3))


def started():
    start_all_sum(torch.ones(3), dist.group.WORLD).wait()


def operator():
    all_sum(torch.ones(3), dist.group.WORLD)


def judge(found):
    early, late = found
    assert early > LATE_SECONDS * 0.6 and late < early / 2


@pytest.mark.parametrize("exchange", [blocking, started])
def test_blocking_collectives_and_waits_for_started_ones_count(fork_ranks, exchange):
    judge(fork_ranks(partial(seconds, exchange=exchange), 2))


def test_operators_of_eager_code_count(fork_ranks):
    judge(fork_ranks(partial(seconds, exchange=operator), 2))


def test_other_threads_do_not_count(fork_ranks):
    """A thread that exchanges what a save needs keeps no step waiting."""
    assert fork_ranks(partial(seconds, exchange=blocking, inner=True), 2) == [0.0, 0.0]


def marks(rank, world):
    """Return what a clock reports in its own thread, in another one, and of a wait that fails."""
    found = []
    clock = WaitClock(found.append)
    clock.start()
    blocking()
    blocking()
    thread = threading.Thread(target=blocking)
    thread.start()
    thread.join()
    with pytest.raises(ZeroDivisionError):
        clock.time(lambda: 1 / 0)
    clock.stop()
    return found


def test_the_clock_reports_when_a_wait_begins_and_ends(fork_ranks):
    assert fork_ranks(marks, 2) == [[True, False] * 3] * 2


def test_a_stopped_clock_leaves_torch_as_it_was():
    wait, clock = dist.Work.wait, WaitClock()
    clock.start()
    assert dist.Work.wait is not wait and waiting.running is clock
    clock.stop()
    clock.stop()
    assert dist.Work.wait is wait and waiting.running is None
