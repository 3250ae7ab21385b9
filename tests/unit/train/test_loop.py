"""Whole runs on forked ranks: the worker's build and loop, checkpoints and resumption, ledger and events."""

import contextlib
import io

import numpy as np
import pytest
import torch

from ingot.config import load
from ingot.dist.start import Place
from ingot.errors import ConfigError, RunFailed
from ingot.events import read_events
from ingot.loader.ledger import prove, read_ledger
from ingot.loader.order import Order
from ingot.schema.run import RunConfig
from ingot.schema.tokens import read_token_manifest
from ingot.train.build import build
from ingot.train.loop import train


def run_rank(rank, ranks, folder, until_step=None, break_at=None):
    """What worker.py does, without the environment. Returns (ending, lines)."""
    config = load(RunConfig, folder.config)
    place = Place(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        attempt=0,
        device=torch.device("cpu"),
    )
    lines = []
    run = build(config, folder, place, until_step=until_step, say=lines.append)
    if break_at is not None:
        poison(run, break_at)
    try:
        ending = train(run)
    finally:
        run.loader.close()
    return (ending.step, ending.stopped), lines


def poison(run, step):
    """Make the gradients of one step infinite, as a broken batch would."""

    def hook(optimizer, *_):
        hook.steps += 1
        if run.first_step + hook.steps - 1 == step:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.data.fill_(float("nan"))

    hook.steps = 0
    run.optimizer.register_step_pre_hook(hook)


def step_facts(folder):
    return {e["step"]: (e["loss"], e["grad_norm"], e["lr"]) for e in read_events(folder.events, "step")}


def ledger_proof(folder, config):
    """Raises DataError unless the newest checkpoint's ledger is exactly the order."""
    from ingot.checkpoint.loading import list_checkpoints

    manifest = list_checkpoints(folder.checkpoints)[0].manifest
    tokens = read_token_manifest((folder.root / config.data.tokens).resolve())
    order = Order(tokens, config.train.seq_len, config.seed, config.data.weights)
    prove(read_ledger(folder.ledger, manifest.ledger), order, config.train.global_batch)
    return manifest


def test_a_run_from_start_to_end(fork_ranks, make_run):
    folder = make_run(dp_shard=2)
    results = fork_ranks(run_rank, 2, folder)
    assert [ending for ending, _ in results] == [(12, False)] * 2
    assert results[1][1] == []  # only rank 0 speaks
    assert [line.split()[0] for line in results[0][1]].count("step") == len(
        list(read_events(folder.events, "progress"))
    )
    by_kind = {}
    for event in read_events(folder.events):
        by_kind.setdefault(event["kind"], []).append(event)
    assert sorted(e["rank"] for e in by_kind["rank_started"]) == [0, 1]
    assert [e["step"] for e in by_kind["step"]] == list(range(1, 13))
    assert [e["step"] for e in by_kind["progress"]] == [3, 5, 6, 9, 10, 12]
    assert [e["step"] for e in by_kind["checkpoint"]] == [5, 10, 12]
    assert [e["step"] for e in by_kind["evaluation"]] == [12]
    assert len(by_kind["sample"]) == 1 and len(by_kind["finished"]) == 1
    assert by_kind["step"][-1]["loss"] < by_kind["step"][0]["loss"]
    evaluation = by_kind["evaluation"][0]
    assert set(evaluation["by_source"]) == {"metal", "stone"} and evaluation["bpb"] > 0
    started = by_kind["run_started"][0]
    assert started["world_size"] == 2 and started["from_step"] == 0 and started["peak_flops"] is None
    config = load(RunConfig, folder.config)
    assert ledger_proof(folder, config).layout == {"dp_shard": 2}


def test_stopping_and_resuming_gives_the_bits_of_an_undisturbed_run(fork_ranks, make_run):
    whole, broken = make_run("whole", dp_shard=2), make_run("broken", dp_shard=2)
    fork_ranks(run_rank, 2, whole)
    assert [e for e, _ in fork_ranks(run_rank, 2, broken, 7)] == [(7, True)] * 2
    assert [e["step"] for e in read_events(broken.events, "stopped")] == [7]
    assert [e for e, _ in fork_ranks(run_rank, 2, broken)] == [(12, False)] * 2
    assert step_facts(broken) == step_facts(whole)
    assert [e["from_step"] for e in read_events(broken.events, "run_started")] == [0, 7]
    ledger_proof(broken, load(RunConfig, broken.config))


def test_a_run_past_the_step_to_stop_at_stops_again(fork_ranks, make_run):
    folder = make_run(dp_shard=2)
    fork_ranks(run_rank, 2, folder, 7)
    assert [e for e, _ in fork_ranks(run_rank, 2, folder, 4)] == [(7, True)] * 2
    assert [e["step"] for e in read_events(folder.events, "stopped")] == [7, 7]
    assert max(step_facts(folder)) == 7


