"""Evaluations in the background as the launcher sees them. Their process is a script here that answers or fails."""

import json
import sys
import time
from dataclasses import fields, replace

import pytest
from tests.checkpoints import write_checkpoint

from ingot.config import to_toml
from ingot.errors import MissingPartError
from ingot.events import EventLog, read_events
from ingot.machine.processes import identity_of, is_gone
from ingot.schema import events
from ingot.schema.changes import class_of
from ingot.schema.evaluate import BackgroundEvaluation
from ingot.stores.store import StoreUnreachable
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.pins import pin, pinned_steps
from ingot.trainer.launch import evaluations
from ingot.trainer.launch.evaluations import BackgroundEvaluations, has_work, require_lm_eval

SCORE = {"kind": "evaluation", "bpb": 1.5, "unigram_bpb": 2.0}
DONE = {"reason": ""}


class Launcher:
    """A launcher whose run saves steps; `scripts` has what the process of each save does."""

    def __init__(self, folder, monkeypatch, **settings):
        self.folder, self.lines, self.scripts, self.limits = folder, [], {}, []
        config = load_run(folder.config)
        background = BackgroundEvaluation(**{"every": "1 step", **settings})
        self.config = replace(config, evaluate=replace(config.evaluate, background=background))
        folder.config.write_text(to_toml(self.config))
        monkeypatch.setattr(evaluations, "_LOOK_SECONDS", 0.01)
        monkeypatch.setattr(evaluations, "_POLL_SECONDS", 0.02)
        monkeypatch.setattr(evaluations, "_command", self._command)
        self.log = EventLog(folder.events)
        self.log.write(events.RUN_STARTED, from_step=0)
        self.watch = BackgroundEvaluations(folder, self.config, ranks=1, say=self.lines.append)

    def _command(self, run, save, ranks, tokens, seconds):
        self.limits.append((tokens, seconds))
        return [sys.executable, "-S", "-c", self.scripts[int(save.name[5:])]]

    def save(self, step, script):
        self.scripts[step] = script
        write_checkpoint(self.folder, step)
        self.log.write(events.CHECKPOINT, step=step)

    def ended(self, count=1):
        """The events of the evaluations that have ended, once there are so many."""
        deadline = time.monotonic() + 30
        while len(found := list(read_events(self.folder.events, events.BACKGROUND_EVALUATION))) < count:
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.01)
        return found


@pytest.fixture
def launch(make_run, monkeypatch):
    made = []

    def make(**settings):
        made.append(Launcher(make_run(), monkeypatch, **settings))
        return made[-1]

    yield make
    for one in made:
        one.watch.close()
        one.log.close()


def answers(*lines):
    return f"print({chr(10).join(map(json.dumps, lines))!r})"


def test_results_are_logged_at_the_step_of_the_save(launch):
    job = launch()
    sample = {"kind": "sample", "prompt": "a", "text": "b"}
    job.save(5, answers(SCORE, sample, DONE))
    (ended,) = job.ended()
    assert (ended["step"], ended["what"], ended["reason"]) == (5, "full", "")
    (found,) = read_events(job.folder.events, events.EVALUATION)
    assert found.pop("time") and found == SCORE | {"step": 5, "background": True}
    assert next(read_events(job.folder.events, events.SAMPLE))["step"] == 5
    assert job.lines == ["held-out  step 5, in the background: bpb 1.500  unigram 2.000"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import os; os._exit(3)", "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed (signal 9)"),
        ("import time; time.sleep(600)", "not done after 2 s"),
        (answers({"reason": "ValueError: x"}), "ValueError: x"),
        ("print('{torn')", "exited with code 0"),
    ],
)
def test_a_process_that_fails_costs_its_results_and_the_next_save_is_evaluated(launch, script, reason):
    job = launch(seconds=2.0 if "sleep" in script else 60.0)
    job.save(5, f"print({json.dumps(SCORE)!r}, flush=True); {script}")
    (failed,) = job.ended()
    assert failed["step"] == 5 and reason in failed["reason"]
    assert [e["step"] for e in read_events(job.folder.events, events.EVALUATION)] == [5]  # what it had printed
    while not any(line.startswith("evaluation of step 5 failed: ") and reason in line for line in job.lines):
        time.sleep(0.01)  # the line comes after the event
    job.save(6, answers(DONE) if "sleep" not in script else script)
    assert job.ended(2)[1]["step"] == 6


