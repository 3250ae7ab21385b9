"""The fixed batch of held-out text: which checkpoints it doubts, and that a run does not continue from these."""

import math

import numpy as np
import pytest
from tests.unit.trainer.test_loop import run_rank

from ingot.events import read_events
from ingot.schema.checkpoint import Health
from ingot.schema.guard import Guard
from ingot.schema.guard_record import SanityState
from ingot.theory.rules import load_run
from ingot.trainer import loop
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.trainer.guard.sanity import SanityBatch, SanityJudge
from ingot.trainer.heldout import Heldout
from ingot.trainer.optim.schedule import learning_rate

BATCH = SanityBatch("own")


def judged(*losses, every=10):
    """The doubts of saves every 10 steps, as the letter of each: "." none, "s" suspect; and the warnings."""
    judge, marks, warnings = SanityJudge(Guard(sanity_every=every), SanityState(), BATCH), "", []
    for step, loss in enumerate(losses, 1):
        warnings.append(judge.judge(10 * step, loss))
        marks += "s" if judge.health(Health(state="healthy")).state == "suspect" else "."
    return marks, warnings


def test_a_loss_that_rose_makes_checkpoints_suspect_until_it_is_the_level():
    marks, warnings = judged(4.0, 3.0, 3.29, 3.6, 3.9, 3.3)
    assert marks == "...ss." and warnings[3].endswith(
        "is 3.6 at step 40, and was 3.29 at step 30: the checkpoint is suspect"
    )
    marks, warnings = judged(3.0, 5.0, 5.0, 5.1, 5.3)
    assert marks == ".ss.." and warnings[3] == "the loss of held-out text is 5.1 at step 40: this is the level now"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_batch_that_is_bad_itself_judges_nothing(bad):
    marks, warnings = judged(bad, bad, 3.0, 3.1)
    assert marks == "...." and "cannot show" in warnings[0] and "cannot show" in warnings[1] and not warnings[2]
    assert judged(3.0, bad, bad, bad, bad, 3.0, 3.5)[0] == ".ss...s"


def test_a_batch_unlike_the_training_batches_judges_nothing_and_says_so_once():
    judge = SanityJudge(Guard(sanity_every=10), SanityState(), BATCH)
    assert not judge.judge(10, 4.0, 1.8) and "above the 1.9 of the training batches" in judge.judge(20, 4.0, 1.9)
    assert [judge.judge(step, 3.0 + step, 2.0) for step in (30, 40)] == ["", ""] and not judge.reason
    assert judge.state.unfit and not judge.due(41) and judge.due(50)
    kept = SanityJudge(Guard(sanity_every=10), judge.state, BATCH)
    assert kept.judge(50, 99.0, 2.0) == "" and kept.health(Health()) == Health()
    other = SanityJudge(Guard(sanity_every=10), judge.state, SanityBatch("another"))
    assert (other.state.loss, other.state.unfit) == (None, "") and not other.judge(50, 3.0, 2.0)
    # Weights that were harmed raise both losses, and a batch that rose is a doubt first, whatever the other loss is.
    harmed = SanityJudge(Guard(), SanityState(), BATCH)
    assert not harmed.judge(100, 3.0, 2.9)
    assert "the checkpoint is suspect" in harmed.judge(200, 5.5, 2.0) and not harmed.state.unfit
    never = SanityJudge(Guard(sanity_gap=0.0), SanityState(), BATCH)
    assert not any(never.judge(step, 9.0, 1.0) for step in (10, 20))


def test_one_easy_training_batch_does_not_end_the_judgment():
    judge = SanityJudge(Guard(sanity_every=10), SanityState(), BATCH)
    for step, training in ((10, 1.9), (20, 3.9), (30, 1.9), (40, 3.9)):
        assert not judge.judge(step, 4.0, training) and not judge.state.unfit
    assert "the checkpoint is suspect" in judge.judge(50, 4.5, 1.9)  # a doubt first
    assert "the checkpoint is suspect" in judge.judge(60, 4.5, 1.9)


