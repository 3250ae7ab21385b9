"""Hashes of the state in real steps of every form of parallelism: without a fault nothing differs, and with a flip of
any copy something does."""

from dataclasses import replace

import pytest
import torch

from ingot.schema.arch import Moe
from ingot.trainer.build import build_parts
from ingot.trainer.integrity import watch
from ingot.trainer.integrity.copies import copy_groups
from ingot.trainer.integrity.watch import StateHashes
from ingot.trainer.step import train_step

from .steps import ARCH, CPU, batch_of, run_of

EXPERTS = replace(ARCH, moe=Moe(num_experts=4, top_k=2, d_expert=8, bias_rate=0.25, global_loss=0.01))
NORM, MATRIX = "model.blocks.0.mlp_norm.weight", "model.blocks.0.attention.o.weight"
# Layout, precision, and for each axis with copies, how many of the two parameters have them.
CASES = {
    "copies and shards": (4, {"dp_replicate": 2, "dp_shard": 2, "zero": 3}, "bf16", {"dp_replicate": {NORM, MATRIX}}),
    "tensor and sequence": (2, {"tp": 2, "sequence": True}, "bf16", {"tp": {NORM}}),
    "rings": (2, {"cp": 2, "context": "ring", "zero": 1}, "fp32", {}),
    "canonical": (
        4,
        {"dp_replicate": 2, "cp": 2, "context": "ring", "reduce": "canonical", "virtual_ranks": 2, "zero": 1},
        "bf16",
        {"dp_replicate": {NORM, MATRIX}, "cp": {NORM, MATRIX}},
    ),
    "stages": (4, {"pp": 2, "dp_replicate": 2, "schedule": "1f1b"}, "fp16", {"dp_replicate": {NORM, MATRIX}}),
    "zero 2": (2, {"dp_shard": 2, "zero": 2}, "bf16", {}),
    "experts": (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero": 1}, "bf16", {"dp_replicate": {NORM, MATRIX}}),
}
# Hashed on each change by the slow tests alone: a second case of copies, of divided activations and of expert copies.
LONG = ("copies and shards", "rings", "experts")


FIRST_DENSE = replace(ARCH, moe=Moe(num_experts=4, top_k=2, d_expert=8, bias_rate=0.25, first_dense=2))
# What only some stages have, or shards have alike, is no copy of the state. Whether there are copies, and pairs.
AGREED = {
    "routers of one stage": (
        4,
        {"arch": FIRST_DENSE, "pp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 2},
        (False, False),
    ),
    "step counts": (2, {"dp_shard": 2, "zero": 3}, (False, False)),
    "published": (2, {"dp_shard": 2, "zero": 1}, (False, False)),
    "norms": (2, {"tp": 2}, (True, False)),
    "one rank knows of none": (2, {"dp_replicate": 2}, (True, True)),
}


def agreed(rank, ranks, run, is_blind):
    parts = build_parts(run, CPU, None)
    if is_blind and rank == 1:
        watch.copy_groups = lambda mesh, *_: copy_groups(mesh, *_) and []
    hashes = StateHashes(parts.state, parts.model.data.published(), parts.mesh, 20)
    return hashes.has_copies, hashes.has_pairs


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in ("published", "norms") else ()) for case in AGREED]
)
def test_all_ranks_agree_that_there_are_copies(fork_ranks, case):
    ranks, layout, found = AGREED[case]
    run = run_of(precision="fp32", **layout)
    assert fork_ranks(agreed, ranks, run, case.startswith("one rank")) == [found] * ranks


def hashed_steps(rank, ranks, run):
    """Train three steps with hashes in each. Returns what differed, and which tensors have copies along which axis."""
    parts = build_parts(run, CPU, None)
    hashes = parts.hashes = StateHashes(parts.state, parts.model.data.published(), parts.mesh, 1)
    for step in (1, 2, 3):
        train_step(parts, batch_of(run, parts.mesh, step), 1e-3)
    hashes.before_save(3)
    hashes.compare()
    differs = hashes.read()
    copied = {g.axis: {hashes._masters.names[i] for i in g.indexes} & {NORM, MATRIX} for g in hashes._masters.groups}
    forward = sum(len(group.indexes) for group in hashes._copies.groups)
    # A flip of the last rank in what the forward reads.
    if rank == ranks - 1 and hashes._copies.groups:
        tensor = hashes._copies.hasher.tensors[hashes._copies.groups[0].indexes[0]]
        tensor.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])[0] ^= 1
    hashes.after_update(3)
    hashes.before_update(4)
    hashes.compare()
    return differs, {axis: names for axis, names in copied.items() if names}, bool(forward), hashes.read()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in LONG else case for case in CASES]
)
def test_nothing_differs_without_a_fault_and_copies_are_known(fork_ranks, case):
    ranks, layout, precision, copies = CASES[case]
    arch = EXPERTS if case == "experts" else ARCH
    run = run_of(arch=arch, precision=precision, micro_batch=1 if "pp" not in layout else 2, **layout)
    found = fork_ranks(hashed_steps, ranks, run)
    assert not any(differs for differs, *_ in found)
    for _, own, *_ in found[:1]:
        assert {axis: names for axis, names in own.items() if axis in copies} == copies
        assert not set(own) - set(copies)
    reads_copies = layout.get("zero") != 3
    assert [forward for *_, forward, _ in found] == [reads_copies] * ranks
    assert any(flipped for *_, flipped in found) == reads_copies
