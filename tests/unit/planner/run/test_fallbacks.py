"""Fallback layouts: legal, with the batch of the run, smaller copies first, and each change smaller than the last."""

from dataclasses import replace
from itertools import pairwise

import pytest
from tests.unit.planner.run.test_check import CPU, GIB, RUN

from ingot.config import to_dict
from ingot.planner.request.clusters import load_cluster
from ingot.planner.run.fallbacks import plan_fallbacks
from ingot.planner.search.candidates import Evaluator
from ingot.planner.show.fallbacks import fallback_notes
from ingot.schema.run import RunConfig
from ingot.theory.rules import run_from_dict, run_problems

BIG = replace(
    RUN,
    model=replace(RUN.model, max_seq_len=1024),
    train=replace(RUN.train, seq_len=1024, global_batch=64, micro_batch=8),
)


def with_layout(run: RunConfig, nodes: int = 1, min_ranks: int = 0, **parallel) -> RunConfig:
    launch = replace(run.launch, nodes=nodes, min_ranks=min_ranks)
    return replace(run, launch=launch, parallel=replace(run.parallel, **parallel))


def applied(run: RunConfig, overrides) -> RunConfig:
    values = to_dict(run)
    for override in overrides:
        key, _, value = override.partition("=")
        section, name = key.split(".")
        values[section][name] = int(value) if value.isdigit() else value
    return run_from_dict(values)


def test_fewer_nodes_have_fewer_copies_and_more_accumulation():
    run = with_layout(RUN, nodes=4, min_ranks=1, dp_shard=4)
    run = replace(run, train=replace(run.train, micro_batch=2))
    found = plan_fallbacks(run, CPU).fewer_nodes
    assert [entry.nodes for entry in found] == [3, 2, 1]
    assert "cannot divide a batch of 8" in found[0].problem and not found[0].overrides
    for entry in found[1:]:
        smaller = applied(run, entry.overrides)
        assert Evaluator.legal(smaller) and smaller.parallel.world_size == entry.ranks == entry.nodes
        assert smaller.train.global_batch == run.train.global_batch and smaller.train.micro_batch == 2
        assert smaller.launch.nodes == entry.nodes and smaller.accumulation == 4 // entry.nodes


def test_no_fewer_nodes_than_the_run_permits():
    run = replace(RUN, train=replace(RUN.train, micro_batch=1))
    assert plan_fallbacks(with_layout(run, nodes=4, dp_shard=4), CPU).fewer_nodes == ()
    half = plan_fallbacks(with_layout(run, nodes=4, min_ranks=4, dp_shard=8), CPU)
    assert [entry.ranks for entry in half.fewer_nodes] == [6, 4]


def test_copies_of_the_model_go_before_shards_and_canonical_sums_stay():
    run = with_layout(RUN, nodes=2, min_ranks=2, dp_replicate=2, dp_shard=2)
    run = replace(run, train=replace(run.train, micro_batch=2))
    (entry,) = plan_fallbacks(run, CPU).fewer_nodes
    assert entry.overrides == ("parallel.dp_replicate=1", "launch.nodes=1")
    run = with_layout(run, 2, 1, dp_shard=1, reduce="canonical", virtual_ranks=2)
    (entry,) = plan_fallbacks(run, CPU).fewer_nodes
    assert entry.overrides == ("parallel.dp_replicate=1", "launch.nodes=1")


def test_copies_that_the_trainer_would_refuse_are_no_layout():
    """Three ranks divide the batch, but not the four parts of canonical sums."""
    run = with_layout(RUN, nodes=4, min_ranks=2, dp_replicate=4, reduce="canonical", virtual_ranks=4)
    run = replace(run, train=replace(run.train, global_batch=12, micro_batch=1))
    three, two = plan_fallbacks(run, CPU).fewer_nodes
    assert three.problem and two.overrides == ("parallel.dp_replicate=2", "launch.nodes=2")


def test_a_layout_that_cannot_shrink_is_searched():
    run = with_layout(RUN, nodes=2, min_ranks=1, tp=2)
    (entry,) = plan_fallbacks(run, CPU).fewer_nodes
    smaller = applied(run, entry.overrides)
    assert (smaller.parallel.world_size, smaller.parallel.tp) == (1, 1) and Evaluator.legal(smaller)


