"""Tensor parallelism in chunks: equal to the plain form and to one process, with collectives beside the products.

The order is read from the operators that run, in the forward and the backward of the code that trains.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ingot.schema.arch import Moe
from ingot.trainer.model.layers import SwiGLU
from ingot.trainer.parallel.tensor import Region
from ingot.trainer.parallel.tensor_overlap import OverlappedRegion
from ingot.trainer.torch_private import TraceMode, operator_packet, storage_key

from .steps import ARCH, LATENT, join, keep, mean_losses, run_of, state_of, train

SHARED = replace(ARCH, moe=Moe(num_experts=4, top_k=2, d_expert=6, shared_experts=2, first_dense=1))
STEPS, BATCH = (1, 2), 4
FORMS = {
    "tp": {"tp": 2},
    "uneven chunks": {"tp": 2, "tp_chunks": 3, "micro_batch": 2},
    "more heads than key heads": {"tp": 4},
    "full recompute": {"tp": 2, "recompute": "full"},
    "selective recompute": {"tp": 2, "recompute": "selective"},
    "zero 3": {"tp": 2, "dp_shard": 2, "zero": 3},
    "split backward": {"tp": 2, "pp": 2, "schedule": "zb_h1"},
    "split backward, recomputed": {"tp": 2, "pp": 2, "schedule": "zb_v", "recompute": "full"},
    "latent attention": {"tp": 2, "arch": LATENT},
    "shared experts": {"tp": 2, "ep": 2, "arch": SHARED},
}
FEW = ("uneven chunks", "selective recompute", "latent attention")


def trained(rank, world, run):
    found = train(run, STEPS)
    return found.losses, found.norms, keep(state_of(found.parts))


# Once, on a busy machine, the form that recomputes a split backward failed beside other tests, as did "tp in chunks" of
# test_precision.py; why is not known, and neither failed again in 27 repetitions.
@pytest.mark.parametrize(
    "form",
    [
        f if f in FEW else pytest.param(f, marks=pytest.mark.nightly if "recomputed" in f else pytest.mark.slow)
        for f in FORMS
    ],
)
def test_equals_one_process(fork_ranks, form):
    run = run_of(**{"tp_chunks": 2, "global_batch": BATCH} | FORMS[form])
    alone = run_of(arch=run.model, global_batch=BATCH, micro_batch=run.train.micro_batch)
    losses, norms, state = fork_ranks(trained, 1, alone)[0]
    ranks = fork_ranks(trained, run.parallel.world_size, run, timeout=300)
    expected, found = join([state]), join(state for _, _, state in ranks)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.abs(found[name] - values).max() <= 1e-10 * np.abs(values).max(), name
    np.testing.assert_allclose(mean_losses(losses for losses, *_ in ranks), losses, rtol=1e-12)
    for _, own, _ in ranks:
        np.testing.assert_allclose(own, norms, rtol=1e-12)


SEQUENCES, TOKENS, WIDTH, HIDDEN = 2, 7, 16, 24  # the tokens are those of a rank


class Order(TraceMode):
    """The starts and ends of collectives, and the products, in the order in which a rank issues them."""

    _KINDS: ClassVar = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter"}

    def __init__(self):
        super().__init__()
        self.issued: list[str] = []
        self.on_their_way: dict[int, str] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found, name = func(*args, **(kwargs or {})), operator_packet(func).__name__
        if name in self._KINDS:
            label = f"{self._KINDS[name]} {sum(text.startswith(self._KINDS[name]) for text in self.issued)}"
            self.on_their_way[storage_key(found.untyped_storage())] = label
            self.issued.append(label)
        elif name == "wait_tensor":
            self.issued.append(f"wait {self.on_their_way[storage_key(args[0].untyped_storage())]}")
        elif name in ("mm", "addmm"):
            self.issued.append("product")
        return found


def feed_forward(group, chunks, dtype):
    """A feed-forward of which this rank has some columns and rows. chunks: 0: the plain form."""
    torch.manual_seed(1 + dist.get_rank())
    mlp = SwiGLU(WIDTH, HIDDEN).to(dtype)
    if chunks:
        region = OverlappedRegion(group, chunks, None)
        region.enter(mlp, [mlp.gate, mlp.up])
        region.leave(mlp.down)
    else:
        plain = Region(group, sequence=True)
        mlp.register_forward_pre_hook(lambda _, args: (plain.enter(args[0]),))
        mlp.down.register_forward_hook(lambda _, args, output: plain.leave(output))
    x = torch.randn(SEQUENCES, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weights = torch.randn(SEQUENCES, TOKENS, WIDTH, dtype=dtype)
    return mlp, x, weights


def both_forms(rank, world):
    """Return the order of a pass in three chunks; and for each dtype and number of chunks the largest difference to the
    plain form, relative to the largest value, of the result and every gradient."""
    group, differences = dist.group.WORLD, {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = {}
        for chunks in (0, 1, 3, 20):
            mlp, x, weights = feed_forward(group, chunks, dtype)
            y = mlp(x)
            (y * weights).sum().backward()
            found[chunks] = [y.detach(), x.grad, *(parameter.grad for parameter in mlp.parameters())]
        plain = found.pop(0)
        for chunks, own in found.items():
            pairs = zip(own, plain, strict=True)
            differences[dtype, chunks] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    mlp, x, weights = feed_forward(group, 3, torch.float64)
    with Order() as order:
        loss = (mlp(x) * weights).sum()
        order.issued.append("backward")
        loss.backward()
    return order.issued, differences


def test_collectives_move_a_chunk_while_another_is_multiplied(fork_ranks):
    two = ["product"] * 2
    forward = ["gather 0", "gather 1", "wait gather 0", *two, "gather 2", "wait gather 1", *two, "wait gather 2", *two]
    forward += [text for i in range(3) for text in ("product", f"scatter {i}")]
    forward += [f"wait scatter {i}" for i in range(3)]
    backward = ["gather 3", "gather 4", "wait gather 3", "product", "gather 5", "wait gather 4", "product"]
    backward += ["wait gather 5", "product", "product"]  # the input gradient of the last chunk, the weight gradient
    backward += [text for i in (3, 4, 5) for text in (*two, f"scatter {i}")]
    backward += [*two, *(f"wait scatter {i}" for i in (3, 4, 5))]  # weight gradients while chunks are on their way
    for issued, differences in fork_ranks(both_forms, 2):
        assert issued == [*forward, "backward", *backward]
        for (dtype, chunks), difference in differences.items():
            # The plain form rounds the input gradient of each matrix before their sum.
            assert difference <= 8 * torch.finfo(dtype).eps, (dtype, chunks)


def compiled_form(rank, world):
    """Return results and gradients of the plain form, and of chunks in one compiled graph."""
    found = []
    for chunks in (0, 3):
        mlp, x, weights = feed_forward(dist.group.WORLD, chunks, torch.float64)

        def block(x, mlp=mlp):
            return mlp(x)

        y = (torch.compile(block, backend="aot_eager", fullgraph=True) if chunks else block)(x)
        (y * weights).sum().backward()
        found.append([part.detach().numpy() for part in (y, x.grad, *(p.grad for p in mlp.parameters()))])
    return found


@pytest.mark.slow
def test_a_compiler_sees_the_chunks_as_one_graph(fork_ranks):
    for plain, compiled in fork_ranks(compiled_form, 2, timeout=300):
        for ours, theirs in zip(compiled, plain, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
