"""Bytes that a rank's state takes, counted while it trains, against the published bills (Rajbhandari et al. 2020)."""

from dataclasses import replace

import pytest
from tests.expect import settled

from ingot.rehearse.dryrun.tracker import HOST, Tracker
from ingot.schema.arch import Arch, Moe
from ingot.theory.layout import positions
from ingot.theory.memory import shares
from ingot.theory.params import state_per_parameter
from ingot.trainer.build import build_parts
from ingot.trainer.step import train_step

from .steps import CPU, batch_of, run_of

# Rows that ranks divide; the unit on its way when a backward ends (embedding and last norm) is under 1% of the model.
ARCH = Arch(vocab_size=16, d_model=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, d_ffn=512)
SPARSE = replace(ARCH, d_ffn=128, moe=Moe(num_experts=8, top_k=2, d_expert=128))
UNTIL = "until the end of a backward"
# Bytes per parameter on each of N ranks, as published: the copy that computes, gradients, master and moments.
CASES = [
    (1, {}, 18),
    (2, {"dp_replicate": 2, "grads": "bf16"}, 16),
    (2, {"dp_replicate": 2}, 18),
    (2, {"dp_shard": 2, "zero": 1, "grads": "bf16"}, 4 + 12 / 2),
    pytest.param(4, {"dp_shard": 4, "zero": 1, "grads": "bf16"}, 4 + 12 / 4, marks=pytest.mark.slow),
    pytest.param(4, {"dp_shard": 4, "zero": 1}, 6 + 12 / 4, marks=pytest.mark.slow),
    (2, {"dp_shard": 2, "zero": 2, "grads": "bf16"}, 2 + 14 / 2),
    pytest.param(4, {"dp_shard": 4, "zero": 2, "grads": "bf16"}, 2 + 14 / 4, marks=pytest.mark.slow),
    pytest.param(4, {"dp_shard": 4, "zero": 2}, 2 + 16 / 4, marks=pytest.mark.slow),
    (2, {"dp_shard": 2, "zero": 3}, 16 / 2),
    pytest.param(4, {"dp_shard": 4, "zero": 3, "grads": "bf16"}, 16 / 4, marks=pytest.mark.slow),
    pytest.param(4, {"dp_replicate": 2, "dp_shard": 2, "zero": 2}, 2 + 16 / 2, marks=pytest.mark.slow),
    (2, {"dp_shard": 2, "zero": 1, "precision": "fp32"}, 4 + 4 + 8 / 2),
    # Ranks of context parallelism divide what those of dp_shard divide.
    (2, {"cp": 2, "context": "ring", "zero": 1}, 6 + 12 / 2),
    pytest.param(4, {"cp": 2, "context": "ulysses", "dp_shard": 2, "zero": 2}, 2 + 16 / 4, marks=pytest.mark.slow),
    (2, {"cp": 2, "context": "ring", "zero": 3}, 16 / 2),
    # The moments are elsewhere, and with offload_parameters all that lasts.
    (2, {"dp_shard": 2, "zero": 1, "offload": "cpu"}, 6 + 4 / 2),
    (2, {"dp_shard": 2, "zero": 2, "offload": "nvme", "offload_folder": "moments"}, 2 + 8 / 2),
    (2, {"dp_shard": 2, "zero": 3, "offload": "cpu"}, 8 / 2),
    (2, {"dp_shard": 2, "zero": 3, "offload": "cpu", "offload_parameters": True}, 0),
]


def held_bytes(rank, world, run, folder, most):
    """Return the memory in use at the end of the first of two backwards, without offloaded state.

    The tensors of this backward are freed; gradients stay for the second one.
    """
    offloads = run.parallel.offload_parameters
    with Tracker() as tracker:
        tracker.begin(UNTIL)
        parts = build_parts(run, CPU, folder)
        after_backward, ended = parts.model.data.after_backward, []
        if run.parallel.offload != "none":
            tracker.label((t for state in parts.optimizer.moments().values() for t in state.values()), HOST)
        if offloads:
            tracker.label((piece.value for piece in parts.model.shards), HOST)

        def look(stage, last):
            after_backward(stage, last)
            if offloads:
                tracker.label((p.grad.to_local() for p in stage.parameters()), HOST)
            if not ended:
                settled(lambda: tracker.peaks()[UNTIL].rest, most)
                tracker.begin("afterwards")
            ended.append(last)

        parts.model.data.after_backward = look
        train_step(parts, batch_of(run, parts.mesh, 1), 1e-3)
        assert ended == [False, True]
        parts.optimizer.close()
    return tracker.peaks()[UNTIL].rest


@pytest.mark.parametrize("world, settings, expected", CASES, ids=str)
def test_state_takes_what_the_bills_say(fork_ranks, tmp_path, world, settings, expected):
    batch = 2 * world // settings.get("cp", 1)
    run = run_of(**{"arch": ARCH, "precision": "bf16", "global_batch": batch} | settings)
    (position,) = positions(run)
    assert state_per_parameter(position.parallel, run.train.precision).total == expected
    allowed = max(0.01 * expected, 0.03)
    for held in fork_ranks(held_bytes, world, run, tmp_path, (expected + allowed) * position.parameters):
        assert held / position.parameters == pytest.approx(expected, abs=allowed)


@pytest.mark.parametrize(
    ("world", "settings", "common", "routed"),
    [
        # All ranks divide what all hold; of experts, two ranks hold the same half.
        pytest.param(4, {"dp_shard": 4, "ep": 2, "zero": 1}, 6 + 12 / 4, 6 + 12 / 2, marks=pytest.mark.slow),
        pytest.param(4, {"dp_shard": 4, "ep": 4, "zero": 2}, 2 + 16 / 4, 18, marks=pytest.mark.slow),
        pytest.param(4, {"dp_shard": 4, "ep": 2, "zero": 3}, 16 / 4, 16 / 2, marks=pytest.mark.slow),
        # tp does not cut experts: its ranks divide their state.
        (2, {"tp": 2, "zero": 1}, 18, 6 + 12 / 2),
    ],
    ids=str,
)
def test_experts_take_what_the_ranks_that_hold_them_divide(fork_ranks, tmp_path, world, settings, common, routed):
    batch = 2 * settings.get("dp_shard", 1)
    run = run_of(**{"arch": SPARSE, "precision": "bf16", "global_batch": batch} | settings)
    (position,) = positions(run)
    assert [share.ranks for share in shares(position)] == [run.parallel.shard_ranks, run.parallel.expert_ranks]
    of = [state_per_parameter(position.parallel, "bf16", share.ranks).total for share in shares(position)]
    assert of == [common, routed]
    expected = position.common * common + position.routed * routed
    for held in fork_ranks(held_bytes, world, run, tmp_path, 1.02 * expected):
        assert held == pytest.approx(expected, rel=0.02)
