"""`reduce = "canonical"`: copies of the model come and go, and every bit of the run stays the same."""

from pathlib import Path

import pytest
from tests.checkpoints import ledger_of

from ingot.schema.run_folder import RunFolder
from ingot.trainer.build import build_parts
from ingot.trainer.checkpoint.load import resume
from ingot.trainer.checkpoint.save import CheckpointFacts, save_checkpoint

from .steps import CPU, join, keep, mean_losses, run_of, same_bits, state_of, train

COPIES, STEPS = (4, 2, 1, 4), 2  # of each
CANONICAL = {"reduce": "canonical", "virtual_ranks": 4}
# Two micro-batches for each of four copies: where "fast" adds all of them in another order.
SETTINGS = {"global_batch": 8, "micro_batch": 1}


def go_on(rank, world, run, folder, first):
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
    trained = train(run, range(first, first + STEPS), parts)
    save_checkpoint(folder, facts, parts.state, ledger_of(folder, facts.step, run.train.global_batch), keep=1)
    return trained.losses, trained.norms, keep(state_of(parts))


def undisturbed(rank, world, run):
    """Losses, norms and states after each STEPS steps, on one process."""
    parts, found = build_parts(run, CPU, Path()), []
    for i in range(len(COPIES)):
        trained = train(run, range(i * STEPS + 1, (i + 1) * STEPS + 1), parts)
        found.append((trained.losses, trained.norms, keep(state_of(parts))))
    return found


def same_run(fork_ranks, folder, settings, reduce):
    """Check that losses, norms, weights and moments have the same bits with another number of copies."""
    (expected,) = fork_ranks(undisturbed, 1, run_of(**settings, **reduce))
    same = {"losses": True, "norms": True, "state": True}
    for i, (copies, (losses, norms, state)) in enumerate(zip(COPIES, expected, strict=True)):
        run = run_of(dp_replicate=copies, **settings, **reduce)
        ranks = fork_ranks(go_on, run.parallel.world_size, run, folder, i * STEPS + 1)
        found_losses, found_norms, found_state = zip(*ranks, strict=True)
        same["losses"] &= mean_losses(found_losses) == losses
        same["norms"] &= all(found == norms for found in found_norms)
        same["state"] &= same_bits(join(found_state), join([state]))
    return same


# A sum of few bf16 gradients in float32 is exact, in any order; in bf16 it is not.
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"precision": "fp32"}, {"precision": "bf16", "grads": "bf16"}], ids=str)
def test_copies_come_and_go_without_a_trace(fork_ranks, tmp_path, settings):
    settings = SETTINGS | settings
    same = same_run(fork_ranks, RunFolder(tmp_path / "canonical"), settings, CANONICAL)
    assert same == {"losses": True, "norms": True, "state": True}
    assert not same_run(fork_ranks, RunFolder(tmp_path / "fast"), settings, {})["state"]
