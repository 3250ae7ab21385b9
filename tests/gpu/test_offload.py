"""Offload from a real device: copies on a side stream, pinned staging, and the same bits as an update on the host."""

from dataclasses import dataclass

import pytest
import torch

from ingot.schema.run import Optim
from ingot.trainer.optim.adamw import adamw_rules
from ingot.trainer.optim.gradients import clip_factor, gradient_norm
from ingot.trainer.optim.offload import OffloadedOptimizer
from ingot.trainer.optim.optimizer import Optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

OPTIM = Optim(weight_decay=0.1)
BUFFER_BYTES = 2**20  # ranges of 32768 elements: 32 in a shard


@dataclass
class Block:
    name: str
    value: torch.Tensor
    grad: torch.Tensor | None = None
    owner: bool = True
    decays: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_disk", [False, True])
def test_the_same_bits_as_on_the_host(tmp_path, kept, on_disk):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1024, 1025, generator=generator)
    there, here = Block("w", start.cuda()), Block("w", start.clone())
    folder = tmp_path if on_disk else None
    optimizer = OffloadedOptimizer([there], adamw_rules(OPTIM), folder=folder, buffer_bytes=BUFFER_BYTES)
    reference = Optimizer([here], adamw_rules(OPTIM))
    for step in range(1, 6):
        gradient = torch.randn(start.shape, generator=generator).to(kept)
        there.grad, here.grad = gradient.cuda(), gradient.clone()
        factor = clip_factor(gradient_norm([there]), 1.0)
        assert factor is not None
        optimizer.step(0.01 * step, scale=factor, found_inf=torch.zeros((), device="cuda"))
        reference.step(0.01 * step, scale=factor.cpu())
    assert torch.equal(there.value.cpu(), here.value)
    optimizer.close()


def test_device_memory_beyond_the_pieces_is_one_cut():
    block = Block(
        "w", torch.ones(16 * 2**20, device="cuda"), torch.ones(16 * 2**20, device="cuda", dtype=torch.bfloat16)
    )
    optimizer = OffloadedOptimizer([block], adamw_rules(OPTIM), buffer_bytes=BUFFER_BYTES)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step(0.01)
    assert torch.cuda.max_memory_allocated() - before <= 4 * optimizer.range_elements * 4
