"""Sharded training against one plain process, in float64: what one process computes is what every layout computes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from ingot.dist.mesh import build_mesh
from ingot.model.init import initial_value, initialize
from ingot.model.transformer import Transformer
from ingot.optim.adamw import build_adamw
from ingot.parallel import data
from ingot.parallel.apply import parallelize
from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Optim, Train
from ingot.train.step import train_step

# Odd sizes on purpose: dims that 2 and 4 ranks do not divide.
ARCH = Arch(
    vocab_size=51, d_model=24, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=8, d_ffn=37, tied_embeddings=False
)
OPTIM = Optim(lr=1e-2, weight_decay=0.1, clip_norm=0.5)
GLOBAL_BATCH, TOKENS, STEPS = 8, 13, 3


def batches(step, rank, ranks, accumulation):
    """This rank's part of the batch of `step`, cut into micro-batches, as the loader gives it."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ARCH.vocab_size, (GLOBAL_BATCH, TOKENS + 1), generator=generator)
    mine = ids.chunk(ranks)[rank].unflatten(0, (accumulation, -1))
    return SimpleNamespace(step=step, inputs=mine[..., :-1], targets=mine[..., 1:], document_ids=None)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


def run_steps(model, optimizer, rank, ranks, accumulation):
    """(losses of this rank, norms, first step's clipped gradients, parameters after STEPS steps)."""
    losses, norms, gradients = [], [], {}

    def keep_first_gradients(*_):
        if not gradients:
            gradients.update({n: whole(p.grad) for n, p in model.named_parameters()})

    hook = optimizer.register_step_pre_hook(keep_first_gradients)
    for step in range(1, STEPS + 1):
        batch = batches(step, rank, ranks, accumulation)
        facts = train_step(model, optimizer, batch, OPTIM.lr, OPTIM.clip_norm)
        losses.append(facts.loss.item())
        norms.append(facts.grad_norm.item())
    hook.remove()
    return losses, norms, gradients, {n: whole(p) for n, p in model.named_parameters()}


def one_process():
    """No process group, no FSDP, no accumulation."""
    model = Transformer(ARCH).double()
    initialize(model, ARCH, 3)
    return run_steps(model, build_adamw(model, OPTIM), 0, 1, 1)


def sharded(rank, ranks, accumulation, units, precision="fp64"):
    data.ONE_UNIT_PARAMETERS = {"one": 10**9, "blocks": 0}[units]
    train = Train(
        steps=STEPS,
        seq_len=TOKENS,
        global_batch=GLOBAL_BATCH,
        micro_batch=GLOBAL_BATCH // ranks // accumulation,
        precision=precision,
    )
    with torch.device("meta"):
        model = Transformer(ARCH)
    mesh = build_mesh(Parallel(dp_shard=ranks), "cpu")
    parallelize(model, mesh, train, torch.device("cpu"), lambda name, shape: initial_value(name, shape, ARCH, 3))
    assert data.is_one_unit(model) == (units == "one")
    return run_steps(model, build_adamw(model, OPTIM), rank, ranks, accumulation)


def worst(ours, theirs):
    """Largest difference relative to the largest value, over all tensors."""
    assert ours.keys() == theirs.keys()
    return max(np.abs(ours[n] - theirs[n]).max() / np.abs(theirs[n]).max() for n in theirs)