def test_another_limit_takes_back_the_verdict_about_the_batch_but_not_that_it_repeats_itself():
    judge = SanityJudge(Guard(sanity_every=10), SanityState(), BATCH)
    assert not judge.judge(10, 4.0, 1.9) and judge.judge(20, 4.0, 1.9)
    for gap, loss, warns in ((0.0, 4.0, True), (5.0, 4.0, True), (2.0, None, False)):
        again = SanityJudge(Guard(sanity_every=10, sanity_gap=gap), judge.state, BATCH)
        assert not again.judge(30, 4.0, 1.9) and again.state.loss == loss
        assert bool(again.judge(40, 9.0, 7.5)) is warns
    repeats = SanityJudge(Guard(), SanityState(), SanityBatch("own", repeated=0.9))
    assert repeats.judge(10, 4.0, 4.0) and not repeats.state.unfit_gap
    assert SanityJudge(Guard(sanity_gap=0.0), repeats.state, SanityBatch("own", repeated=0.9)).state.unfit


@pytest.mark.parametrize("bad", ["repeated", "unlike"])
def test_a_run_with_a_bad_batch_says_so_and_marks_nothing(bad, fork_ranks, make_run, monkeypatch):
    """Held-out text that is one row again and again, or tokens that no training batch has: its loss rises with what is
    learned."""
    prepare = Heldout.prepare

    def spoiled(texts, unigram, **settings):
        found = prepare(texts, unigram, **settings)
        rows = found.rows.targets
        if bad == "repeated":
            rows[:] = rows[0]
            found.rows.counted[:] = True
        else:
            rows[:] = np.random.default_rng(1).permutation(rows.max() + 1)[-8:][rows % 8]
        return found

    monkeypatch.setattr(Heldout, "prepare", spoiled)
    folder = make_run(steps=20, every_steps=5, lr=2e-2, guard={"preset": "off", "sanity_every": 5, "sanity_gap": 1.0})
    (_, lines), *_ = fork_ranks(lambda rank, world: run_rank(rank, world, folder), 1)
    warnings = [line for line in lines if "held-out text" in line and line.startswith("WARNING")]
    sign = "come again" if bad == "repeated" else "of the training batches"
    assert len(warnings) == 1 and sign in warnings[0], warnings
    assert not any(one.doubt.grade for one in list_checkpoints(folder.checkpoints))


def test_when_the_batch_is_scored():
    judge = SanityJudge(Guard(sanity_every=100), SanityState(), BATCH)
    assert not judge.due(99) and judge.due(100)
    judge.judge(100, 3.0)
    assert not judge.due(199) and judge.due(200)
    judge.judge(200, 4.0)
    assert judge.due(201)  # in doubt, at each save
    judge.restore(SanityState(step=100, loss=3.0))
    assert not judge.due(150) and judge.health(Health()) == Health()


def test_a_run_does_not_continue_from_weights_that_lost_what_they_had_learned(fork_ranks, make_run, monkeypatch):
    """Fifty times the learning rate in step 13, which no guard looks at: the checkpoint of step 15 is suspect."""
    run = {"steps": 20, "lr": 2e-2, "guard": {"preset": "off", "sanity_every": 5}}
    folder, one = make_run("two", dp_shard=2, **run), make_run("one", **run)
    plain = learning_rate(20, 2e-2, load_run(folder.config).schedule)
    monkeypatch.setattr(loop, "learning_rate", lambda *_: lambda step: plain(step) * (50 if step == 13 else 1))
    for each, ranks in ((folder, 2), (one, 1)):
        results = fork_ranks(lambda rank, world, each=each: run_rank(rank, world, each, 15), ranks)
        assert any("the checkpoint is suspect" in line for line in results[0][1])
        newest, older = list_checkpoints(each.checkpoints)[:2]
        assert newest.step == 15 and "held-out text" in newest.doubt.reason and not older.doubt.grade
        assert newest.manifest.guard.sanity.doubted == 1 and newest.manifest.guard.sanity.step == 10
    losses = [[e["loss"] for e in read_events(each.events, "sanity")] for each in (folder, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == 3
    fork_ranks(lambda rank, world: run_rank(rank, world, folder, 15), 2)
    monkeypatch.setattr(loop, "learning_rate", lambda *_: plain)
    fork_ranks(lambda rank, world: run_rank(rank, world, folder), 2)
    assert [e["from_step"] for e in read_events(folder.events, "run_started")] == [0, 10, 10]
    assert [e["suspect"] for e in read_events(folder.events, "sanity")] == [False, False, True, True, False, False]
