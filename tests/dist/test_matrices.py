"""Updates of whole matrices equal those of one process in every layout: the Muon of examples/extend trains."""

import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ingot.plugins.optimizer import OPTIMIZERS
from ingot.plugins.registry import MAIN
from ingot.schema.arch import Moe
from ingot.schema.run import Optim
from ingot.trainer.build import build_parts
from ingot.trainer.optim import matrices
from ingot.trainer.step import train_step

from .steps import ARCH, CPU, batch_of, join, keep, run_of, same_bits

EXAMPLES = Path(__file__).parents[2] / "examples" / "extend"
MUON = Optim(kind="muon", lr=1e-2, weight_decay=0.1, clip_norm=0.5)
STEPS = (1, 2, 3)
SMALL = replace(ARCH, num_layers=2)
UNEVEN = replace(SMALL, d_model=14, head_dim=6, d_ffn=19)  # rows that 2, 3 and 4 ranks do not divide
EXPERTS = replace(SMALL, moe=Moe(num_experts=4, top_k=2, d_expert=6, shared_experts=1))
FORMS = {
    "one process": {},
    "zero 1": {"dp_shard": 2, "zero": 1},
    "zero 2": {"dp_shard": 2, "zero": 2},
    "zero 3": {"dp_shard": 2, "zero": 3},
    "zero 1, uneven rows": {"dp_shard": 3, "zero": 1, "arch": UNEVEN, "global_batch": 6},
    "zero 3, uneven rows": {"dp_shard": 3, "zero": 3, "arch": UNEVEN, "global_batch": 6},
    "ranks without rows": {"dp_shard": 5, "zero": 1, "arch": UNEVEN, "global_batch": 10},
    "tp": {"tp": 2},
    "tp without sequence": {"tp": 2, "sequence": False},
    "tp over shared heads": {"tp": 4, "arch": replace(SMALL, num_kv_heads=2)},
    "zero 1 x tp": {"dp_shard": 2, "zero": 1, "tp": 2},
    "zero 3 x tp": {"dp_shard": 2, "zero": 3, "tp": 2, "sequence": False},
    "cp": {"cp": 2},
    "cp x tp": {"cp": 2, "tp": 2},
    "pp": {"pp": 2},
    "pp, two stages on each rank": {"pp": 2, "schedule": "zb_v", "arch": ARCH},
    "ddp": {"dp_replicate": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    "ep": {"dp_shard": 2, "zero": 1, "ep": 2, "arch": EXPERTS},
    "ep, zero 3": {"dp_shard": 4, "zero": 3, "ep": 2, "arch": EXPERTS},
    "ep over tp": {"tp": 2, "ep": 2, "arch": EXPERTS},
    "experts whole": {"dp_shard": 2, "zero": 3, "ep": 1, "arch": EXPERTS},
    "experts with a copy": {"dp_replicate": 2, "dp_shard": 2, "zero": 2, "ep": 2, "arch": EXPERTS},
    "canonical": {"dp_replicate": 2, "reduce": "canonical", "virtual_ranks": 2},
    "canonical, cp": {"cp": 2, "reduce": "canonical", "virtual_ranks": 1},
}  # fmt: skip
# Left to the slow tests: combinations of forms, and second cases of one.
LONG = (
    "zero 2",
    "zero 3, uneven rows",
    "ranks without rows",
    "tp without sequence",
    "tp over shared heads",
    "zero 1 x tp",
    "zero 3 x tp",
    "cp x tp",
    "pp, two stages on each rank",
    "hsdp",
    "ep, zero 3",
    "ep over tp",
    "experts with a copy",
    "canonical, cp",
)


@pytest.fixture(scope="module", autouse=True)
def muon():
    """Muon, registered in this process and so in the ranks that are forked from it."""
    runpy.run_path(str(EXAMPLES / "muon.py"))
    yield
    OPTIMIZERS.forget(MAIN)


def run_with(form, **more):
    return run_of(**{"arch": SMALL, "optim": MUON} | form | more)


def blocks_of(parts):
    """Master weights and the optimizer's state, as blocks of tensors with names of their own."""
    for piece in parts.model.shards:
        yield piece, piece.value
        for kind, tensor in parts.optimizer.moments().get(piece.name, {}).items():
            if kind != "step":
                yield SimpleNamespace(name=f"{kind} of {piece.name}", shape=piece.shape, offsets=piece.offsets), tensor


def trained(rank, world, run, steps=STEPS):
    """State and update counts after the steps."""
    parts = build_parts(run, CPU, Path())
    for step in steps:
        train_step(parts, batch_of(run, parts.mesh, step), run.optim.lr)
    counts = {name: int(state["step"]) for name, state in parts.optimizer.moments().items()}
    assert all(piece.grad is None for piece in parts.model.shards if piece.value.numel())
    return keep(blocks_of(parts)), counts


def whole(ranks):
    return join(blocks for blocks, _ in ranks)


@pytest.fixture(scope="module")
def alone():
    """`alone(fork_ranks, run)`: the state of one process after the steps of a run, computed once for its settings."""
    known = {}

    def computed(fork_ranks, run):
        key = (run.model, run.train, run.optim.kind)
        if key not in known:
            one = run_of(arch=run.model, optim=run.optim, global_batch=run.train.global_batch,
                         precision=run.train.precision)  # fmt: skip
            known[key] = whole(fork_ranks(trained, 1, one))
        return known[key]

    return computed


def deviation(found, expected):
    assert found.keys() == expected.keys()
    return max(np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max() for name in expected)


@pytest.mark.parametrize("form", [pytest.param(f, marks=pytest.mark.slow) if f in LONG else f for f in FORMS])
def test_every_layout_equals_one_process(fork_ranks, alone, form):
    run = run_with(FORMS[form])
    ranks = fork_ranks(trained, run.parallel.world_size, run)
    assert deviation(whole(ranks), alone(fork_ranks, run)) < 1e-10
    assert all(count == len(STEPS) for _, counts in ranks for count in counts.values())


def placed(rank, world, run):
    """The rank's real blocks; the blocks that it computes for its copy of the stage; and the matrices with the number
    of elements that are sent to their workers."""
    parts = build_parts(run, CPU, Path())
    real = {piece.name: (tuple(piece.offsets), tuple(piece.sizes)) for piece in parts.model.shards}
    computed = {
        (name, block.rank): (block.offsets, block.sizes)
        for name, parameter in parts.model.placement().items()
        for block in parameter.blocks
    }
    work = [
        (matrix.name, matrix.rows * matrix.columns, sum(block.elements for block in matrix.blocks if block.sends))
        for by_worker in parts.optimizer.matrices.rounds
        for own in by_worker
        for matrix in own
    ]
    return real, computed, tuple(parts.mesh.ranks("copy")), work


@pytest.mark.parametrize("form", [pytest.param(f, marks=pytest.mark.slow) if f in LONG else f for f in FORMS])
def test_the_placement_is_that_of_the_real_shards(fork_ranks, form):
    run = run_with(FORMS[form])
    ranks = fork_ranks(placed, run.parallel.world_size, run)
    moe = run.model.moe
    for rank, (real, computed, copy, work) in enumerate(ranks):
        assert rank in copy and {other for _, other in computed} == set(copy)
        for (name, other), place in computed.items():
            assert ranks[other][0][name] == place, (name, other)
        assert computed.keys() == {(name, other) for name in real for other in copy}
        assert all(elements == sent for _, elements, sent in work), "every element is sent once"
        assert all(ranks[other][3] == work for other in copy), "all ranks of a copy share the work in the same way"
        for name, count in Counter(name for name, _, _ in work).items():
            assert count == (moe.num_experts if ".experts." in name else 1), name


def test_work_is_shared_out_in_rounds_with_the_same_bits(fork_ranks, monkeypatch):
    run = run_with(FORMS["zero 1 x tp"])
    once = whole(fork_ranks(trained, 4, run))
    monkeypatch.setattr(matrices, "ROUND_ELEMENTS", 600)  # one to three matrices
    assert same_bits(whole(fork_ranks(trained, 4, run)), once)


def workers(rank, world, run):
    calls, parts = [], build_parts(run, CPU, Path())
    of_matrix = parts.optimizer.matrices._of_matrix
    parts.optimizer.matrices._of_matrix = lambda name, *more: calls.append(name) or of_matrix(name, *more)
    train_step(parts, batch_of(run, parts.mesh, 1), run.optim.lr)
    return calls


@pytest.mark.parametrize("form", ["zero 1", "tp", "ep"])
def test_each_matrix_has_one_worker_and_no_rank_has_all(fork_ranks, form):
    run = run_with(FORMS[form])
    one, *_ = fork_ranks(workers, 1, run_with({"arch": run.model}))
    calls = fork_ranks(workers, 2, run)
    assert sorted(calls[0] + calls[1]) == sorted(one)
    assert abs(len(calls[0]) - len(calls[1])) <= len(one) // 3


def rounded(rank, world, run):
    """Weights after two steps whose matrix updates are bfloat16, as those of a Newton-Schulz iteration often are."""
    parts = build_parts(run, CPU, Path())
    for rule in parts.optimizer.matrices.rules.values():
        rule.of_matrix = lambda direction: direction.bfloat16()
    for step in (1, 2):
        train_step(parts, batch_of(run, parts.mesh, step), run.optim.lr)
    return keep((piece, piece.value) for piece in parts.model.shards)


@pytest.mark.parametrize("form", ["zero 1", "tp"])
def test_updates_of_another_dtype_arrive_as_they_are(fork_ranks, form):
    run = run_with(FORMS[form])
    one, two = join(fork_ranks(rounded, 1, run_with({"arch": run.model}))), join(fork_ranks(rounded, 2, run))
    assert all(np.allclose(two[name], one[name], rtol=0, atol=1e-2 * run.optim.lr) for name in one)


def vetoed(rank, world, run):
    """State after two steps; after a third whose gradient is not a number on the last rank; after a fourth."""
    parts, states = build_parts(run, CPU, Path()), []
    for step in (1, 2, 3, 4):
        batch = batch_of(run, parts.mesh, step)
        if step != 3:
            train_step(parts, batch, run.optim.lr)
        else:
            parts.program.train(batch)
            parts.model.reduce()
            for piece in parts.model.shards if rank == world - 1 else ():
                piece.grad.fill_(torch.nan)
            parts.optimizer.step(run.optim.lr, found_inf=torch.ones((), dtype=torch.bool))
            parts.model.publish()
            assert all(piece.grad is None for piece in parts.model.shards if piece.value.numel())
        if step > 1:
            counts = {name: int(state["step"]) for name, state in parts.optimizer.moments().items()}
            states.append((keep(blocks_of(parts)), counts))
    return states


@pytest.mark.parametrize("form", ["one process", "zero 1", "zero 3", "tp", "ep"])
def test_a_vetoed_step_leaves_values_and_state(fork_ranks, form):
    run = run_with(FORMS[form])
    before, after, last = zip(*fork_ranks(vetoed, run.parallel.world_size, run), strict=True)
    assert same_bits(whole(before), whole(after))
    assert [counts for _, counts in before] == [counts for _, counts in after]
    assert {count for _, counts in last for count in counts.values()} == {3}
    assert not same_bits(whole(after), whole(last))
    assert all(np.isfinite(values).all() for values in whole(last).values())


def first_step(rank, world, run):
    """The gradients of the first step before clipping, their norm, and the momentum after it."""
    parts, gradients = build_parts(run, CPU, Path()), []
    parts.callbacks.gradients = lambda step: gradients.extend(
        keep((piece, piece.grad) for piece in parts.model.shards if piece.grad is not None)
    )
    norm = float(train_step(parts, batch_of(run, parts.mesh, 1), run.optim.lr).grad_norm)
    moments = parts.optimizer.moments()
    return gradients, norm, {name: state["momentum"].numpy() for name, state in moments.items() if "momentum" in state}


def test_momentum_is_that_of_clipped_gradients(fork_ranks):
    run = run_with({})
    ((gradients, norm, momentum),) = fork_ranks(first_step, 1, run)
    assert norm > run.optim.clip_norm and len(momentum) > 10
    for name, _, _, gradient in gradients:
        if name in momentum:
            np.testing.assert_allclose(momentum[name], gradient * run.optim.clip_norm / norm, rtol=1e-5)


def updates(fork_ranks, run, start):
    """The change of the masters since the first weights."""
    ended = whole(fork_ranks(trained, run.parallel.world_size, run))
    return {name: ended[name].astype("f8") - values for name, values in start.items() if "of" not in name.split()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "precision"),
    [
        ("zero 3", "bf16"),
        pytest.param("tp", "fp32", marks=pytest.mark.nightly),
        pytest.param("zero 3", "fp32", marks=pytest.mark.nightly),
        pytest.param("tp", "bf16", marks=pytest.mark.nightly),
    ],
)
def test_in_the_precision_of_training_muon_is_as_near_to_one_process_as_adamw(fork_ranks, form, precision):
    found = {}
    for kind in ("adamw", "muon"):
        run = run_with(FORMS[form], optim=replace(MUON, kind=kind), precision=precision, global_batch=16, seq_len=32)
        one = run_with({}, optim=run.optim, precision=precision, global_batch=16, seq_len=32)
        start = whole(fork_ranks(trained, 1, one, ()))
        ours, theirs = updates(fork_ranks, run, start), updates(fork_ranks, one, start)
        hidden = [name for name in theirs if name.startswith("blocks.") and theirs[name].ndim == 2]
        found[kind] = np.mean([np.linalg.norm(ours[n] - theirs[n]) / np.linalg.norm(theirs[n]) for n in hidden])
    print(form, precision, found)
    assert 0 < found["muon"] <= max(3 * found["adamw"], 3e-6)  # 3e-6: some roundings of float32
