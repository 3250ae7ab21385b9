"""Gradients that two ranks compute, in real steps of every form of parallelism: without a fault nothing differs and no
bit of the run changes, and a flip in the gradient of any rank is found."""

from dataclasses import replace

import pytest
import torch

from ingot.schema.arch import Moe
from ingot.trainer.build import build_parts
from ingot.trainer.integrity.recompute import RecomputedGradients
from ingot.trainer.integrity.watch import StateHashes
from ingot.trainer.step import train_step

from .steps import ARCH, CPU, batch_of, join, keep, run_of, same_bits, state_of

EXPERTS = replace(ARCH, moe=Moe(num_experts=4, top_k=2, d_expert=8, bias_rate=0.25, global_loss=0.01, noise=0.5))
MATRIX = "blocks.1.mlp.up.weight"
# Ranks, layout and precision.
CASES = {
    "copies": (2, {"dp_replicate": 2}, "fp64"),
    "zero 1": (2, {"dp_shard": 2, "zero": 1}, "fp64"),
    "zero 2": (2, {"dp_shard": 2, "zero": 2}, "bf16"),
    "zero 3": (2, {"dp_shard": 2, "zero": 3}, "fp64"),
    "copies and shards": (4, {"dp_replicate": 2, "dp_shard": 2, "zero": 3}, "bf16"),
    "copies of whole shards": (2, {"dp_replicate": 2, "zero": 3}, "fp64"),
    "tensor and sequence": (4, {"dp_replicate": 2, "tp": 2, "sequence": True}, "bf16"),
    "rings": (4, {"dp_shard": 2, "cp": 2, "context": "ring", "zero": 1}, "fp64"),
    "canonical": (2, {"dp_replicate": 2, "reduce": "canonical", "virtual_ranks": 4}, "bf16"),
    "stages": (4, {"pp": 2, "dp_replicate": 2, "schedule": "1f1b"}, "fp16"),
    "split backward": (4, {"pp": 2, "dp_shard": 2, "schedule": "zb_h1", "zero": 2}, "fp64"),
    "experts": (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero": 1}, "fp64"),
    "sharded experts": (4, {"dp_shard": 4, "ep": 2, "zero": 3}, "bf16"),
}
# Four ranks each; two ranks have a part of each form, but for experts.
LONG = ("copies and shards", "tensor and sequence", "rings", "stages", "experts", "sharded experts")


def part_of(run, mesh, step, part):
    """The part of the batch of another data rank."""
    own = type("Part", (), {"data_rank": part, "data_ranks": mesh.data_ranks})
    return batch_of(run, own, step)


def steps(rank, ranks, run, every):
    """Train three steps. Returns the state, what differed without a fault, and what differs after a flip on each rank
    in turn: the findings of this rank."""
    parts = build_parts(run, CPU, None)
    if every:
        parts.gradients = RecomputedGradients(
            parts.program,
            parts.model.data,
            parts.mesh,
            every=every,
            seed=1,
            read=lambda step, part: part_of(run, parts.mesh, step, part),
            device=CPU,
        )
        parts.hashes = StateHashes(
            parts.state, parts.model.data.published(), parts.mesh, 100, gradients=parts.gradients
        )
    results = [train_step(parts, batch_of(run, parts.mesh, step), 1e-3) for step in (1, 2, 3)]
    balance = () if parts.balance is None else keep((b, b.value) for b in parts.balance.shards)
    counts = [result.experts.tolist() for result in results if result.experts is not None]
    state = keep(state_of(parts)), balance, counts
    if not every:
        return state, False, []
    parts.hashes.compare()
    differs, found = parts.hashes.read(), []
    for step, victim in ((4, 0), (5, ranks - 1)):
        take = parts.gradients.take

        def flipped(number, gradients, take=take, rank=rank, victim=victim, done=[]):  # noqa: B006
            if rank == victim and not parts.gradients.apart and not done:
                words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[gradients.itemsize]
                gradients.view(-1).view(words)[1] ^= 1 << 3
                done.append(number)
            take(number, gradients)

        parts.gradients.take = flipped
        train_step(parts, batch_of(run, parts.mesh, step), 1e-3)
        parts.gradients.take = take
        parts.hashes.compare()
        parts.hashes.read()
        own = parts.hashes.suspicion()
        found.append((own.step, own.trust.name, own.tensor, own.bit))
    return state, differs, found


def whole(found):
    return join([*state, *balance] for (state, balance, _), *_ in found)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in LONG else case for case in CASES]
)
def test_nothing_differs_without_a_fault_no_bit_changes_and_flips_are_found(fork_ranks, case):
    ranks, layout, precision = CASES[case]
    run = run_of(
        arch=EXPERTS if "experts" in case else ARCH,
        precision=precision,
        **layout,
    )
    plain, found = fork_ranks(steps, ranks, run, 0), fork_ranks(steps, ranks, run, 1)
    assert same_bits(whole(plain), whole(found))
    assert [counts for (*_, counts), *_ in plain] == [counts for (*_, counts), *_ in found]
    assert not any(differs for _, differs, _ in found)
    for number, (step, victim) in enumerate(((4, 0), (5, ranks - 1))):
        suspects = {rank for rank, (*_, own) in enumerate(found) if own[number][1] != "NOTHING"}
        assert victim in suspects and len(suspects) == 2
        for rank in suspects:
            at, trust, tensor, bit = found[rank][2][number]
            assert (at, trust, bit) == (step, "RECOMPUTED", 3) and tensor.startswith("gradient of model.")
