"""No step waits for the device between two log lines: nothing in it reads a tensor's values on the host, and nothing
is copied between host and device but in the background.

A CPU has nothing to wait for, so the operations that would wait on a device are counted by the rule of `ingot profile`:
in whole runs of CPU ranks, and in steps on a device in the place of a GPU. tests/gpu/test_train.py lets CUDA refuse
them.
"""

import gc
import json
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch
from tests.host_waits import HAS_STAND_IN, HostCopies
from tests.unit.trainer.test_loop import run_rank

from ingot.rehearse.profile.host_reads import HostReads
from ingot.trainer import loop
from ingot.trainer.resilience.stop_vote import StopVote
from ingot.trainer.step import train_step

STEPS, LINE = 22, 11  # the state is hashed after step 20 and before step 21
CPU = torch.device("cpu")
# The functions that read values at a log line.
AT_LINES = {"_read_trained", "_read", "read", "take", "look", "line"}


def vote(votes, **facts):
    """Vote about a stop, as usual: with numbers of the host, which no device has."""
    HostCopies.is_off = True
    try:
        return after_step(votes, **facts)
    finally:
        HostCopies.is_off = False


after_step = StopVote.after_step


def watched_run(rank, ranks, folder) -> tuple[dict[int, int], list[str], set[str]]:
    """Train `folder` with watched steps. Returns the number of operations of each step without its line, what waits in
    these, and the functions that wait at lines."""
    seen, between, at_lines = {}, [], set()

    def watched(step, is_line, function, *arguments):
        with ExitStack() as modes:
            values, copies = modes.enter_context(HostReads(CPU)), modes.enter_context(HostCopies())
            result = function(*arguments)
        found = [f"{name} at {line}" for name, line in values.found + copies.found]
        if is_line:
            at_lines.update(one.rpartition(" ")[2] for one in found)
        else:
            between.extend(found)
            seen[step] = seen.get(step, 0) + values.seen
        return result

    judge, collected = loop.RunLoop.judge, []

    def collecting(phase, facts):
        if phase == "start" and not gc.isenabled():
            collected.append(facts["generation"])

    def judged(self, batch, result):
        watched(batch.step, batch.step % LINE == 0, judge, self, batch, result)

    loop.train_step = lambda parts, batch, lr: watched(batch.step, False, train_step, parts, batch, lr)
    loop.RunLoop.judge, StopVote.after_step = judged, vote
    gc.callbacks.append(collecting)
    assert run_rank(rank, ranks, folder)[0] == (STEPS, False)
    assert collected == [1] * STEPS and gc.isenabled()  # garbage is collected by hand, after each step
    return seen, between, at_lines


@pytest.mark.parametrize(("precision", "axis"), [("fp32", "dp_shard"), ("fp16", "tp")], ids=["fp32", "fp16"])
def test_nothing_in_a_step_reads_values_on_the_host(fork_ranks, make_run, precision, axis):
    """The guard and the hashes of the state have their defaults; in fp16 there is a loss scale, too."""
    layout = {"dp_shard": 1, axis: 2, "recompute": "selective"}
    folder = make_run(**layout, steps=STEPS, log_every=LINE, every_steps=STEPS, precision=precision)
    for seen, between, at_lines in fork_ranks(watched_run, 2, folder):
        assert between == []
        assert sorted(seen) == list(range(1, STEPS + 1))
        assert seen[20] > seen[19] and seen[21] > seen[19]  # these have hashes
        assert {"_read_trained", "_read"} <= at_lines <= AT_LINES


@pytest.mark.slow
@pytest.mark.skipif(not HAS_STAND_IN, reason="this release of torch has no devices in Python")
def test_no_step_on_a_device_reads_values_or_copies_with_a_wait():
    """The steps run in a process of their own, which knows the device until its end."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = sys.executable, "-m", "tests.host_waits"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("copies") == 3
    assert len(found) == 5
    assert found == {name: [] for name in found}


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
        with HostReads(CPU) as reads, HostCopies() as copies:
            read()
        assert (reads.found + copies.found).total() == 1
    with HostReads(torch.device("meta")) as reads:
        assert not bool(mask.all())  # the host has these values
    assert not reads.found
    with HostReads(CPU) as reads:
        torch.ones(2).repeat_interleave(torch.tensor([1, 2]), output_size=3)
    assert not reads.found
