"""The save that is evaluated in the background, and when."""

import pytest
from tests.checkpoints import write_checkpoint

from ingot.schema.checkpoint import Health
from ingot.schema.evaluate import BackgroundEvaluation
from ingot.trainer.background_eval import due as module
from ingot.trainer.background_eval.due import BestCheckpoint, DueEvaluation, is_better, value_of
from ingot.trainer.checkpoint.manifest import read_manifest

HOUR = 3600.0
START = {"kind": "run_started", "time": 1000.0, "from_step": 0}


def saved(step, kind="weights_saved"):
    return {"kind": kind, "step": step, "time": 1000.0}


def ended(step, time, seconds=100.0, reason=""):
    return {"kind": "background_evaluation", "step": step, "time": time, "seconds": seconds, "reason": reason}


def state(*events, **settings):
    due = DueEvaluation(BackgroundEvaluation(**settings))
    for event in events:
        due.take(event)
    return due


def test_the_first_is_an_interval_after_the_run_began_also_in_a_later_launcher():
    again = {"kind": "run_started", "time": 4000.0, "from_step": 10}
    due = state(START, saved(10), again, saved(20))
    assert due.due(1000 + HOUR - 1) == []
    assert due.due(1000 + HOUR) == [20, 10]
    assert state(saved(20)).due(1e9) == []  # no run has begun


def test_the_next_is_an_interval_after_the_last_one_began_and_of_another_save():
    due = state(START, saved(10), ended(10, time=5000.0, seconds=100.0))
    assert due.due(1e9) == []
    due.take(saved(20))
    assert due.due(4900 + HOUR - 1) == [] and due.due(4900 + HOUR) == [20]
    failed = state(START, saved(10), ended(10, time=5000.0, reason="it was killed"))
    assert failed.due(1e9) == []  # the next save, not the same again


def test_an_interval_in_steps():
    due = state(START, saved(30), ended(30, time=1001.0), saved(60), saved(70), every="40 steps")
    assert due.due(1001.0) == [70]
    assert state(START, saved(30), every="").due(1e9) == []


def test_the_time_between_two_evaluations():
    assert state(START, saved(10)).interval_seconds(10) == HOUR
    due = state(START | {"time": 400.0}, saved(30), every="40 steps")
    assert due.interval_seconds(30) == 600 and due.interval_seconds(99) == 0
    due.take(ended(30, time=970.0, seconds=20.0))
    assert due.interval_seconds(30) == 50


@pytest.mark.parametrize("back", [{"kind": "rolled_back", "to_step": 15}, START | {"from_step": 15}])
def test_saves_of_steps_that_the_run_went_back_from_are_void(back):
    due = state(START, saved(10), saved(20), ended(20, time=1000.0), back, every="1 step")
    assert due.saved_at(20) is None and due.saved_at(10) is not None
    assert due.due(1e9) == []  # 10 is older than the newest one that was evaluated and holds: none
    due.take(saved(18))
    assert due.due(1e9) == [18]


def test_with_a_best_checkpoint_only_full_saves_count():
    due = state(START, saved(10, "checkpoint"), saved(20), keep_best="bpb")
    assert due.due(1e9) == [10]


def test_the_best_value_of_a_void_step_does_not_count_but_its_pin_is_known():
    best = {"kind": "best_checkpoint", "step": 20, "metric": "bpb", "value": 1.0, "pinned": True, "unpinned": None}
    due = state(START, best, keep_best="bpb")
    assert (due.best, due.ours) == ((20, 1.0), {20})
    due.take({"kind": "rolled_back", "to_step": 15})
    assert (due.best, due.ours) == (None, {20})
    due.take(best | {"step": 18, "unpinned": [20]})
    assert (due.best, due.ours) == ((18, 1.0), {18})
    assert state(START, best | {"pinned": False}, keep_best="bpb").ours == set()
    assert state(START, best | {"metric": "a/acc"}, keep_best="bpb").best is None


def test_an_intent_to_pin_is_known_until_the_pin_is_set_or_cannot_be():
    intent = ended(20, time=5000.0) | {"best": {"metric": "bpb", "value": 1.0, "pinned": True}}
    done = {"kind": "best_checkpoint", "step": 20, "metric": "bpb", "value": 1.0, "pinned": True, "unpinned": []}
    due = state(START, saved(20, "checkpoint"), intent, keep_best="bpb")
    assert due.wanted == BestCheckpoint(step=20, metric="bpb", value=1.0, pinned=True)
    assert (due.best, due.ours) == ((20, 1.0), {20})
    due.take(done | {"pinned": False, "reason": "it is gone"})
    assert (due.wanted, due.best, due.ours) == (None, None, set())
    due.take(intent)
    due.take(done)
    assert (due.wanted, due.best, due.ours) == (None, (20, 1.0), {20})
    for step in (30, 40):
        due.take(intent | {"step": step})
    assert due.wanted.step == 40 and due.ours == {20, 30, 40}


def test_saves_that_cannot_be_used_are_read_once_until_the_folder_changes(make_run, monkeypatch):
    folder, reads = make_run(), []
    start = [START, saved(5, "checkpoint"), saved(10, "checkpoint")]
    due = state(*start, every="1 step")
    for step in (5, 10):
        write_checkpoint(folder, step)
        (folder.checkpoint(step) / "manifest.json").write_text("{}")
    monkeypatch.setattr(module, "read_manifest", lambda path: reads.append(path.name) or read_manifest(path))
    assert [due.find(folder, 1e9) for _ in range(3)] == [None] * 3
    assert len(reads) == 2 and [one.step for one in due.unusable] == [10, 5]
    due.unusable.clear()
    write_checkpoint(folder, 15)  # not logged yet
    assert due.find(folder, 1e9) is None and len(reads) == 4 and due.unusable == []
    skipped = {"kind": "evaluation_skipped", "step": 10, "code": "E-CKPT-MANIFEST-HASH"}
    later = state(*start, skipped, every="1 step")  # of a later launcher
    assert later.find(folder, 1e9) is None and [one.step for one in later.unusable] == [5]


def test_a_save_that_is_unfinished_or_in_doubt_is_passed_over(tmp_path, make_run):
    folder = make_run()
    due = state(START, *(saved(step, "checkpoint") for step in (5, 10, 15, 20)), every="1 step")
    for step in (5, 10):
        write_checkpoint(folder, step)
    write_checkpoint(folder, 15, health=Health(state="suspect", reason="a sudden rise", by="guard"))
    assert due.find(folder, 1e9) == (10, "full", folder.checkpoint(10))
    next(folder.checkpoint(10).glob("*.safetensors")).write_bytes(b"")
    assert due.find(folder, 1e9) == (5, "full", folder.checkpoint(5))


def test_the_value_of_a_metric_and_its_direction():
    tasks = {"scores": {"a": {"acc": 0.5, "ppl": 3.0}}, "lower_is_better": ["a/ppl"]}
    assert value_of("bpb", {"bpb": 1.5}, tasks) == (1.5, True)
    assert value_of("a/acc", None, tasks) == (0.5, False)
    assert value_of("a/ppl", None, tasks) == (3.0, True)
    assert value_of("bpb", None, tasks) is value_of("b/acc", None, tasks) is value_of("a/acc", {"bpb": 1}, None) is None
    assert is_better(1.0, 2.0, lower=True) and not is_better(1.0, 2.0, lower=False)
    assert not is_better(2.0, 2.0, lower=True) and not is_better(float("nan"), 2.0, lower=True)
