"""Whole runs on forked ranks: the worker's build and loop, checkpoints and resumption, ledger and events."""

import math
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.expect import refused

from ingot.events import read_events
from ingot.plugins.callback import Verdict
from ingot.schema.checkpoint import Health
from ingot.schema.tokens import read_token_manifest
from ingot.theory.rules import load_run
from ingot.trainer import loop
from ingot.trainer.checkpoint.manifest import list_checkpoints, write_manifest
from ingot.trainer.checkpoint.resumable import resume_step
from ingot.trainer.checkpoint.state import CPU
from ingot.trainer.default_policy import DefaultPolicy
from ingot.trainer.loader.ledger import prove, read_ledger
from ingot.trainer.loader.order import Order
from ingot.trainer.loop import train
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.resilience.heartbeat import Heartbeat
from ingot.trainer.run import build_trainer
from ingot.trainer.step import train_step
from ingot.trainer.telemetry.usage import KINDS


def run_rank(rank, ranks, folder, until_step=None, make_policy=None, say=lambda line: None):
    """Train as run.py does, without the environment of a rank. Returns (ending, lines)."""
    config = load_run(folder.config)
    place = RankInfo(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        attempt=0,
        device=torch.device("cpu"),
    )
    lines = []
    run = build_trainer(config, folder, place, until_step=until_step, say=lambda line: (lines.append(line), say(line)))
    if make_policy is not None:
        run.policy = make_policy(folder)
    try:
        ending = train(run)
    finally:
        run.loader.close()
    return (ending.step, ending.stopped), lines


class Scripted(DefaultPolicy):
    """A policy that gives a scripted verdict the first `times` that it sees a step, else the default one."""

    def __init__(self, folder, script=None, *, times=1, vetoes=()):
        super().__init__(folder)
        self.script, self.times, self.vetoes = script or {}, times, vetoes
        self.seen, self.asked = Counter(), 0

    def veto(self, loss, grad_norm):
        self.asked += 1
        return torch.tensor(self.asked in self.vetoes) if self.vetoes else None

    def verdict(self, facts):
        self.seen[facts.step] += 1
        usual = super().verdict(facts)
        return self.script.get(facts.step, usual) if self.seen[facts.step] <= self.times else usual


def step_facts(folder):
    return {e["step"]: (e["loss"], e["grad_norm"], e["lr"]) for e in read_events(folder.events, "step")}


def files_of(folder):
    """The files of the newest checkpoint with their hashes: weights, moments and random states."""
    return list_checkpoints(folder.checkpoints)[0].manifest.files


def random_states(folder):
    found = [safe_open(path, "pt") for path in sorted(folder.checkpoint(12).glob("*.safetensors"))]
    return [file.get_tensor(CPU).tolist() for file in found]


def ledger_proof(folder, config):
    """Raise DataError unless the newest checkpoint's ledger is exactly the order."""
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
    config = load_run(folder.config)
    assert ledger_proof(folder, config).layout == {"dp_shard": 2}
    first, second = random_states(folder)
    assert first != second  # each rank has random numbers of its own


def waits_of_the_heart(rank, ranks, folder):
    waits = []
    Heartbeat.set_waiting = lambda _, value: waits.append(value)
    run_rank(rank, ranks, folder, until_step=3)
    return waits


