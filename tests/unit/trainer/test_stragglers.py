"""A slow rank of real runs on four forked ranks is named with its phase and factor.

How many steps that takes, and how exact the factor is, depends on the other work of the machine here; for times that a
test gives, it is in telemetry/test_stragglers.py.
"""

import time
from statistics import median

import pytest

from ingot.events import read_events
from ingot.plugins.callback import StepCallback
from ingot.schema import events
from ingot.trainer import slow_ranks
from ingot.trainer.loader.loader import Loader
from ingot.trainer.telemetry import slow_machines

from .test_loop import run_rank

DRAINS = {
    'on_straggler = "report"': 'on_straggler = "drain"',
    "straggler_seconds = 300.0": "straggler_seconds = 0.01",
    "\nnodes = 1\n": "\nnodes = 4\n",
}
WORK_SECONDS = 0.04  # of each rank and step, beyond a few milliseconds of the model


class Working(StepCallback):
    """Work that takes WORK_SECONDS; on rank 1 three times as long in the steps of `slow`.

    The model's own part of a step takes as long as that work on a busy machine, and hides a smaller difference.
    """

    slow = range(0)

    def __init__(self, run, options):
        self.rank = run.rank

    def on_gradients(self, step):
        time.sleep(WORK_SECONDS * (3 if self.rank == 1 and step in self.slow else 1))


@pytest.fixture
def train(fork_ranks, make_run, register):
    """`train(slow=range(6, 25))`: the `straggler` events of rank 1, the lines and the folder of a run with a log line
    after every step, or after `log_every` ones."""
    register(Working)

    def run(*, slow=range(0), slow_data=False, steps=24, log_every=1, factor=1.2, drains=False):
        Working.slow = slow
        folder = make_run(dp_shard=4, steps=steps, log_every=log_every, every_steps=0)
        text = folder.config.read_text().replace("straggler_factor = 1.2", f"straggler_factor = {factor}")
        if drains:
            for before, after in DRAINS.items():
                assert text.count(before) == 1
                text = text.replace(before, after)
        folder.config.write_text(f"{text}\n[callbacks.probe]\n")

        def rank_of_run(rank, ranks):
            if slow_data and rank == 1:
                get = Loader._get

                def slowly(self):
                    time.sleep(WORK_SECONDS)
                    return get(self)

                Loader._get = slowly
            return run_rank(rank, ranks, folder)

        results = fork_ranks(rank_of_run, 4)
        found = [e for e in read_events(folder.events, events.STRAGGLER) if e["rank"] == 1]
        return found, results[0][1], folder

    yield run
    Working.slow = range(0)


def test_a_rank_that_computes_longer_is_named(train):
    found, lines, folder = train(slow=range(8, 41), steps=40)
    first = found[0]
    assert (first["phase"], first["ended"]) == ("compute", False)
    assert 1.3 < first["factor"] < 3.6 and first["step"] >= 8
    assert [line for line in lines if line.startswith("straggler rank 1 on ")]
    # The others wait for it in collectives.
    waits = [e["collectives"] for e in read_events(folder.events, events.WAITS) if e["step"] > 10]
    assert median(e["most"] for e in waits) > WORK_SECONDS * 0.8


@pytest.mark.slow
def test_a_rank_that_stays_slow_may_cost_its_machine_the_place(train, monkeypatch):
    monkeypatch.setattr(slow_machines, "LONG_STEPS", 1)
    monkeypatch.setattr(slow_ranks, "SUPERVISOR_VARIABLE", "PATH")  # as if a launcher watched these ranks
    found, lines, _ = train(slow=range(8, 41), steps=40, drains=True)
    assert any(event["slowdown"] and event["slowdown"] > 1 for event in found), found
    assert [line for line in lines if line.endswith("long enough to drain its machine")]


@pytest.mark.slow
def test_a_wait_for_the_slow_rank_is_no_work(train):
    """Between two lines ranks wait for each other only within steps."""
    found, _, _ = train(slow=range(9, 49), steps=48, log_every=4)
    assert found and found[0]["factor"] > 1.3


@pytest.mark.slow
def test_a_rank_that_waits_for_its_data_is_named_by_that(train):
    found, _, _ = train(slow_data=True, steps=40)
    assert found[0]["phase"] == "data"


@pytest.mark.nightly
def test_the_recovery_of_a_rank_is_reported(train):
    found, lines, _ = train(slow=range(3, 25), steps=72)
    assert (found[0]["ended"], found[-1]["ended"]) == (False, True)
    assert sum(line.startswith("straggler rank 1 ") for line in lines) == len(found)


def test_a_run_that_does_not_look_for_slow_ranks_names_none(train):
    assert not train(slow=range(3, 25), factor=0.0)[0]
