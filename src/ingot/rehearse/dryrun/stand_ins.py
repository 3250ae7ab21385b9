"""Replacements for parts of the training program that fail with fake tensors, or take another path with them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from ingot.rehearse.dryrun.expert_load import AssumedLoad
from ingot.schema.run import RunConfig
from ingot.theory import memory
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.model import experts
from ingot.trainer.optim import offload
from ingot.trainer.torch_private import FakeTensor, attention_kernels


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def dealt_to_experts(config: RunConfig, mesh: Mesh, loads: Sequence[float]) -> Iterator[None]:
    """Give experts, inside the context, the numbers of rows that follow from `loads`, not those that the router
    chooses. loads: the load of each expert; empty: all equal.
    """
    moe = config.model.moe
    if not config.model.is_moe:
        yield
        return
    ranks = mesh.size("ep")
    load = AssumedLoad.of(moe, loads, mesh.index("ep"), ranks)

    def numbers(counts: Tensor, rows: int, kind: str) -> list[int]:
        if kind == "own":
            return load.own_parts(rows)
        kept = load.kept(rows)
        sent = iter(load.sent(kept))
        return [*(sum(islice(sent, load.own)) for _ in range(ranks)), *load.coming(kept, ranks)]

    with replaced(experts, "on_host", numbers):
        yield


# Fake tensors report a CPU as their device. There, the program takes other paths than on CUDA and PyTorch decomposes
# norms. These functions return and save the same tensors as the kernels that PyTorch selects on CUDA.


@contextmanager
def as_on_cuda() -> Iterator[None]:
    with ExitStack() as others:
        for owner, name, value in (
            (functional, "rms_norm", _rms_norm),
            (functional, "scaled_dot_product_attention", _attention),
            (memory, "LOGITS_CHUNK_BYTES", {"cpu": memory.LOGITS_CHUNK_BYTES["cuda"]}),
            (offload.OffloadedOptimizer, "_side_stream", lambda optimizer: None),
            (FakeTensor, "is_cuda", property(lambda tensor: True)),
        ):
            others.enter_context(replaced(owner, name, value))
        yield


class _FusedNorm(torch.autograd.Function):
    """A fused RMSNorm, which saves its input and 1/rms. Zeros are an operation that a trace counts, like the kernel."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, *grads):
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


def _rms_norm(x: Tensor, shape, weight: Tensor, eps: float) -> Tensor:
    return _FusedNorm.apply(x, weight)


def _attention(q: Tensor, k: Tensor, v: Tensor, is_causal=False, enable_gqa=False) -> Tensor:
    """Call the kernel that PyTorch selects on CUDA: flash attention, or in float32 the memory-efficient kernel."""
    if q.dtype in (torch.bfloat16, torch.float16):
        return attention_kernels().flash(q, k, v, 0.0, is_causal)[0]
    return attention_kernels().efficient(q, k, v, None, True, 0.0, is_causal)[0]
