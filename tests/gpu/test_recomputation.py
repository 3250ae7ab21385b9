"""Gradients computed twice on a GPU: the same bits, no bit of the run changed, and any flipped bit of them found.

One device has one data rank: it computes its own part twice in a step, as the first chosen step of a run does.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.steps import batch_of, state_of
from tests.expect import refused

from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.trainer.build import build_parts
from ingot.trainer.integrity.hashing import BitFlip, BufferHasher, locate
from ingot.trainer.integrity.recompute import RecomputedGradients
from ingot.trainer.integrity.verdict import NOTHING
from ingot.trainer.integrity.watch import StateHashes
from ingot.trainer.mesh.start import start, stop
from ingot.trainer.step import train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE: Any = "cuda"
ARCH = Arch(
    vocab_size=512, d_model=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, d_ffn=512, max_seq_len=256
)
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(scope="module")
def place():
    """A job of one rank, with the kernels that a run with guard.recompute_every has."""
    before = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield start(DEVICE, 120)
    stop()
    torch.use_deterministic_algorithms(False)
    if before == ":4096:8":
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]


@dataclass
class Trained:
    """The parts of a run, and how often it has computed a step twice."""

    parts: Any
    run: RunConfig
    device: torch.device

    def step(self, number: int) -> None:
        if self.parts.gradients is not None:
            self.parts.gradients._is_proven = False  # in each step, not in the first alone
        train_step(self.parts, on_device(self.run, self.parts.mesh, number, self.device), 1e-3)


def on_device(run, mesh, step, device):
    batch = batch_of(run, mesh, step)
    batch.inputs, batch.targets = batch.inputs.to(device), batch.targets.to(device)
    return batch


def build(place, precision, zero, *, twice):
    run = RunConfig(
        name="gpu",
        model=ARCH,
        data=Data(tokens=""),
        train=Train(steps=9, seq_len=128, global_batch=4, micro_batch=2, precision=precision),
        parallel=Parallel(zero=zero),
    )
    torch.manual_seed(0)
    parts = build_parts(run, place.device, Path())
    if twice:
        parts.gradients = RecomputedGradients(
            parts.program,
            parts.model.data,
            parts.mesh,
            every=1,
            seed=1,
            read=lambda step, part: on_device(run, parts.mesh, step, place.device),
            device=place.device,
        )
        parts.hashes = StateHashes(
            parts.state, parts.model.data.published(), parts.mesh, 100, gradients=parts.gradients
        )
    return Trained(parts, run, place.device)


def compared(trained) -> bool:
    trained.parts.hashes.compare()
    return trained.parts.hashes.read()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_gradients_have_the_same_bits_twice_no_bit_of_the_run_changes_and_a_flip_is_found(place, precision, zero):
    plain, twice = (build(place, precision, zero, twice=twice) for twice in (False, True))
    for number in (1, 2, 3):
        plain.step(number)
        twice.step(number)
    assert not compared(twice) and twice.parts.gradients.suspicion() == NOTHING
    pairs = list(zip(state_of(twice.parts), state_of(plain.parts), strict=True))
    assert len(pairs) > 5
    for (piece, ours), (other, theirs) in pairs:
        assert piece.name == other.name and torch.equal(ours, theirs), piece.name
    gradients = twice.parts.gradients
    take, flipped = gradients.take, []

    def flips(number, values):
        if not gradients.apart and not flipped:
            values.view(-1).view(WORDS[values.itemsize])[1] ^= 1 << 3
            flipped.append(number)
        take(number, values)

    gradients.take = flips
    twice.step(4)
    assert flipped and compared(twice)
    with refused("E-GRADIENTS-VARY", step=4):  # of a single rank, nobody else has an opinion
        gradients.suspicion()


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, (0, 7, 15)), (torch.float32, (0, 22, 31))])
def test_any_bit_of_a_buffer_is_found_with_its_place(dtype, bits):
    device = torch.device(DEVICE)
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randn(3 * (1 << 14) + 41, device=device, generator=generator).to(dtype)
    hasher = BufferHasher(device)
    sound = hasher.hash(values)
    for bit in bits:
        for element in (0, 1 << 14, len(values) - 1):
            flipped = values.clone()
            words = flipped.view(WORDS[values.itemsize])
            words[element] ^= (1 << bit) - ((bit == 8 * values.itemsize - 1) << (bit + 1))  # the highest is the sign
            difference = int(hasher.hash(flipped)) - int(sound)
            assert locate(len(values), values.itemsize, difference) == BitFlip(element, bit)
