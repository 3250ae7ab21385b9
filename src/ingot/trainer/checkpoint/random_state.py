"""The state of this rank's random generators, as tensors of its own file."""

from pathlib import Path

import safetensors
import torch
from torch import Tensor

CPU, CUDA = "random.cpu", "random.cuda"


def random_state() -> list[tuple[str, Tensor]]:
    states = [(CPU, torch.get_rng_state())]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append((CUDA, torch.cuda.get_rng_state()))
    return states


def restore_random_state(file: Path) -> None:
    """From the safetensors file that this rank wrote, which was verified."""
    with safetensors.safe_open(file, framework="pt", device="cpu") as tensors:
        keys = set(tensors.keys())
        if CPU in keys:
            torch.set_rng_state(tensors.get_tensor(CPU))
        if CUDA in keys and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors.get_tensor(CUDA))


def restore_random_text(state: str) -> None:
    """From the manifest of a checkpoint of version 1: hex, after a colon that of the GPU."""
    cpu, _, cuda = state.partition(":")
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(cpu), dtype=torch.uint8))
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(cuda), dtype=torch.uint8))