def test_the_heartbeat_says_when_a_rank_waits_for_another_one(fork_ranks, make_run):
    for waits in fork_ranks(waits_of_the_heart, 2, make_run("run", dp_shard=2)):
        assert waits[:1] == [False] and len(waits) > 6  # of three steps
        assert waits[1:] == [True, False] * (len(waits) // 2)


def test_stopping_and_resuming_gives_the_bits_of_an_undisturbed_run(fork_ranks, make_run):
    whole, broken = make_run("whole", dp_shard=2), make_run("broken", dp_shard=2)
    fork_ranks(run_rank, 2, whole)
    torch.rand(1)  # forked ranks inherit the random state of this process, and do not depend on it
    assert [e for e, _ in fork_ranks(run_rank, 2, broken, 7)] == [(7, True)] * 2
    assert [e["step"] for e in read_events(broken.events, "stopped")] == [7]
    torch.rand(1)
    assert [e for e, _ in fork_ranks(run_rank, 2, broken)] == [(12, False)] * 2
    assert step_facts(broken) == step_facts(whole)
    assert files_of(broken) == files_of(whole)
    assert [e["from_step"] for e in read_events(broken.events, "run_started")] == [0, 7]
    ledger_proof(broken, load_run(broken.config))


def test_a_run_past_the_step_to_stop_at_stops_again(fork_ranks, make_run):
    folder = make_run(dp_shard=2)
    fork_ranks(run_rank, 2, folder, 7)
    assert [e for e, _ in fork_ranks(run_rank, 2, folder, 4)] == [(7, True)] * 2
    assert [e["step"] for e in read_events(folder.events, "stopped")] == [7, 7]
    assert max(step_facts(folder)) == 7


def test_prompts_that_do_not_fit_are_refused_before_training(fork_ranks, make_run):
    folder = make_run(prompts=("Stone " * 60,))

    def expect_refusal(rank, ranks):
        with refused("E-PROMPT-LENGTH"):
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
    assert ledger_proof(moved, load_run(moved.config)).layout == {"dp_shard": 4}


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


def expect_failure(rank, ranks, folder, code, make_policy=None, **facts):
    with refused(code, **facts):
        run_rank(rank, ranks, folder, make_policy=make_policy)
    return True


def break_loss_at(step):
    """From now on in this process, the loss of one step is not a number, as after a broken batch."""

    def broken_step(run, batch, lr):
        facts = train_step(run, batch, lr)
        return replace(facts, loss=facts.loss * math.nan) if facts.step == step else facts

    loop.train_step = broken_step


def test_broken_weights_are_never_saved(fork_ranks, make_run):
    folder = make_run(dp_shard=2)

    def fail(rank, ranks):
        if rank == 1:  # the others learn of it
            break_loss_at(9)
        return expect_failure(rank, ranks, folder, "E-LOSS-NOT-FINITE", step=9)

    assert fork_ranks(fail, 2) == [True, True]
    assert [e["step"] for e in read_events(folder.events, "checkpoint")] == [5]
    assert np.isnan(step_facts(folder)[9][0])  # the facts are written down before the end


def test_a_batch_whose_gradient_is_not_finite_is_skipped(fork_ranks, make_run):
    """One rank has it, all skip the update; a later attempt that reads the batch again goes on as well. Also where the
    guard takes no measures."""
    folder, steps = make_run(dp_shard=2, guard={"preset": "watch"}), []

    def train_with_a_bad_batch(rank, ranks, until_step=None):
        def bad_step(run, batch, lr):
            def reduce():
                type(run.model).reduce(run.model)
                if rank == 1 and batch.step == 7:
                    run.model.shards[0].grad.fill_(math.nan)

            run.model.reduce = reduce
            return train_step(run, batch, lr)

        loop.train_step = bad_step
        return run_rank(rank, ranks, folder, until_step)[0]

    assert fork_ranks(train_with_a_bad_batch, 2, 8) == [(8, True)] * 2
    steps = step_facts(folder)
    assert np.isnan(steps[7][1]) and np.isfinite(steps[8]).all()
    assert [e["steps"] for e in read_events(folder.events, "skipped")] == [[7]]
    whole = [c for c in list_checkpoints(folder.checkpoints) if c.manifest]
    assert [(c.step, c.manifest.health.state) for c in whole] == [(8, "healthy"), (5, "healthy")]
    shutil.rmtree(whole[0].path)
    assert fork_ranks(train_with_a_bad_batch, 2) == [(12, False)] * 2
    again = step_facts(folder)
    assert again[8] == steps[8] and np.isfinite([again[step] for step in range(8, 13)]).all()


def test_weights_that_exploded_are_never_saved(fork_ranks, make_run):
    folder = make_run(lr=100.0, clip_norm=0.0)

    def explode(rank, ranks):
        return expect_failure(rank, ranks, folder, "E-LOSS-EXPLODED")

    assert fork_ranks(explode, 1) == [True]
    assert not list_checkpoints(folder.checkpoints)


def test_a_suspect_checkpoint_is_the_last_choice(fork_ranks, make_run):
    """Nothing makes one today; the manifest is written as a later judge would."""
    folder = make_run()
    fork_ranks(run_rank, 1, folder, 10)
    newest, _ = list_checkpoints(folder.checkpoints)
    write_manifest(
        newest.path, replace(newest.manifest, health=Health(state="suspect", reason="a spike", by="a judge"))
    )
    assert resume_step(folder) == 5
    fork_ranks(run_rank, 1, folder, 7)
    assert [e["from_step"] for e in read_events(folder.events, "run_started")] == [0, 5]
    shutil.rmtree(folder.checkpoint(5)), shutil.rmtree(folder.checkpoint(7))
    assert resume_step(folder) == 10
    fork_ranks(run_rank, 1, folder, 11)
    assert [e["from_step"] for e in read_events(folder.events, "run_started")] == [0, 5, 10]


def test_rank_0_reports_each_refused_checkpoint_once_and_where_the_run_goes_on(fork_ranks, make_run):
    folder = make_run(dp_shard=2)
    fork_ranks(run_rank, 2, folder, 10)
    path = folder.checkpoint(10) / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0\0")
    (_, lines), (_, others) = fork_ranks(run_rank, 2, folder)
    first, second = [line for line in lines if line.startswith(("refused", "continue"))]
    assert first.startswith("refused") and str(folder.checkpoint(10)) in first
    assert second.startswith("continue  after step 5,") and others == []
    assert [event["step"] for event in read_events(folder.events, "checkpoint_refused")] == [10]


def test_a_stop_between_lines_does_not_save_broken_weights(fork_ranks, make_run):
    folder = make_run()

    def fail(rank, ranks):
        break_loss_at(7)
        make = lambda folder: Scripted(folder, {8: Verdict.STOP})  # noqa: E731
        return expect_failure(rank, ranks, folder, "E-LOSS-NOT-FINITE", make, step=7)

    assert fork_ranks(fail, 1) == [True]
    assert [e["step"] for e in read_events(folder.events, "checkpoint")] == [5]


def test_rolling_back_gives_the_bits_of_an_undisturbed_run(fork_ranks, make_run):
    whole, broken = make_run("whole", dp_shard=2), make_run("broken", dp_shard=2)
    fork_ranks(run_rank, 2, whole)

    def roll_back(rank, ranks):
        script = {7: Verdict.ROLL_BACK, 12: Verdict.ROLL_BACK}
        return run_rank(rank, ranks, broken, make_policy=lambda folder: Scripted(folder, script))

    results = fork_ranks(roll_back, 2)
    assert [ending for ending, _ in results] == [(12, False)] * 2
    assert [line for line in results[0][1] if line.startswith(("rollback", "          why"))] == [
        "rollback  from step 7 to step 5: 2 steps trained again",
        "          why step 5: it is the newest, and in no doubt",
        "rollback  from step 12 to step 10: 2 steps trained again",
        "          why step 10: it is the newest, and in no doubt",
    ]
    jumps = [(e["from_step"], e["to_step"]) for e in read_events(broken.events, "rolled_back")]
    assert jumps == [(7, 5), (12, 10)]
    done = [e["step"] for e in read_events(broken.events, "step")]
    assert done == [1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9, 10, 11, 12, 11, 12]
    assert step_facts(broken) == step_facts(whole)
    ledger_proof(broken, load_run(broken.config))


def test_rolling_back_from_the_same_step_ends(fork_ranks, make_run):
    folder = make_run(dp_shard=2)

    def forever(rank, ranks):
        script = {7: Verdict.ROLL_BACK}
        return expect_failure(
            rank, ranks, folder, "E-ROLLBACK-LIMIT", lambda folder: Scripted(folder, script, times=99), step=7, times=7
        )

    assert fork_ranks(forever, 2) == [True, True]
    assert [e["to_step"] for e in read_events(folder.events, "rolled_back")] == [5] * 6


def test_there_is_no_way_back_before_the_first_checkpoint(fork_ranks, make_run):
    folder = make_run()

    def fail(rank, ranks):
        script = {2: Verdict.ROLL_BACK}
        code, run = "E-ROLLBACK-NO-CHECKPOINT", str(folder.root)
        return expect_failure(rank, ranks, folder, code, lambda folder: Scripted(folder, script), run=run)

    assert fork_ranks(fail, 1) == [True]


def test_a_verdict_to_stop_is_obeyed_between_lines(fork_ranks, make_run):
    folder = make_run(dp_shard=2)

    def stop(rank, ranks):
        return run_rank(rank, ranks, folder, make_policy=lambda folder: Scripted(folder, {4: Verdict.STOP}))

    assert [ending for ending, _ in fork_ranks(stop, 2)] == [(4, True)] * 2
    assert [e["step"] for e in read_events(folder.events, "progress")] == [3, 4]
    assert [e["step"] for e in read_events(folder.events, "checkpoint")] == [4]
    assert [e["step"] for e in read_events(folder.events, "stopped")] == [4]


def saved_tensors(folder):
    """Name -> checksums of the weights, moments and update counts in the newest checkpoint."""
    tensors = list_checkpoints(folder.checkpoints)[0].manifest.tensors
    return {name: entry.crc32 for name, entry in tensors.items()}


@pytest.mark.parametrize("skipping", [False, True])
def test_a_vetoed_step_changes_nothing_and_is_logged(fork_ranks, make_run, skipping):
    before, after, other = make_run("before", dp_shard=2), make_run("after", dp_shard=2), make_run("other", dp_shard=2)
    fork_ranks(run_rank, 2, before, 3)
    fork_ranks(run_rank, 2, other, 4)

    def veto(rank, ranks):
        script = {4: Verdict.SKIP} if skipping else {}
        make = lambda folder: Scripted(folder, script, vetoes=(4,))  # noqa: E731
        return run_rank(rank, ranks, after, 4, make)

    assert [ending for ending, _ in fork_ranks(veto, 2)] == [(4, True)] * 2
    assert saved_tensors(after) == saved_tensors(before) != saved_tensors(other)
    assert [e["steps"] for e in read_events(after.events, "skipped")] == [[4]]
    assert step_facts(after)[4][:2] == step_facts(other)[4][:2]


def test_a_skipped_step_is_written_down_at_once(fork_ranks, make_run):
    folder = make_run(steps=6)

    def skip(rank, ranks):
        make = lambda folder: Scripted(folder, {4: Verdict.SKIP}, vetoes=(2, 4, 5))  # noqa: E731
        return run_rank(rank, ranks, folder, make_policy=make)

    ((ending, lines),) = fork_ranks(skip, 1)
    assert ending == (6, False)
    assert [e["step"] for e in read_events(folder.events, "progress")] == [3, 4, 5, 6]
    assert [e["steps"] for e in read_events(folder.events, "skipped")] == [[2], [4], [5]]
    assert "skipped   update of step 4" in lines


def test_an_update_that_was_made_cannot_be_skipped(fork_ranks, make_run):
    folder = make_run()

    def fail(rank, ranks):
        script = {4: Verdict.SKIP}
        return expect_failure(rank, ranks, folder, "E-POLICY-SKIP", lambda folder: Scripted(folder, script), step=4)

    assert fork_ranks(fail, 1) == [True]


class Reader(DefaultPolicy):
    """Waits for every step, as a rule on the loss may."""

    def __init__(self, folder):
        super().__init__(folder)
        self.readings = []

    def verdict(self, facts):
        self.readings.append(facts.read())
        return super().verdict(facts)


def test_every_rank_reads_what_is_logged(fork_ranks, make_run):
    folder = make_run(dp_shard=2, steps=5)

    def read(rank, ranks):
        policies = []
        run_rank(rank, ranks, folder, make_policy=lambda folder: policies.append(Reader(folder)) or policies[0])
        return [(r.step, (r.loss, r.grad_norm), r.skipped) for r in policies[0].readings]

    results = fork_ranks(read, 2)
    logged = [(step, facts[:2], False) for step, facts in step_facts(folder).items()]
    assert len(logged) == 5 and results == [logged, logged]


@pytest.mark.parametrize("mask", [True, False])
def test_masking_documents_changes_the_losses(fork_ranks, make_run, mask):
    folder = make_run(steps=3, mask_documents=mask)
    fork_ranks(run_rank, 1, folder)
    plain = make_run("plain", steps=3)
    fork_ranks(run_rank, 1, plain)
    assert (step_facts(folder) != step_facts(plain)) == mask


def test_every_line_says_where_the_time_of_its_steps_went(fork_ranks, make_run):
    folder = make_run(dp_shard=2)
    fork_ranks(run_rank, 2, folder)
    lines = {e["step"]: e for e in read_events(folder.events, "progress")}
    waits = {e["step"]: e for e in read_events(folder.events, "waits")}
    assert waits.keys() == lines.keys()
    for step, event in waits.items():
        kinds = [event[kind] for kind in KINDS]
        assert all(0 <= kind["least"] <= kind["mean"] <= kind["most"] for kind in kinds)
        # Clocks that tick at once can only make it more; the rest of a step is what a rank was blocked.
        assert sum(kind["most"] for kind in kinds) > 0.95 * lines[step]["step_seconds"]
        assert {kind["rank"] for kind in kinds} <= {0, 1} and event["computing"]["least"] > 0
    assert all(e["seconds"] > 0 for e in read_events(folder.events, "evaluation"))
    for saved in read_events(folder.events, "checkpoint"):
        assert 0 < saved["verify_seconds"] <= saved["write_seconds"]
        assert saved["snapshot_seconds"] is None  # training waited for the files


def test_wrong_number_of_processes_is_refused(fork_ranks, make_run):
    folder = make_run(dp_shard=4)

    def expect_refusal(rank, ranks):
        with refused("E-WORLD-SIZE"):
            run_rank(rank, ranks, folder)
        return True

    assert fork_ranks(expect_refusal, 2) == [True, True]
