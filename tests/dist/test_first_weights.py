"""The first weights are the same bits on every mesh: those that one process draws."""

from pathlib import Path

import pytest

from ingot.schema.arch import Arch
from ingot.trainer.build import build_parts
from ingot.trainer.model.init import initialize
from ingot.trainer.model.transformer import Transformer

from .steps import CPU, join, keep, run_of, same_bits

# Rows that ranks do not divide; an embedding of several groups of rows, each drawn separately.
ARCH = Arch(vocab_size=70_000, d_model=20, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=4, d_ffn=36)
LAYOUTS = [
    {"precision": "fp64"},
    {"dp_replicate": 2},
    {"dp_shard": 3, "zero": 1},
    {"dp_shard": 3, "zero": 3},
    {"dp_shard": 2, "zero": 3, "unit_layers": 0, "precision": "fp64"},
    {"dp_shard": 2, "zero": 3, "offload": "cpu", "offload_parameters": True},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 2},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    {"tp": 2},
    {"tp": 4, "sequence": False},
    {"pp": 2, "precision": "fp64"},
    {"pp": 2, "schedule": "zb_v"},
    {"pp": 2, "tp": 2, "dp_shard": 2, "zero": 1},
    {"pp": 2, "tp": 2, "dp_shard": 2, "zero": 3},
]


def first_weights(rank, world, run):
    return keep((piece, piece.value) for piece in build_parts(run, CPU, Path()).model.shards)


@pytest.mark.slow
def test_first_weights_are_those_of_one_process(fork_ranks):
    model = Transformer(ARCH)
    initialize(model, ARCH, 3)
    expected = {name: p.detach().numpy() for name, p in model.named_parameters()}
    for layout in LAYOUTS:
        run = run_of(arch=ARCH, **{"precision": "bf16", "global_batch": 12} | layout)
        assert same_bits(join(fork_ranks(first_weights, run.parallel.world_size, run)), expected), layout
