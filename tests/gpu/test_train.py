"""The trainer's step on a GPU: compiled, in bf16, without a wait for the device, and near the CPU's results."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.trainer.build import build_parts
from ingot.trainer.loader.loader import Batch
from ingot.trainer.mesh.start import start, stop
from ingot.trainer.model.generate import cached, generate
from ingot.trainer.step import train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ARCH = Arch(
    vocab_size=512, d_model=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, d_ffn=512, max_seq_len=256
)


@pytest.fixture(scope="module")
def place():
    yield start("cuda", 120)
    stop()


def build(place, precision, device, **forms):
    run = RunConfig(
        name="gpu",
        model=ARCH,
        data=Data(tokens=""),
        train=Train(steps=1, seq_len=128, global_batch=4, micro_batch=2, precision=precision),
        parallel=Parallel(**forms),
    )
    return build_parts(run, device, Path())


def batch(device, documents=False):
    ids = torch.randint(0, 512, (2, 2, 129), generator=torch.Generator().manual_seed(0)).to(device)
    numbers = torch.zeros(2, 2, 128, dtype=torch.int32) if documents else None
    return Batch(1, np.zeros(4, np.int64), ids[..., :-1], ids[..., 1:], numbers, 0.0)


def losses(parts, data, steps=3):
    facts = [train_step(parts, data, parts.config.optim.lr) for _ in range(steps)]
    return [f.loss.item() for f in facts], [f.grad_norm.item() for f in facts]


def test_bf16_on_the_gpu_follows_float32_on_the_cpu(place):
    gpu = losses(build(place, "bf16", place.device), batch(place.device))
    cpu = losses(build(place, "fp32", torch.device("cpu")), batch("cpu"))
    assert gpu[0] == pytest.approx(cpu[0], rel=0.01)
    assert gpu[1] == pytest.approx(cpu[1], rel=0.05)


@pytest.mark.parametrize("forms", [{"zero": 3}, {"recompute": "full"}, {"recompute": "selective"}, {"offload": "cpu"}])
def test_every_form_of_one_rank_follows_the_plain_one(place, forms):
    plain = losses(build(place, "bf16", place.device), batch(place.device))
    other = losses(build(place, "bf16", place.device, **forms), batch(place.device))
    assert other[0] == pytest.approx(plain[0], rel=1e-3)


def test_fp16_scales_its_loss(place):
    half = losses(build(place, "fp16", place.device), batch(place.device))
    cpu = losses(build(place, "fp32", torch.device("cpu")), batch("cpu"))
    assert half[0] == pytest.approx(cpu[0], rel=0.01)


def test_one_document_per_row_masks_nothing(place):
    plain = losses(build(place, "fp32", place.device), batch(place.device))
    masked = losses(build(place, "fp32", place.device), batch(place.device, documents=True))
    assert masked[0] == pytest.approx(plain[0], rel=1e-3)


def test_a_step_never_waits_for_the_device(place):
    parts = build(place, "bf16", place.device)
    data = batch(place.device)
    losses(parts, data, steps=2)  # compilation and lazy state may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(parts, data, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_generation_runs_on_the_gpu(place):
    model = build(place, "bf16", place.device).model.stages[0]
    made = generate(cached(model, ARCH, 11), ARCH, [1, 2, 3], max_tokens=8, temperature=1.0, top_k=20, seed=1)
    assert len(made) == 8 and made == generate(model, ARCH, [1, 2, 3], max_tokens=8, temperature=1.0, top_k=20, seed=1)
