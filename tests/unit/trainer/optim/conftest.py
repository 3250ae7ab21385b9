"""Shards of a small model: matrices and a norm weight, one shard empty, one not owned."""

import pytest
import torch

from ingot.plugins.piece import ParameterShard
from ingot.schema.run import Optim

SHAPES = {"embed": (37, 129), "up": (1, 1024), "norm": (129,), "empty": (0, 129), "down": (129, 31)}


def make_blocks(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        ParameterShard(
            name, shape, (0,) * len(shape), shape, torch.randn(shape, generator=generator, dtype=dtype), owner=True
        )
        for name, shape in SHAPES.items()
    ]


def set_gradients(blocks, step, dtype=None):
    generator = torch.Generator().manual_seed(1000 + step)
    for block in blocks:
        gradient = torch.randn(block.value.shape, generator=generator, dtype=block.value.dtype)
        block.grad = gradient.to(dtype or block.value.dtype)


@pytest.fixture
def blocks():
    return make_blocks


@pytest.fixture
def gradients():
    return set_gradients


@pytest.fixture
def optim():
    return Optim(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