@pytest.mark.parametrize("units", ["one", "blocks"])
@pytest.mark.parametrize("ranks, accumulation", [(1, 1), (2, 1), (4, 1), (1, 4), (2, 4), (4, 2)])
def test_every_layout_equals_one_process(fork_ranks, ranks, accumulation, units):
    expected_losses, expected_norms, expected_gradients, expected_parameters = one_process()
    assert min(expected_norms) > OPTIM.clip_norm  # clipping acts in every step
    results = fork_ranks(sharded, ranks, accumulation, units)
    losses = [sum(column) / ranks for column in zip(*(r[0] for r in results), strict=True)]
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    for _, norms, gradients, parameters in results:
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        assert worst(gradients, expected_gradients) < 1e-12
        assert worst(parameters, expected_parameters) < 1e-10


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("units", ["one", "blocks"])
def test_the_same_layout_gives_the_same_bits(fork_ranks, precision, units):
    first, second = (fork_ranks(sharded, 2, 2, units, precision) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a[0] == b[0] and a[1] == b[1]
        assert all(np.array_equal(a[3][n], b[3][n]) for n in a[3])
        assert all(p.dtype == np.float32 for p in a[3].values())  # float32 masters in both precisions


def test_bf16_stays_near_float64(fork_ranks):
    expected = one_process()
    for losses, norms, gradients, _ in fork_ranks(sharded, 2, 2, "one", "bf16"):
        assert norms == pytest.approx(expected[1], rel=0.03)
        assert losses[0] == pytest.approx(expected[0][0], rel=0.01)
        # float32 accumulation of bf16 gradients: far from float64, but no element is off by more than bf16's rounding.
        assert worst(gradients, expected[2]) < 0.05


@pytest.mark.parametrize("units", ["one", "blocks"])
def test_accumulation_of_bf16_gradients_is_float32(fork_ranks, units):
    # The same sample 64 times. Dividing by 64 and adding up 64 equal bf16 numbers is exact in float32; a bf16 sum
    # would stop growing long before.
    def gradients(rank, ranks, repeats):
        data.ONE_UNIT_PARAMETERS = {"one": 10**9, "blocks": 0}[units]
        train = Train(steps=1, seq_len=TOKENS, global_batch=repeats * ranks, micro_batch=1, precision="bf16")
        with torch.device("meta"):
            model = Transformer(ARCH)
        mesh = build_mesh(Parallel(dp_shard=ranks), "cpu")
        parallelize(model, mesh, train, torch.device("cpu"), lambda name, shape: initial_value(name, shape, ARCH, 3))
        ids = batches(1, 0, GLOBAL_BATCH, 1)
        batch = SimpleNamespace(
            step=1,
            inputs=ids.inputs.expand(repeats, 1, TOKENS),
            targets=ids.targets.expand(repeats, 1, TOKENS),
            document_ids=None,
        )
        return run_one(model, build_adamw(model, OPTIM), batch)

    (once, *_), (often, *_) = (fork_ranks(gradients, 2, repeats) for repeats in (1, 64))
    assert worst(often, once) < 1e-6


def run_one(model, optimizer, batch):
    """The gradients of one step, not clipped."""
    found = {}

    def keep(*_):
        found.update({n: whole(p.grad) for n, p in model.named_parameters()})

    optimizer.register_step_pre_hook(keep)
    train_step(model, optimizer, batch, OPTIM.lr, 0.0)
    return found


def first_weights(rank, ranks, units):
    data.ONE_UNIT_PARAMETERS = {"one": 10**9, "blocks": 0}[units]
    with torch.device("meta"):
        model = Transformer(ARCH)
    torch.manual_seed(100 + rank)  # the global stream must play no part
    train = Train(steps=1, seq_len=8, global_batch=4, micro_batch=1, precision="fp32")
    mesh = build_mesh(Parallel(dp_shard=ranks), "cpu")
    parallelize(model, mesh, train, torch.device("cpu"), lambda name, shape: initial_value(name, shape, ARCH, 3))
    return {n: whole(p) for n, p in model.named_parameters()}


@pytest.mark.parametrize("units", ["one", "blocks"])
def test_first_weights_are_the_same_bits_on_every_layout(fork_ranks, units):
    plain = Transformer(ARCH)
    initialize(plain, ARCH, 3)
    for ranks in (1, 2, 4):
        for weights in fork_ranks(first_weights, ranks, units):
            assert all(np.array_equal(weights[n], whole(p)) for n, p in plain.named_parameters())
