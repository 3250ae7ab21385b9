"""State beside weights and moments: loss scale, biases and loads of experts, random numbers. A skipped step leaves it
alone, and a checkpoint brings it back on every rank."""

from dataclasses import replace

import pytest
import torch
from tests.checkpoints import ledger_of

from ingot.schema.arch import Moe
from ingot.schema.run_folder import RunFolder
from ingot.trainer.build import build_parts
from ingot.trainer.checkpoint.load import resume
from ingot.trainer.checkpoint.save import CheckpointFacts, save_checkpoint
from ingot.trainer.resilience.policy import Unwatched
from ingot.trainer.step import train_step

from .steps import ARCH, CPU, batch_of, run_of

EXPERTS = replace(ARCH, moe=Moe(num_experts=4, top_k=2, d_expert=8, bias_rate=0.25, global_loss=0.01))
SKIPPED = 2


class SkipsOne(Unwatched):
    def __init__(self):
        self.step = 0

    def veto(self, loss, grad_norm):
        self.step += 1
        return torch.tensor(self.step == SKIPPED)


def weights_of(parts):
    return {shard.name: shard.value.clone() for shard in parts.model.shards}


def balance_of(parts):
    return {shard.name: shard.value.clone() for shard in parts.balance.shards}


def scale_of(parts):
    return parts.loss_scale.scale.item(), parts.loss_scale.good_steps.item()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def facts_of(run):
    return CheckpointFacts(
        step=3,
        tokens=3 * run.tokens_per_step,
        settings=run.settings(),
        config_sha256=run.training_sha256(),
        data_fingerprint="made up",
        layout={},
    )


def trained_and_loaded(rank, world, run, folder):
    """Train three steps, of which the second is skipped, and save; load into new parts. Returns this rank's next random
    numbers."""
    parts = build_parts(run, CPU, folder.root, SkipsOne())
    torch.manual_seed(100 + rank)
    for step in (1, 2, 3):
        before = weights_of(parts), balance_of(parts)
        train_step(parts, batch_of(run, parts.mesh, step), 1e-3)
        for old, new in zip(before, (weights_of(parts), balance_of(parts)), strict=True):
            assert same(old, new) == (step == SKIPPED), step
        assert scale_of(parts) == {1: (2.0**16, 1), 2: (2.0**15, 0), 3: (2.0**15, 1)}[step]
    save_checkpoint(folder, facts_of(run), parts.state, ledger_of(folder, 3, run.train.global_batch), keep=1)
    weights, balance, numbers = weights_of(parts), balance_of(parts), torch.rand(4)
    torch.manual_seed(0)
    parts = build_parts(run, CPU, folder.root, SkipsOne())
    resume(
        folder,
        parts.state,
        settings=run.settings(),
        data_fingerprint="made up",
        on_refused=lambda *what: pytest.fail(str(what)),
    )
    assert same(weights, weights_of(parts)) and same(balance, balance_of(parts))
    assert scale_of(parts) == (2.0**15, 1)
    assert torch.equal(numbers, torch.rand(4))
    return numbers.tolist()


def test_a_skipped_step_and_a_checkpoint_keep_everything(fork_ranks, tmp_path):
    run = run_of(arch=EXPERTS, precision="fp16", dp_shard=2, ep=2, zero=1)
    first, second = fork_ranks(trained_and_loaded, 2, run, RunFolder(tmp_path / "run"))
    assert first != second  # each rank has random numbers of its own
