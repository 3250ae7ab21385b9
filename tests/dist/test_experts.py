"""Experts on several ranks train as in one process, with any distribution of tokens: float64, by the code that trains.

tests/proof has experts in every composition; here are other loads, and the order in which a rank issues operations.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.host_waits import HostCopies

from ingot.rehearse.dryrun.tracker import Tracker
from ingot.rehearse.profile.host_reads import HostReads
from ingot.schema.arch import Moe
from ingot.trainer.build import build_parts
from ingot.trainer.parallel import expert
from ingot.trainer.step import train_step

from .steps import ARCH, CPU, batch_of, join, keep, run_of, same_bits, state_of
from .test_overlap_order import OUTER, _Mark, counts_at_marks
from .test_overlap_order import issued as issued_around_blocks

MOE = Moe(num_experts=8, top_k=2, d_expert=6, shared_experts=1, bias_rate=0.01, noise=0.3, sequence_loss=0.02)
EXPERTS = replace(ARCH, num_layers=2, moe=MOE)
# Experts that get all tokens, by what a test calls it: biases decide who is chosen, and change nothing else.
CROWDED = {"all to one rank": (0, 1), "all to one expert each": (2, 7), "as it comes": ()}


def run_with(moe=MOE, **parallel):
    return run_of(arch=replace(EXPERTS, moe=moe), global_batch=8, **parallel)


def first_step(rank, world, run, crowded=()):
    """Gradients before clipping, their norm, and state after the step; and assignments by layer and expert."""
    parts = build_parts(run, CPU, Path())
    assert parts.balance is not None
    if parts.balance.bias_RE is not None:
        parts.balance.bias_RE[:, list(crowded)] += 100.0
    gradients, reduce = [], parts.model.reduce

    def reduce_and_look():
        reduce()
        gradients.extend((piece, piece.grad) for piece in parts.model.shards if piece.grad is not None)
        gradients[:] = keep(gradients)

    parts.model.reduce = reduce_and_look
    facts = train_step(parts, batch_of(run, parts.mesh, 1), 1e-3)
    assert facts.experts is not None
    return gradients, float(facts.grad_norm), keep(state_of(parts)), facts.experts.tolist()


@pytest.fixture(scope="module")
def alone():
    """`alone(fork_ranks, moe, crowded)`: the first step of one process, computed once for all layouts."""
    known = {}

    def computed(fork_ranks, moe, crowded):
        if (moe, crowded) not in known:
            (known[moe, crowded],) = fork_ranks(first_step, 1, run_with(moe), crowded)
        return known[moe, crowded]

    return computed


def assert_equals_one_process(fork_ranks, alone, run, crowded=()):
    one, norm, _, routed = alone(fork_ranks, run.model.moe, crowded)
    ranks = fork_ranks(first_step, run.parallel.world_size, run, crowded)
    expected, found = join([one]), join([gradients for gradients, *_ in ranks])
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.abs(found[name] - gradient).max() <= 1e-12 * np.abs(gradient).max(), name
    for _, own_norm, _, own_routed in ranks:
        assert own_norm == pytest.approx(norm, rel=1e-12)
        np.testing.assert_allclose(own_routed, routed, rtol=1e-12)
    return np.array(routed)[:, : run.model.moe.num_experts]


@pytest.mark.parametrize("load", CROWDED)
@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard": 2, "ep": 2, "zero": 2},
        {"tp": 2, "ep": 2},
        pytest.param({"dp_shard": 4, "ep": 2, "zero": 3}, marks=pytest.mark.slow),
    ],
)
def test_loads_do_not_matter(fork_ranks, alone, layout, load):
    loads = assert_equals_one_process(fork_ranks, alone, run_with(**layout), CROWDED[load])
    if CROWDED[load]:
        assert (loads > 0).sum() == 2 * EXPERTS.num_layers  # and all others have nothing to do


@pytest.mark.parametrize(
    "layout", [{"dp_shard": 2, "ep": 2, "zero": 3}, pytest.param({"tp": 2, "cp": 2, "ep": 4}, marks=pytest.mark.slow)]
)
def test_the_same_assignments_are_dropped(fork_ranks, alone, layout):
    moe = replace(MOE, capacity_factor=0.5, overflow="fallback")
    assert_equals_one_process(fork_ranks, alone, run_with(moe, **layout), (0, 1))


@pytest.mark.parametrize(
    "settings",
    [
        {"ep": 1, "unit_layers": 2, "recompute": "full"},
        {"ep": 2, "unit_layers": 0, "recompute": "selective"},
        {"ep": 2, "reshard": False, "recompute": "full", "recompute_every": 2},
        {"ep": 2, "offload": "cpu", "offload_parameters": True},
    ],
    ids=str,
)
def test_units_of_experts_may_be_large_may_stay_and_may_live_on_the_host(fork_ranks, alone, settings):
    assert_equals_one_process(fork_ranks, alone, run_with(dp_shard=2, zero=3, **settings))


@pytest.mark.parametrize("copies, ep", [pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)])
def test_canonical_sums_of_experts_do_not_depend_on_copies(fork_ranks, alone, copies, ep):
    settings = {"cp": 2, "ep": ep, "reduce": "canonical", "virtual_ranks": 2}
    one, more = run_with(**settings), run_with(**settings, dp_replicate=copies)
    single, together = (
        join([state for _, _, state, _ in fork_ranks(first_step, run.parallel.world_size, run)]) for run in (one, more)
    )
    assert same_bits(single, together)
    assert_equals_one_process(fork_ranks, alone, more)


@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-5), pytest.param("bf16", 0.05, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "layout", [{"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 1}], ids=str
)
def test_means_are_means_in_every_precision(fork_ranks, layout, precision, tolerance):
    """FSDP2 divides by other means in other dtypes, and by none where a rank has its experts for itself."""
    one, run = (run_with(precision=precision, zero=3, **degrees) for degrees in ({}, layout))
    (_, norm, *_), *_ = fork_ranks(first_step, 1, one)
    for _, found, *_ in fork_ranks(first_step, 4, run):
        assert found == pytest.approx(norm, rel=tolerance)


# -- what is issued, and when --


def heard(rank, world, run, listen):
    """Marks and all-to-alls of the second step of a model with one layer."""
    order: list[str] = []
    parts = build_parts(run, CPU, Path())
    (block,) = parts.model.stages[0].get_submodule("blocks").children()
    moe = block.get_submodule("moe")
    for name in ("shared", "experts", *(["fallback"] if run.model.moe.has_fallback else [])):
        part = moe.get_submodule(name)
        part.forward = partial(_marked, part.forward, name, order.append)
    train_step(parts, batch_of(run, parts.mesh, 1), 1e-3)
    listen(order)
    train_step(parts, batch_of(run, parts.mesh, 2), 1e-3)
    return order


def _marked(forward, name, note, x, *args):
    note(f"forward {name}")
    return _Mark.apply(forward(x, *args), note, f"backward {name}")


def _listen(order):
    order.clear()

    def recording(function, what):
        def recorded(*args):
            order.append(what)
            return function(*args)

        return recorded

    expert.start_all_to_all = recording(expert.start_all_to_all, "start")
    expert.finish = recording(expert.finish, "finish")


@pytest.mark.parametrize("zero, capacity", [(1, 0.0), (3, 1.0)])
def test_what_all_tokens_pass_computes_while_rows_are_on_their_way(fork_ranks, zero, capacity):
    moe = replace(MOE, capacity_factor=capacity, overflow="fallback" if capacity else "drop", sequence_loss=0.0)
    run = run_of(arch=replace(EXPERTS, num_layers=1, moe=moe), global_batch=2, dp_shard=2, ep=2, zero=zero)
    also = ["fallback"] if capacity else []
    dense = [f"forward {name}" for name in ("shared", *also)]
    counts, there, back = ["start", "finish"], ["start", *dense, "finish"], ["start", "finish"]
    forward = [*counts, *there, "forward experts", *back]
    dense = [f"backward {name}" for name in (*also, "shared")]
    backward = [*back, "backward experts", "start", *dense, "finish"]
    for order in fork_ranks(heard, 2, run, _listen):
        assert order == [*forward, *backward]


def waited(rank, world, run):
    """Return (operation, function) -> times: those of the second step for which the host would wait for a device."""
    parts = build_parts(run, CPU, Path())
    train_step(parts, batch_of(run, parts.mesh, 1), 1e-3)
    with HostReads(CPU) as reads, HostCopies(numbers=True) as copies:
        train_step(parts, batch_of(run, parts.mesh, 2), 1e-3)
    found = Counter()
    for (operation, line), times in (reads.found + copies.found).items():
        found[operation, line.rpartition(" ")[2]] += times
    return dict(found)


LIMITED = {"capacity_factor": 1.25, "overflow": "fallback"}


@pytest.mark.parametrize(
    "waits, layout, changes",
    [
        pytest.param(0, {"recompute": "full"}, {}, id="whole"),
        pytest.param(0, {"recompute": "full"}, LIMITED, id="whole-limited"),
        pytest.param(1, {"ep": 2, "recompute": "full"}, {}, id="divided-full"),
        pytest.param(1, {"ep": 2, "recompute": "selective", "zero": 3}, {}, id="divided-selective"),
        pytest.param(0, {"ep": 2, "recompute": "selective"}, LIMITED, id="divided-limited"),
    ],
)
def test_the_host_waits_at_most_once_for_a_layer(fork_ranks, waits, layout, changes):
    """Once for a layer and micro-batch if ranks exchange as many rows as are routed, never otherwise, and in no
    backward: whatever is recomputed."""
    moe = replace(MOE, d_expert=8, **changes)
    run = run_with(moe, precision="fp32", dp_shard=2, **layout)
    each = {("tolist", "on_host"): waits * EXPERTS.num_layers * run.accumulation}
    for found in fork_ranks(waited, 2, run):
        assert run.accumulation > 1
        assert found == (each if waits else {})


def issued(rank, world, run):
    """All-to-alls and gathers of one step, and the gradients."""
    parts = build_parts(run, CPU, Path())
    gradients, reduce = [], parts.model.reduce

    def reduce_and_look():
        reduce()
        gradients.extend(keep((piece, piece.grad) for piece in parts.model.shards))

    parts.model.reduce = reduce_and_look
    with Tracker() as tracker:
        train_step(parts, batch_of(run, parts.mesh, 1), 1e-3)
    names = [event.call.op for event in tracker.events if event.call]
    return names.count("all_to_all"), names.count("all_gather"), gradients


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_recompute_keeps_bits_and_selective_runs_no_all_to_all_again(fork_ranks, zero):
    each = {"dp_shard": 4, "ep": 2, "zero": zero, "global_batch": 4}
    plain, full, selective = (
        fork_ranks(issued, 4, run_of(arch=EXPERTS, recompute=how, **each)) for how in ("none", "full", "selective")
    )
    layers = EXPERTS.num_layers
    for (calls, gathers, gradients), again, kept in zip(plain, full, selective, strict=True):
        assert calls == 5 * layers  # counts, there and back; and the gradients of the latter two
        assert (again[0], kept[0]) == (8 * layers, calls)
        assert again[1] == kept[1] == gathers
        for other in (again[2], kept[2]):
            for (*place, ours), (*same_place, theirs) in zip(other, gradients, strict=True):
                assert place == same_place and np.array_equal(ours, theirs), place


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_experts_are_gathered_with_their_block(fork_ranks, zero, prefetch):
    layers = EXPERTS.num_layers
    run = run_of(arch=EXPERTS, dp_shard=4, ep=2, zero=zero, prefetch=prefetch, global_batch=4)
    for order in fork_ranks(issued_around_blocks, 4, run):
        at, total = counts_at_marks(order)
        for i in range(layers):
            ahead = OUTER + 2 * min(i + 1 + prefetch, layers)
            assert at[f"forward {i}"]["all_gather"] == ahead, order
            if zero == 3:
                assert at[f"backward {layers - 1 - i}"]["all_gather"] == OUTER + 2 * layers + ahead, order
        assert total["all_gather"] == (1 + (zero == 3)) * (OUTER + 2 * layers)
        assert total["reduce_scatter"] == OUTER + 2 * layers