def test_prompts_that_do_not_fit_are_refused_before_training(fork_ranks, make_run):
    folder = make_run(prompts=("Stone " * 60,))

    def expect_refusal(rank, ranks):
        with pytest.raises(ConfigError, match="64 positions"):
            run_rank(rank, ranks, folder)
        return True

    assert fork_ranks(expect_refusal, 1) == [True]
    assert not list(read_events(folder.events, "step"))


def test_another_number_of_ranks_goes_on_with_the_same_samples(fork_ranks, make_run):
    whole, moved = make_run("whole", dp_shard=1, precision="fp64"), make_run("moved", dp_shard=2, precision="fp64")
    fork_ranks(run_rank, 1, whole)
    for ranks, until in ((2, 4), (1, 8), (4, None)):
        text = moved.config.read_text()
        moved.config.write_text(
            "\n".join(f"dp_shard = {ranks}" if x.startswith("dp_shard") else x for x in text.split("\n"))
        )
        fork_ranks(run_rank, ranks, moved, until)
    ours, theirs = step_facts(moved), step_facts(whole)
    assert ours.keys() == theirs.keys()
    for step, facts in theirs.items():
        assert ours[step] == pytest.approx(facts, rel=1e-10), step
    assert ledger_proof(moved, load(RunConfig, moved.config)).layout == {"dp_shard": 4}


def test_evaluating_on_the_way_leaves_training_alone(fork_ranks, make_run):
    plain, watched = make_run("plain", dp_shard=2), make_run("watched", dp_shard=2)
    watched.config.write_text(watched.config.read_text().replace("every_steps = 0", "every_steps = 4"))
    fork_ranks(run_rank, 2, plain)
    fork_ranks(run_rank, 2, watched)
    assert [e["step"] for e in read_events(watched.events, "evaluation")] == [4, 8, 12]
    assert step_facts(watched) == step_facts(plain)
    last = [list(read_events(folder.events, "evaluation"))[-1]["bpb"] for folder in (plain, watched)]
    assert last[0] == last[1]


def test_stopping_where_an_evaluation_is_due_does_not_skip_it(fork_ranks, make_run):
    whole, broken = make_run("whole"), make_run("broken")
    for folder in (whole, broken):
        folder.config.write_text(folder.config.read_text().replace("every_steps = 0", "every_steps = 4"))
    fork_ranks(run_rank, 1, whole)
    fork_ranks(run_rank, 1, broken, 8)
    fork_ranks(run_rank, 1, broken)
    ours, theirs = ([(e["step"], e["bpb"]) for e in read_events(f.events, "evaluation")] for f in (broken, whole))
    assert ours == theirs and [step for step, _ in ours] == [4, 8, 12]


def test_a_stop_request_saves_at_the_next_line(fork_ranks, make_run):
    folder = make_run(dp_shard=2)
    folder.stop_request.write_text("stop\n")
    assert [e for e, _ in fork_ranks(run_rank, 2, folder)] == [(3, True)] * 2
    assert [e["step"] for e in read_events(folder.events, "checkpoint")] == [3]
    assert not list(read_events(folder.events, "finished"))


def test_broken_weights_are_never_saved(fork_ranks, make_run):
    folder = make_run(dp_shard=2)

    def expect_failure(rank, ranks):
        with pytest.raises(RunFailed, match="step 9"), contextlib.redirect_stdout(io.StringIO()):
            run_rank(rank, ranks, folder, break_at=8)
        return True

    assert fork_ranks(expect_failure, 2) == [True, True]
    assert [e["step"] for e in read_events(folder.events, "checkpoint")] == [5]
    assert np.isnan(step_facts(folder)[9][0])  # the facts are written down before the end


@pytest.mark.parametrize("mask", [True, False])
def test_masking_documents_changes_the_losses(fork_ranks, make_run, mask):
    folder = make_run(steps=3, mask_documents=mask)
    fork_ranks(run_rank, 1, folder)
    plain = make_run("plain", steps=3)
    fork_ranks(run_rank, 1, plain)
    assert (step_facts(folder) != step_facts(plain)) == mask


def test_wrong_number_of_processes_is_refused(fork_ranks, make_run):
    folder = make_run(dp_shard=4)

    def expect_refusal(rank, ranks):
        with pytest.raises(ConfigError, match=r"dp_shard=4 makes 4 processes, but the job has 2"):
            run_rank(rank, ranks, folder)
        return True

    assert fork_ranks(expect_refusal, 2) == [True, True]
