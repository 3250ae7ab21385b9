"""A small model that has trained a few steps, and saved checkpoints of it: one process, no process group."""

import pytest
import torch

from ingot.checkpoint.saving import CheckpointFacts, save_checkpoint
from ingot.schema.layout import RunFolder


def facts(step: int) -> CheckpointFacts:
    return CheckpointFacts(
        step=step,
        tokens=step * 64,
        settings={"optim.lr": 0.01},
        config_sha256="c" * 64,
        data_fingerprint="d" * 64,
        layout={"dp_shard": 1},
    )


def make_training(seed: int = 0, steps: int = 2):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        train_one(model, optimizer)
    return model, optimizer


def train_one(model, optimizer) -> float:
    loss = model(torch.randn(4, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def save(folder: RunFolder, step: int, model, optimizer, keep: int = 3):
    return save_checkpoint(folder, facts(step), model, optimizer, (), keep=keep)


def values(model, optimizer) -> dict[str, torch.Tensor]:
    from ingot.checkpoint.state import training_state

    return {name: tensor.clone() for name, tensor in training_state(model, optimizer).items()}


@pytest.fixture
def training():
    torch.set_num_threads(1)
    return make_training()


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")