def test_a_smaller_number_of_ranks_that_does_not_fit_is_no_layout():
    run = with_layout(RUN, nodes=2, min_ranks=1, dp_shard=2)
    need = plan_fallbacks(run, CPU).own.memory_bytes
    one = plan_fallbacks(run, replace(CPU, memory_bytes=need // 2)).fewer_nodes[0]
    assert one.problem or one.memory_bytes <= need


def test_changes_for_memory_need_less_and_less_for_as_little_time_as_possible():
    cluster = load_cluster("8xh100")
    run = replace(with_layout(BIG, dp_shard=8), train=replace(BIG.train, micro_batch=8))
    found = plan_fallbacks(run, cluster)
    sizes = [found.own.memory_bytes, *(entry.memory_bytes for entry in found.less_memory)]
    assert 1 < len(sizes) <= 9 and sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    for entry in found.less_memory:
        changed = applied(run, entry.overrides)
        assert Evaluator.legal(changed) and changed.parallel.world_size == 8
        assert changed.train.global_batch == run.train.global_batch
    assert found.less_memory[0].step_seconds < 1.5 * found.own.step_seconds


def test_a_run_that_does_not_fit_gets_a_change_that_does_first():
    run = with_layout(BIG, dp_shard=2)
    roomy = plan_fallbacks(run, CPU)
    first = roomy.less_memory[0].memory_bytes
    least = min(entry.memory_bytes for entry in roomy.less_memory)
    assert first > least
    tight = plan_fallbacks(run, replace(CPU, memory_bytes=int(2 * (first - 1) / 0.9)))
    assert tight.less_memory[0].memory_bytes < first


def test_changes_that_save_next_to_nothing_are_left_out():
    """A tiny model needs the memory of the process, whatever its layout."""
    run = with_layout(replace(RUN, train=replace(RUN.train, micro_batch=1)), dp_shard=2)
    found = plan_fallbacks(run, CPU)
    changes = [found.own, *found.less_memory]
    for before, after in pairwise(changes):
        assert before.memory_bytes - after.memory_bytes >= 0.04 * (before.memory_bytes - CPU.runtime_bytes)


def test_micro_batches_that_can_be_halved_often_do_not_keep_recomputation_out():
    run = with_layout(replace(BIG, train=replace(BIG.train, micro_batch=16)), dp_shard=2)
    changes = [entry.overrides for entry in plan_fallbacks(run, CPU).less_memory]
    sizes = [f"train.micro_batch={size}" for size in (8, 4, 2, 1)]
    assert [change[0] for change in changes[:4]] == sizes and "parallel.recompute=full" in changes[4]


def test_fewer_nodes_have_changes_for_memory_too():
    run = with_layout(BIG, nodes=4, min_ranks=1, dp_shard=4)
    found = plan_fallbacks(run, CPU)
    for base in (found.own, *(entry for entry in found.fewer_nodes if not entry.problem)):
        ladder = found.ladder(base)
        assert len(ladder) > 2 and ladder[0] == base == found.base_of(base.nodes)
        assert all(after.memory_bytes < before.memory_bytes for before, after in pairwise(ladder))
        for entry in ladder[1:]:
            changed = applied(run, entry.overrides)
            assert Evaluator.legal(changed) and changed.parallel.world_size == entry.ranks == base.ranks
            assert changed.launch.nodes == base.nodes and changed.train.global_batch == run.train.global_batch


def test_every_pipeline_rank_has_its_bill():
    found = plan_fallbacks(with_layout(RUN, pp=2, schedule="1f1b"), CPU)
    assert len(found.bills) == 2 and found.available_bytes == 8 * GIB
    assert max(sum(bill.values()) for bill in found.bills) == found.own.memory_bytes


def test_the_notes_name_the_settings():
    run = with_layout(replace(BIG, train=replace(BIG.train, micro_batch=8)), nodes=4, min_ranks=1, dp_shard=4)
    notes = dict(fallback_notes(plan_fallbacks(run, CPU)))
    assert "goes on with these settings: with 2 of 4, parallel.dp_shard=2 launch.nodes=2" in notes["nodes"]
    assert notes["nodes"].endswith("; with 3, it uses fewer of them")
    assert "train.micro_batch=4" in notes["memory"] and "then 2 more changes" in notes["memory"]
    assert "nodes" not in dict(fallback_notes(plan_fallbacks(RUN, CPU)))
    found = plan_fallbacks(run, CPU)
    three, two, one = found.fewer_nodes
    alone = replace(found, fewer_nodes=(three, two, replace(one, problem="no")))
    assert dict(fallback_notes(alone))["nodes"].endswith("; with 3, it uses fewer of them; with 1, it waits")
    assert "no layout for fewer than 4" in dict(fallback_notes(replace(found, fewer_nodes=(three,))))["nodes"]


@pytest.mark.parametrize(("least", "nearest"), [(3, "2 or 4"), (6, "4"), (4, "")])
def test_the_fewest_ranks_are_those_of_whole_nodes(least, nearest):
    run = with_layout(replace(RUN, train=replace(RUN.train, micro_batch=1)), nodes=2, min_ranks=least, dp_shard=4)
    found = dict(run_problems(run))
    assert found.keys() == ({"launch.min_ranks"} if nearest else set())
    assert found.get("launch.min_ranks", "").endswith(f"use {nearest}" if nearest else "")
