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
from ingot.trainer.resilience.incidents import JobIncident

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
        layouts.begin(layout, 2)
    again = Layouts(folder, FOUR.launch, plan_fallbacks(FOUR, CPU))
    again.begin(two, 2)
    again.begin(None, 4)
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


LARGE = replace(
    RUN,
    model=replace(RUN.model, max_seq_len=1024),
    train=replace(RUN.train, seq_len=1024, global_batch=64, micro_batch=16),
    parallel=replace(RUN.parallel, dp_shard=2),
)
PLANNED = plan_fallbacks(LARGE, CPU)
RAISED = JobIncident(rank=1, kind="memory", cause="raised MemoryError: ", signature="raised MemoryError", step=7)
KILLED = replace(RAISED, cause="was killed (SIGKILL): the kernel had no memory left", signature="")


def of_memory(folder, on_oom="adapt", clock=None) -> Layouts:
    return Layouts(folder, replace(LARGE.launch, on_oom=on_oom), PLANNED, clock or Clock())


def test_a_rank_without_memory_ends_the_run_with_its_bill_and_the_cheapest_change(folder):
    error = of_memory(folder, "stop").respond(RAISED).error
    assert error.code == "E-RUN-MEMORY" and error.exit_code == 93
    first = PLANNED.less_memory[0].overrides
    assert error.facts["bytes"] == PLANNED.bills[0] and error.facts["overrides"] == list(first)
    assert f"--set {first[0]}" in error.fix and "launch.on_oom=adapt" in error.fix
    assert all(kind in error.found for kind in ("weights", "optimizer", "activations"))


def test_each_lack_of_memory_takes_the_next_layout_until_the_list_ends(folder):
    first_tried = " ".join(PLANNED.less_memory[0].overrides)
    layouts = of_memory(folder)
    assert layouts.begin(None, 2) == ()
    for change in PLANNED.less_memory:
        found = layouts.respond(RAISED)
        assert found.error is None and found.adapted and change.overrides[0] in found.cause
        assert layouts.begin(None, 2) == change.overrides
    error = layouts.respond(RAISED).error
    assert error.code == "E-RUN-MEMORY" and error.facts["overrides"] == [] and error.facts["bytes"] == {}
    assert f"the last of the layouts with less memory that the planner found: {first_tried}" in error.found
    recorded = [(e["overrides"], e["reason"]) for e in read_events(folder.events, events.LAYOUT)]
    assert recorded == [(list(change.overrides), "memory") for change in PLANNED.less_memory]


def test_a_layout_with_less_memory_stays_at_later_starts_as_long_as_it_is_wanted(folder):
    layouts = of_memory(folder)
    layouts.respond(RAISED)
    first = layouts.begin(None, 2)
    again = of_memory(folder)
    assert again.adapted == again.begin(None, 2) == first == PLANNED.less_memory[0].overrides
    assert of_memory(folder, "stop").begin(None, 2) == ()
    assert of_memory(folder).begin(None, 2) == ()


def test_one_kill_by_the_kernel_is_an_accident(folder):
    clock = Clock()
    layouts = of_memory(folder, "stop", clock)
    assert layouts.respond(KILLED) == KILLED
    clock.now += LARGE.launch.restart_window_seconds + 1
    assert layouts.respond(KILLED) == KILLED
    clock.now += 5
    assert layouts.respond(KILLED).error.code == "E-RUN-MEMORY"


def test_other_failures_take_no_layout_with_less_memory(folder):
    bug = replace(RAISED, kind="bug")
    assert of_memory(folder).respond(bug) == bug


TWO = replace(LARGE, launch=replace(LARGE.launch, nodes=2, min_ranks=1, on_oom="adapt"))
ON_TWO = plan_fallbacks(TWO, CPU)


def test_fewer_nodes_have_layouts_with_less_memory_of_their_own(folder):
    layouts = Layouts(folder, TWO.launch, ON_TWO)
    one = layouts.for_nodes(1)
    ladder = ON_TWO.ladder(one)
    assert len(ladder) > 2 and {entry.nodes for entry in ladder} == {1}
    for now in ladder:
        assert layouts.begin(one, 1) == now.overrides
        found = layouts.respond(RAISED)
    assert found.error.code == "E-RUN-MEMORY" and found.error.facts["overrides"] == []
    recorded = [(e["nodes"], e["overrides"], e["reason"]) for e in read_events(folder.events, events.LAYOUT)]
    reasons = ["nodes"] + ["memory"] * (len(ladder) - 1)
    assert recorded == [(1, list(now.overrides), reason) for now, reason in zip(ladder, reasons, strict=True)]


def test_what_was_too_much_on_all_nodes_is_not_tried_on_fewer_and_all_have_their_own_again(folder):
    layouts = Layouts(folder, TWO.launch, ON_TWO)
    layouts.begin(None, 2)
    layouts.respond(RAISED)
    one = layouts.for_nodes(1)
    smaller = layouts.begin(one, 1)
    (taken,) = [entry for entry in ON_TWO.ladder(one) if entry.overrides == smaller]
    assert taken is not one and taken.memory_bytes < ON_TWO.own.memory_bytes
    assert layouts.begin(None, 2) == ON_TWO.less_memory[0].overrides


def test_a_run_that_may_not_adapt_is_shown_no_settings_that_keep_it_small(folder):
    layouts = Layouts(folder, replace(TWO.launch, on_oom="stop"), ON_TWO)
    layouts.begin(layouts.for_nodes(1), 1)
    error = layouts.respond(RAISED).error
    assert "--set launch.on_oom=adapt" in error.fix and "--set launch.nodes" not in error.fix


def test_a_run_without_planned_layouts_ends_without_memory_too(folder):
    error = Layouts(folder, LARGE.launch).respond(RAISED).error
    assert error.code == "E-RUN-MEMORY" and "train.micro_batch" in error.fix
    adapts = replace(LARGE, launch=replace(LARGE.launch, on_oom="adapt"))
    with refused("E-FALLBACKS-READ"):
        open_layouts(folder, adapts)
