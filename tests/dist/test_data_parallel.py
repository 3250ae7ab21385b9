"""Properties of data parallelism that the proof in float64 does not show: repeatable bits, and low-precision sums."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, Optim, RunConfig, Train
from ingot.trainer.build import build_parts
from ingot.trainer.step import train_step

# Odd sizes on purpose: rows that 2 and 4 ranks do not divide.
ARCH = Arch(
    vocab_size=51, d_model=24, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=8, d_ffn=37, tied_embeddings=False
)
TOKENS, STEPS = 13, 3


class Catch:
    """A policy that lets every update pass and keeps the gradients it saw first."""

    def __init__(self):
        self.gradients: dict[str, np.ndarray] = {}
        self.shards = []

    def veto(self, loss, grad_norm):
        if not self.gradients:
            self.gradients = {p.name: p.grad.double().numpy().copy() for p in self.shards}

    def verdict(self, facts): ...

    def measures(self):
        return ()


def trained(rank, ranks, precision, sequences, micro_batch, forms, repeated=False, steps=STEPS):
    """(losses, norms, first gradients and last values of this rank's pieces, in the dtype they are kept in)."""
    policy = Catch()
    train = Train(steps=STEPS, seq_len=TOKENS, global_batch=sequences, micro_batch=micro_batch, precision=precision)
    run = RunConfig(
        name="x",
        seed=3,
        model=ARCH,
        data=Data(tokens=""),
        train=train,
        optim=Optim(lr=1e-2, clip_norm=0.5),
        parallel=Parallel(**forms),
    )
    parts = build_parts(run, torch.device("cpu"), Path(), policy)
    policy.shards, facts = parts.model.shards, []
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, ARCH.vocab_size, (1 if repeated else sequences, TOKENS + 1), generator=generator)
        mine = ids.expand(sequences, -1).chunk(parts.mesh.data_ranks)[parts.mesh.data_rank]
        mine = mine.reshape(run.accumulation, micro_batch, TOKENS + 1)
        batch = SimpleNamespace(step=step, inputs=mine[..., :-1], targets=mine[..., 1:], document_ids=None)
        facts.append(train_step(parts, batch, run.optim.lr))
    losses, norms = [f.loss.item() for f in facts], [f.grad_norm.item() for f in facts]
    return losses, norms, policy.gradients, {p.name: p.value.numpy().copy() for p in parts.model.shards}


def worst(ours, theirs):
    """Largest difference relative to the largest value, over all tensors with elements."""
    assert ours.keys() == theirs.keys()
    return max(np.abs(ours[n] - theirs[n]).max() / np.abs(theirs[n]).max() for n in theirs if theirs[n].size)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_same_layout_gives_the_same_bits(fork_ranks, precision, zero):
    first, second = (fork_ranks(trained, 2, precision, 8, 2, {"dp_shard": 2, "zero": zero}) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a[0] == b[0] and a[1] == b[1]
        assert all(np.array_equal(a[3][n], b[3][n]) for n in a[3])
        assert all(p.dtype == np.float32 for p in a[3].values())  # float32 masters in both precisions


def test_ranks_without_rows_train_along(fork_ranks):
    """Five ranks share norm weights of 24 and 8 elements, and embeddings of 51 rows: the last one has few."""
    forms = {"dp_shard": 5, "zero": 1}
    (alone, *_) = fork_ranks(trained, 1, "fp64", 10, 2, {})
    for losses, norms, _, values in fork_ranks(trained, 5, "fp64", 10, 2, forms):
        assert norms == pytest.approx(alone[1], rel=1e-12)
        assert all(np.isfinite(v).all() for v in values.values()) and len(losses) == STEPS


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_stays_near_float64(fork_ranks, precision):
    (exact,) = fork_ranks(trained, 1, "fp64", 8, 8, {})
    (near,) = fork_ranks(trained, 1, precision, 8, 8, {})
    assert near[0][0] == pytest.approx(exact[0][0], rel=0.01)
    assert near[1] == pytest.approx(exact[1], rel=0.03)
    scale = 2.0**16 if precision == "fp16" else 1.0  # what the gradients carry until the update
    assert worst({n: g / scale for n, g in near[2].items()}, exact[2]) < 0.05


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_of_bf16_accumulate_in_float32(fork_ranks, zero):
    # The same sample 64 times. Dividing by 64 and adding up 64 equal bf16 numbers is exact in float32; a bf16 sum
    # would stop growing long before.
    forms = {"dp_shard": 2, "zero": zero}
    once, often = (fork_ranks(trained, 2, "bf16", 2 * n, 1, forms, True, 1)[0] for n in (1, 64))
    assert worst(often[2], once[2]) < 1e-6
    if zero < 3:  # FSDP2 keeps shards in the master's dtype
        coarse = fork_ranks(trained, 2, "bf16", 128, 1, forms | {"grads": "bf16"}, True, 1)[0]
        assert worst(coarse[2], once[2]) > 1e-3
