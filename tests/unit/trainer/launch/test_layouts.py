"""The layouts of a job: which one it has with the nodes that are there, and when it takes more nodes again."""

from dataclasses import replace

import pytest
from tests.expect import refused
from tests.unit.planner.run.test_check import CPU, RUN

from ingot.events import read_events
from ingot.planner.run.fallbacks import plan_fallbacks
from ingot.schema import events
from ingot.schema.fallbacks import write_fallbacks
from ingot.schema.run_folder import RunFolder
from ingot.trainer.launch.layouts import Layouts, open_layouts

FOUR = replace(
    RUN,
    train=replace(RUN.train, micro_batch=2),
    parallel=replace(RUN.parallel, dp_shard=4),
    launch=replace(RUN.launch, nodes=4, min_ranks=1, shrink_seconds=5.0, grow_seconds=60.0),
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


@pytest.fixture
def made(folder):
    clock = Clock()
    layouts = Layouts(folder, FOUR.launch, plan_fallbacks(FOUR, CPU), clock)
    return layouts, clock


def test_the_nodes_that_are_there_decide(made):
    layouts, _ = made
    assert layouts.for_nodes(4) is None and layouts.for_nodes(5) is None
    assert [layouts.for_nodes(present).nodes for present in (3, 2, 1)] == [2, 2, 1]  # three do not divide the batch


def test_a_loss_is_waited_for_shorter_than_the_first_start(made, folder):
    layouts, _ = made
    assert (layouts.wait_seconds(trained=True), layouts.wait_seconds(trained=False)) == (5.0, 600.0)
    short = replace(FOUR.launch, node_wait_seconds=2.0)
    assert Layouts(folder, short).wait_seconds(trained=True) == 2.0


def test_a_job_grows_when_more_nodes_take_part_but_not_soon_again(made):
    layouts, clock = made
    assert not layouts.can_grow(2, 3)  # three nodes would train on two
    assert layouts.can_grow(1, 3) and layouts.can_grow(2, 4) and not layouts.can_grow(4, 9)
    layouts.grow()
    clock.now += 59
    assert not layouts.can_grow(2, 4)
    clock.now += 2
    assert layouts.can_grow(2, 4)


def test_a_change_is_recorded_once_also_after_another_start(made, folder):
    layouts, _ = made
    two = layouts.for_nodes(2)
    for layout in (None, two, two):
        layouts.record(layout, 2)
    again = Layouts(folder, FOUR.launch)
    again.record(two, 2)
    again.record(None, 4)
    found = [(e["nodes"], e["of_nodes"], e["ranks"], e["reason"]) for e in read_events(folder.events, events.LAYOUT)]
    assert found == [(2, 4, 2, "nodes"), (4, 4, 4, "")]


def test_a_run_on_all_its_nodes_needs_no_file(folder):
    alone = replace(FOUR, launch=replace(FOUR.launch, min_ranks=0))
    assert open_layouts(folder, alone).for_nodes(3) is None
    with refused("E-FALLBACKS-READ"):
        open_layouts(folder, FOUR)
    write_fallbacks(folder.fallbacks, plan_fallbacks(replace(FOUR, train=replace(FOUR.train, micro_batch=1)), CPU))
    with refused("E-FALLBACKS-OTHER"):
        open_layouts(folder, FOUR)
    write_fallbacks(folder.fallbacks, plan_fallbacks(FOUR, CPU))
    assert open_layouts(folder, FOUR).for_nodes(3).ranks == 2
