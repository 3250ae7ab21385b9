"""A run that changes its layout at every checkpoint goes on as if it never had: weights, moments and losses."""

from dataclasses import replace

import numpy as np
import pytest
from tests.checkpoints import ledger_of

from ingot.schema.run_folder import RunFolder
from ingot.trainer.build import build_parts
from ingot.trainer.checkpoint.load import resume
from ingot.trainer.checkpoint.save import CheckpointFacts, save_checkpoint

from .steps import ARCH, CPU, LATENT, join, keep, mean_losses, run_of, same_bits, state_of, train

STEPS, BATCH = 2, 12  # on each layout; 1, 2, 3 and 4 data ranks divide it
# 20 rows, and norms of 12 and 3: ranks with fewer rows than others, and with none.
UNEVEN = replace(ARCH, vocab_size=20, d_model=12, d_ffn=20, head_dim=6)
MESHES = [
    {"pp": 2, "tp": 2, "dp_shard": 2, "zero": 1},
    {"dp_shard": 4, "zero": 3},
    {"tp": 4},
    {},
    {"pp": 2, "schedule": "zb_v", "dp_shard": 2, "zero": 2},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
]
HOMES = [
    {"dp_shard": 4, "zero": 1, "unit_layers": 2},
    {"dp_replicate": 2, "offload": "cpu"},
    {"pp": 2, "offload": "nvme", "offload_folder": "moments"},
    {"dp_shard": 2, "tp": 2, "zero": 3, "sequence": False},
    {"dp_shard": 2, "zero": 3, "offload": "cpu", "offload_parameters": True},
    {"dp_shard": 3, "zero": 2},
]


def go_on(rank, world, run, folder, first):
    """Load what is there, do STEPS steps and save. Returns what was loaded, losses, norms and what was saved."""
    parts = build_parts(run, CPU, folder.root)
    facts = CheckpointFacts(
        step=first + STEPS - 1,
        tokens=(first + STEPS - 1) * run.tokens_per_step,
        settings=run.settings(),
        config_sha256=run.training_sha256(),
        data_fingerprint="made up",
        layout={"ranks": world},
    )
    restored = resume(
        folder,
        parts.state,
        settings=facts.settings,
        data_fingerprint=facts.data_fingerprint,
        on_refused=lambda *what: pytest.fail(str(what)),
    )
    assert (restored.step if restored else 0) == first - 1
    parts.model.publish()
    loaded = keep(state_of(parts))
    trained = train(run, range(first, first + STEPS), parts)
    saved = keep(state_of(parts))
    save_checkpoint(folder, facts, parts.state, ledger_of(folder, facts.step, run.train.global_batch), keep=1)
    parts.optimizer.close()
    return loaded, trained.losses, trained.norms, saved


def without_checkpoints(rank, world, run, steps):
    trained = train(run, range(1, steps + 1))
    return trained.losses, trained.norms


@pytest.mark.parametrize(
    "layouts, arch",
    [
        pytest.param(MESHES, ARCH, marks=pytest.mark.nightly),
        pytest.param(HOMES, UNEVEN, marks=pytest.mark.slow),
        pytest.param([{"dp_shard": 2, "zero": 3}, {"tp": 4}], LATENT, marks=pytest.mark.nightly),
    ],
    ids=["meshes", "homes of state", "latent attention"],
)
def test_losses_go_on_on_another_layout(fork_ranks, tmp_path, layouts, arch):
    folder = RunFolder(tmp_path / "run")
    ((losses, norms),) = fork_ranks(without_checkpoints, 1, run_of(arch=arch, global_batch=BATCH), STEPS * len(layouts))
    saved = None
    for i, layout in enumerate(layouts):
        run, done = run_of(arch=arch, global_batch=BATCH, **layout), i * STEPS
        ranks = fork_ranks(go_on, run.parallel.world_size, run, folder, done + 1)
        loaded, found, found_norms, kept = zip(*ranks, strict=True)
        if saved is not None:
            assert same_bits(join(loaded), saved), layout
        saved = join(kept)
        assert all(np.any(saved[name]) for name in saved if name.startswith("exp_avg"))
        np.testing.assert_allclose(mean_losses(found), losses[done : done + STEPS], rtol=1e-12)
        for of_rank in found_norms:
            np.testing.assert_allclose(of_rank, norms[done : done + STEPS], rtol=1e-10)
