"""The trainer's step on a GPU: compiled, in bf16, without a wait for the device, and near the CPU's results."""

import numpy as np
import pytest
import torch

from ingot.dist.mesh import build_mesh
from ingot.dist.start import start, stop
from ingot.loader.loader import Batch
from ingot.model.generate import generate
from ingot.optim.adamw import build_adamw
from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.train.build import build_model
from ingot.train.step import train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ARCH = Arch(
    vocab_size=512, d_model=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, d_ffn=512, max_seq_len=256
)


@pytest.fixture(scope="module")
def place():
    yield start("cuda", 120)
    stop()


def build(place, precision, device):
    run = RunConfig(
        name="gpu",
        model=ARCH,
        data=Data(tokens=""),
        train=Train(steps=1, seq_len=128, global_batch=4, micro_batch=2, precision=precision),
        parallel=Parallel(dp_shard=1),
    )
    model = build_model(run, build_mesh(run.parallel, device.type), device)
    return run, model, build_adamw(model, run.optim)


def batch(device, documents=False):
    ids = torch.randint(0, 512, (2, 2, 129), generator=torch.Generator().manual_seed(0)).to(device)
    numbers = torch.zeros(2, 2, 128, dtype=torch.int32, device=device) if documents else None
    return Batch(1, np.zeros(4, np.int64), ids[..., :-1], ids[..., 1:], numbers, 0.0)


def losses(run, model, optimizer, data, steps=3):
    facts = [train_step(model, optimizer, data, run.optim.lr, run.optim.clip_norm) for _ in range(steps)]
    return [f.loss.item() for f in facts], [f.grad_norm.item() for f in facts]


def test_bf16_on_the_gpu_follows_float32_on_the_cpu(place):
    gpu = losses(*build(place, "bf16", place.device), batch(place.device))
    cpu = losses(*build(place, "fp32", torch.device("cpu")), batch("cpu"))
    assert gpu[0] == pytest.approx(cpu[0], rel=0.01)
    assert gpu[1] == pytest.approx(cpu[1], rel=0.05)


def test_one_document_per_row_masks_nothing(place):
    plain = losses(*build(place, "fp32", place.device), batch(place.device))
    masked = losses(*build(place, "fp32", place.device), batch(place.device, documents=True))
    assert masked[0] == pytest.approx(plain[0], rel=1e-3)


def test_a_step_never_waits_for_the_device(place):
    run, model, optimizer = build(place, "bf16", place.device)
    data = batch(place.device)
    losses(run, model, optimizer, data, steps=2)  # compilation and lazy state may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(model, optimizer, data, 1e-3, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_generation_runs_on_the_gpu(place):
    _, model, _ = build(place, "bf16", place.device)
    made = generate(model, ARCH, [1, 2, 3], max_tokens=8, temperature=1.0, top_k=20, seed=1)
    assert len(made) == 8 and made == generate(model, ARCH, [1, 2, 3], max_tokens=8, temperature=1.0, top_k=20, seed=1)
