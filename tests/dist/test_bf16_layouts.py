"""Layouts in bf16 differ from one process no more than one process differs between two sizes of micro-batch."""

import numpy as np
import pytest

from ingot.schema.arch import Arch
from ingot.schema.run import Optim

from .steps import mean_losses, run_of, train

ARCH = Arch(vocab_size=128, d_model=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=128)
STEPS = [1, 2] * 10  # two batches in turn, which are learned by heart: losses move
SETTINGS = {"arch": ARCH, "precision": "bf16", "global_batch": 8, "seq_len": 16, "optim": Optim(lr=3e-3)}
LAYOUTS = {
    "zero 1": {"dp_shard": 2, "zero": 1},
    "zero 3": {"dp_shard": 2, "zero": 3},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "tp x pp x dp": {"tp": 2, "pp": 2, "dp_shard": 2},
}


def losses_of(rank, world, run):
    return train(run, STEPS).losses


@pytest.fixture(scope="module")
def one_process():
    """Losses by micro-batch; filled by the first test, for ranks are forked by tests."""
    return {}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in ("zero 1", "tp", "pp") else pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_a_layout_strays_no_further_than_micro_batches_do(fork_ranks, one_process, name):
    for micro_batch in (1, 8):
        if micro_batch not in one_process:
            (found,) = fork_ranks(losses_of, 1, run_of(**SETTINGS, micro_batch=micro_batch))
            one_process[micro_batch] = np.array(found)
    run = run_of(**SETTINGS, micro_batch=1, **LAYOUTS[name])
    losses = np.array(mean_losses(fork_ranks(losses_of, run.parallel.world_size, run)))
    assert losses[-1] < losses[0] - 0.2, "nothing was learned"
    usual, found = one_process[1] - one_process[8], losses - one_process[1]
    assert np.abs(found).max() <= 3 * np.abs(usual).max()
