"""A small model that has trained a few steps, and saved checkpoints of it: one process, no process group."""

from dataclasses import dataclass

import pytest
import torch
from tests.checkpoints import ledger_of

from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.save import CheckpointFacts, save_checkpoint
from ingot.trainer.checkpoint.state import TrainingState


@dataclass
class WholePiece:
    """A whole parameter, as one process owns it."""

    name: str
    value: torch.Tensor
    owner: bool = True

    @property
    def shape(self):
        return tuple(self.value.shape)

    sizes = shape

    @property
    def offsets(self):
        return (0,) * self.value.dim()


class WholeOptimizer:
    """torch's AdamW by parameter name; one that never stepped gets zeros."""

    def __init__(self, model, adamw):
        self.model, self.adamw = model, adamw

    def moments(self):
        for p in self.model.parameters():
            if not self.adamw.state[p]:
                zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.adamw.state[p].update(step=torch.tensor(0.0), **zeros)
        return {name: dict(self.adamw.state[p]) for name, p in self.model.named_parameters()}

    def put_moments(self, moments):
        for name, p in self.model.named_parameters():
            self.adamw.state[p].update(moments[name])


def state_of(model, adamw, **extras) -> TrainingState:
    pieces = [WholePiece(name, p.detach()) for name, p in model.named_parameters()]
    return TrainingState(pieces, WholeOptimizer(model, adamw), **extras)


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
    return save_checkpoint(folder, facts(step), state_of(model, optimizer), ledger_of(folder, step), keep=keep)


def values(model, optimizer) -> dict[str, torch.Tensor]:
    state = state_of(model, optimizer)
    blocks = state.blocks(state.optimizer.moments(), first_rank=True)
    return {block.name: block.tensor.clone() for block in blocks}


@pytest.fixture
def training():
    torch.set_num_threads(1)
    return make_training()


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")