def test_a_late_process_ends_with_all_that_it_started(launch, tmp_path):
    job, mark = launch(seconds=1.5), tmp_path / "pids"
    child = "import subprocess, os, time; c = subprocess.Popen(['sleep', '600'])"
    write = f"open({str(mark)!r}, 'w').write(f'{{os.getpid()}} {{c.pid}}')"
    job.save(5, f"{child}; {write}; time.sleep(600)")
    while not (mark.exists() and mark.read_text()):
        time.sleep(0.01)
    alive = [identity_of(int(pid)) for pid in mark.read_text().split()]
    job.ended()
    deadline = time.monotonic() + 10
    while not all(map(is_gone, alive)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_save_that_was_removed_while_it_was_read_is_replaced_by_the_newest(launch):
    job = launch()
    job.scripts[6] = answers(SCORE, DONE)
    write_checkpoint(job.folder, 6)
    path = str(job.folder.checkpoint(5))
    saved = json.dumps({"kind": "checkpoint", "time": 1, "step": 6})
    log = f"open({str(job.folder.events)!r}, 'a').write({saved!r} + chr(10))"
    job.save(5, f"import shutil; shutil.rmtree({path!r}); {log}; {answers({'gone': True})}")
    (ended,) = job.ended()
    assert (ended["step"], ended["reason"]) == (6, "")


@pytest.mark.parametrize("again", [False, True], ids=["", "the step is saved again"])
def test_results_of_a_step_that_the_run_went_back_from_are_not_logged(launch, again):
    job = launch()
    lines = [{"kind": "rolled_back", "time": 1, "from_step": 6, "to_step": 4}]
    lines += [{"kind": "checkpoint", "time": time.time() + 1, "step": 5}] * again
    text = "".join(json.dumps(line) + "\n" for line in lines)
    job.save(5, f"open({str(job.folder.events)!r}, 'a').write({text!r}); {answers(SCORE, DONE)}")
    ended = job.ended()[0]
    assert ended["void"] and ended["reason"] == "the run went back to a step before it"
    assert list(read_events(job.folder.events, events.EVALUATION)) == []


def test_the_end_of_the_job_ends_an_evaluation_at_once_and_it_is_due_again(launch, tmp_path):
    job, mark = launch(), tmp_path / "pid"
    job.save(5, f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    while not (mark.exists() and mark.read_text()):
        time.sleep(0.01)
    process = identity_of(int(mark.read_text()))
    job.watch.close()
    assert is_gone(process)
    assert list(read_events(job.folder.events, events.BACKGROUND_EVALUATION)) == []


def test_what_a_process_started_ends_as_soon_as_the_process_has_ended(launch, tmp_path):
    job, mark = launch(seconds=600.0), tmp_path / "pid"
    child = "import subprocess; c = subprocess.Popen(['sleep', '600'])"  # it keeps standard output open
    job.save(5, f"{child}; open({str(mark)!r}, 'w').write(str(c.pid)); {answers(SCORE, DONE)}")
    assert job.ended()[0]["reason"] == ""
    deadline = time.monotonic() + 10
    while not is_gone(identity_of(int(mark.read_text()))):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("failures", "reason"), [(1, ""), (3, "it failed 3 times: OSError: [Errno 12] no memory")])
def test_a_process_that_does_not_start_is_tried_again_but_not_for_ever(launch, monkeypatch, failures, reason):
    monkeypatch.setattr(evaluations, "_PAUSE_SECONDS", 0.01)
    tried, evaluate = [], BackgroundEvaluations._evaluate

    def start(self, path, step):
        tried.append(path)
        if len(tried) <= failures:
            raise OSError(12, "no memory")
        return evaluate(self, path, step)

    monkeypatch.setattr(BackgroundEvaluations, "_evaluate", start)
    job = launch()
    job.save(5, answers(SCORE, DONE))
    assert [one["reason"] for one in job.ended()] == [reason]
    assert "failed: OSError: [Errno 12] no memory; trying again" in job.lines[0]
    job.save(6, answers(DONE))
    assert [one["step"] for one in job.ended(2)] == [5, 6]


@pytest.mark.parametrize("part", ["pinned_steps", "grade_of_doubt"])
def test_a_folder_that_does_not_answer_throws_no_result_away(launch, monkeypatch, tmp_path, part):
    monkeypatch.setattr(evaluations, "_PAUSE_SECONDS", 0.01)
    plain, calls, mark = getattr(evaluations, part), [], tmp_path / "runs"

    def answers_late(*args):
        calls.append(args)
        if len(calls) <= 4:
            raise OSError(5, "Input/output error")
        return plain(*args)

    monkeypatch.setattr(evaluations, part, answers_late)
    job = launch(keep_best="bpb")
    job.save(5, f"open({str(mark)!r}, 'a').write('x'); {answers(SCORE, DONE)}")
    assert [one["reason"] for one in job.ended()] == [""] and mark.read_text() == "x"
    assert best_of(job, 1) == [(5, True, [])]
    assert len([line for line in job.lines if "Input/output error" in line]) == 1


def test_answers_that_cannot_be_understood_are_not_tried_for_ever(launch, monkeypatch):
    monkeypatch.setattr(evaluations, "_PAUSE_SECONDS", 0.01)
    job = launch()
    job.save(5, answers({"bpb": 1.0}, DONE))
    assert "KeyError" in job.ended()[0]["reason"]
    job.save(6, answers(SCORE, DONE))
    assert [(one["step"], one["reason"]) for one in job.ended(2)][1] == (6, "")


def test_a_full_disk_repeats_no_evaluation_and_doubles_no_event(launch, monkeypatch, tmp_path):
    monkeypatch.setattr(evaluations, "_PAUSE_SECONDS", 0.01)
    written = []

    class FullDisk(EventLog):
        def write(self, kind, **facts):
            written.append(kind)
            if 1 < len(written) < 5:
                raise OSError(28, "No space left on device")
            super().write(kind, **facts)

    monkeypatch.setattr(evaluations, "EventLog", FullDisk)
    job, mark = launch(), tmp_path / "runs"
    job.save(5, f"open({str(mark)!r}, 'a').write('x'); {answers(SCORE, {'kind': 'sample', 'prompt': 'a'}, DONE)}")
    job.ended()
    kinds = [event["kind"] for event in read_events(job.folder.events) if event["kind"] != "run_started"]
    assert kinds == ["checkpoint", "evaluation", "sample", "background_evaluation"]
    assert mark.read_text() == "x" and written[1:5] == ["sample"] * 4
    assert len([line for line in job.lines if "No space left" in line]) == 1


def test_a_save_that_cannot_be_used_is_reported_once_and_the_one_before_it_is_evaluated(launch):
    job = launch()
    write_checkpoint(job.folder, 6)
    (job.folder.checkpoint(6) / "manifest.json").write_text("{}")
    write_checkpoint(job.folder, 5)
    job.scripts[5] = answers(SCORE, DONE)
    job.log.write(events.CHECKPOINT, step=6)
    job.log.write(events.CHECKPOINT, step=5)
    assert job.ended()[0]["step"] == 5
    job.save(7, answers(DONE))
    job.ended(2)
    (skipped,) = read_events(job.folder.events, events.EVALUATION_SKIPPED)
    assert (skipped["step"], skipped["what"], skipped["code"]) == (6, "full", "E-CKPT-MANIFEST-HASH")
    assert len([line for line in job.lines if line.startswith("evaluation of step 6 is left out")]) == 1


def test_the_best_checkpoint_is_pinned_and_the_one_before_it_is_not_any_more(launch):
    job = launch(keep_best="bpb")
    pin(job.folder, 7)
    for number, (step, bpb) in enumerate([(5, 2.0), (6, 1.5), (7, 1.0), (8, 1.2), (9, 0.9)], 1):
        job.save(step, answers(SCORE | {"bpb": bpb}, DONE))
        job.ended(number)
    deadline = time.monotonic() + 10
    while len(best := list(read_events(job.folder.events, events.BEST_CHECKPOINT))) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [(e["step"], e["pinned"], e["unpinned"]) for e in best] == [
        (5, True, []), (6, True, [5]), (7, False, [6]), (9, True, [])
    ]  # fmt: skip
    assert pinned_steps(job.folder) == {7, 9}  # 7 was pinned by a user


def test_how_much_text_is_scored_is_chosen_once_and_again_with_other_settings(launch):
    job = launch(every="1 h")
    most, heldout = job.config.evaluate.max_tokens, job.config.data.heldout
    wanted = {"share": 0.001, "max_tokens": most, "every": "1 h", "heldout": heldout}
    size = {"kind": events.EVALUATION_SIZED, "tokens": 500, "reason": "its share"} | wanted
    job.watch.close()
    for change, tokens in (({}, 500), ({"share": 0.01}, 0), ({"max_tokens": 9}, 0), ({"every": "2 h"}, 0)):
        job.log.write(**size | change)
        job.watch._read_log()
        assert job.watch._tokens() == tokens
    job.log.write(**size)
    for share, expected in ((0.001, 500), (0.002, 0), (0.0, most)):
        background = replace(job.config.evaluate.background, share=share)
        config = replace(job.config, evaluate=replace(job.config.evaluate, background=background))
        other = BackgroundEvaluations(job.folder, config, ranks=1, say=job.lines.append)
        other.close()
        other._read_log()
        assert other._tokens() == expected


def test_what_the_process_chose_is_logged_and_passed_to_the_next_one(launch):
    job = launch(every="1 step", keep_best="bpb")
    most, heldout = job.config.evaluate.max_tokens, job.config.data.heldout
    chosen = {"share": 0.001, "max_tokens": most, "every": "1 step", "heldout": heldout}
    score = SCORE | {"tokens": 400}
    size = {"kind": events.EVALUATION_SIZED, "tokens": 500, "reason": "its share"} | chosen
    job.save(5, answers(size, score | {"bpb": 1.0}, DONE))
    job.ended()
    job.save(6, answers(score | {"bpb": 2.0}, DONE))
    job.ended(2)
    job.save(7, answers(score | {"bpb": 1.5, "tokens": 401}, DONE))  # of other text: not comparable
    job.ended(3)
    assert [tokens for tokens, _ in job.limits] == [0, 500, 500] and all(seconds >= 0 for _, seconds in job.limits)
    (found,) = read_events(job.folder.events, events.EVALUATION_SIZED)
    assert (found["step"], found["tokens"]) == (5, 500)
    assert "held-out  in the background: up to 500 tokens each time (its share)" in job.lines
    assert [step for step, _, _ in best_of(job, 2)] == [5, 7]


def best_of(job, count):
    deadline = time.monotonic() + 30
    while len(found := list(read_events(job.folder.events, events.BEST_CHECKPOINT))) < count:
        assert time.monotonic() < deadline, job.lines
        time.sleep(0.01)
    return [(e["step"], e["pinned"], e["unpinned"]) for e in found]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_launcher_that_is_killed_while_it_pins_leaves_no_pin_for_ever(launch, monkeypatch):
    def killed(root, step):
        pin(job.folder, step)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(evaluations, "pin_checkpoint", killed)
        job = launch(keep_best="bpb")
        job.save(5, answers(SCORE | {"bpb": 2.0}, DONE))
        job.watch._thread.join(30)
    assert pinned_steps(job.folder) == {5} and not list(read_events(job.folder.events, events.BEST_CHECKPOINT))
    job.watch = BackgroundEvaluations(job.folder, job.config, ranks=1, say=job.lines.append)
    assert best_of(job, 1) == [(5, True, [])]
    job.save(6, answers(SCORE | {"bpb": 1.0}, DONE))
    assert best_of(job, 2)[1] == (6, True, [5])
    assert pinned_steps(job.folder) == {6}


def test_a_store_or_disk_that_does_not_answer_delays_the_pins_alone(launch, monkeypatch):
    monkeypatch.setattr(evaluations, "_PAUSE_SECONDS", 0.01)
    failures = [StoreUnreachable("E-STORE-UNREACHABLE", "no answer"), OSError(28, "No space left on device")]
    unpin = evaluations.unpin_checkpoint

    def fails_twice(root, step):
        if failures:
            raise failures.pop(0)
        return unpin(root, step)

    monkeypatch.setattr(evaluations, "unpin_checkpoint", fails_twice)
    job = launch(keep_best="bpb")
    for number, (step, bpb) in enumerate([(5, 2.0), (6, 1.5), (7, 1.7)], 1):
        job.save(step, answers(SCORE | {"bpb": bpb}, DONE))
        job.ended(number)
    assert best_of(job, 2) == [(5, True, []), (6, True, [5])]
    assert pinned_steps(job.folder) == {6} and not failures
    assert any("no answer; trying again" in line for line in job.lines)


def test_a_best_checkpoint_that_is_gone_is_not_pinned_and_the_one_before_it_stays(launch):
    job = launch(keep_best="bpb")
    job.save(5, answers(SCORE | {"bpb": 2.0}, DONE))
    job.ended()
    path = str(job.folder.checkpoint(6))
    job.save(6, f"import shutil; shutil.rmtree({path!r}); {answers(SCORE | {'bpb': 1.0}, DONE)}")
    assert best_of(job, 2) == [(5, True, []), (6, False, [])]
    job.save(7, answers(SCORE | {"bpb": 1.5}, DONE))  # better than 5, which is the best one that is there
    assert best_of(job, 3)[2] == (7, True, [5])
    assert pinned_steps(job.folder) == {7}


def test_the_default_interval_cannot_change_what_a_run_computes():
    """An older run file gets the default at its next start: only settings that change no number may have another one
    than "as before" (schema/changes.py)."""
    assert BackgroundEvaluation().interval is not None
    assert all(class_of(f"evaluate.background.{one.name}").is_free for one in fields(BackgroundEvaluation))


def test_a_run_with_nothing_to_evaluate_starts_nothing(make_run):
    config = load_run(make_run().config)
    none = replace(config, data=replace(config.data, heldout="", tokenizer=""))
    assert has_work(config) and not has_work(none)
    off = replace(config.evaluate, background=BackgroundEvaluation(every=""))
    assert not has_work(replace(config, evaluate=off))
    tasks = replace(config, evaluate=replace(config.evaluate, background=BackgroundEvaluation(tasks=("a",))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluations, "find_spec", lambda name: None)
        require_lm_eval(config)
        with pytest.raises(MissingPartError):
            require_lm_eval(tasks)
