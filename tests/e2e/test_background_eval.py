"""Evaluation in the background of a real `ingot train`: the same losses, the scores of the ranks, samples and tasks at
their steps, the best checkpoint pinned, no process left."""

import importlib.util
import json
import os
import signal
import time

import pytest
from tests.unit.trainer.background_eval.tiny_task import write_task
from tests.unit.trainer.conftest import documents, write_tokens

from ingot.events import read_events
from ingot.machine.processes import identity_of, is_gone
from ingot.schema import events
from ingot.tokenizer.byte_bpe import train_bpe
from ingot.tokenizer.encoder import load_encoder

from .conftest import RUN_FILE, Project, _processes, ended, paused

pytestmark = pytest.mark.slow
PROCESS = b"ingot.trainer.background_eval.process"
PROMPTS = ["Stone", "Molten iron"]
VOCAB = 300
OPTIONS = (
    "train.steps=200",
    "checkpoint.every_steps=10",
    "evaluate.every_steps=10",
    f"evaluate.prompts={json.dumps(PROMPTS)}",
    "evaluate.sample_tokens=8",
    # Ranks are paused while an evaluation runs, which takes minutes on a busy machine: nothing may kill them.
    "launch.watchdog_seconds=900",
    "evaluate.background.nice=0",
)


WORDS = [word for option in OPTIONS for word in ("--set", option)]
EVERY = ("--set", "evaluate.background.every=10 steps")
TASK = ('evaluate.background.tasks=["nats"]', "evaluate.background.task_folder=tasks")
NO_TASKS = importlib.util.find_spec("lm_eval") is None


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    root = tmp_path_factory.mktemp("evaluated")
    texts = documents(300, 1)
    encoder = load_encoder(train_bpe(texts, VOCAB, root / "tokenizer.json"))
    write_tokens(root / "tokens", encoder, {"metal": texts}, "train")
    write_tokens(root / "heldout", encoder, {"metal": documents(20, 2)}, "heldout")
    (root / "tasks").mkdir()
    write_task(root / "tasks")
    text = RUN_FILE
    for before, after in {
        "vocab_size = 64": f"vocab_size = {VOCAB}",
        'tokens = "tokens"': 'tokens = "tokens"\nheldout = "heldout"\ntokenizer = "tokenizer.json"',
    }.items():
        assert before in text
        text = text.replace(before, after)
    (root / "run.toml").write_text(text)
    return Project(root)


def evaluated(project: Project, out: str, count: int, process, seconds: float = 600) -> list[dict]:
    """The events of the evaluations that have ended, once there are `count`; the run must not end before."""
    deadline = time.monotonic() + seconds
    while len(found := list(read_events(project.folder(out).events, events.BACKGROUND_EVALUATION))) < count:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return found


def one_process(project: Project, out: str, seconds: float = 300) -> int:
    deadline = time.monotonic() + seconds
    while not (found := _processes(project.folder(out), PROCESS)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


def pins_set(project: Project, out: str, count: int, process, seconds: float = 60) -> None:
    """Wait until the best checkpoint was pinned `count` times."""
    deadline = time.monotonic() + seconds
    while len(list(read_events(project.folder(out).events, events.BEST_CHECKPOINT))) < count:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def logged(project: Project, out: str, kind: str, step: int, *, background: bool = True) -> list[dict]:
    """The events of a kind at a step, of the process or of the ranks."""
    log = read_events(project.folder(out).events, kind)
    return [event for event in log if event["step"] == step and bool(event.get("background")) == background]


@pytest.mark.parametrize(
    "tasks",
    [
        pytest.param((), id="text"),
        pytest.param(
            TASK,
            id="task",
            marks=[pytest.mark.nightly, pytest.mark.skipif(NO_TASKS, reason="pip install 'ingot[eval]'")],
        ),
    ],
)
def test_a_run_is_evaluated_whatever_happens_to_the_process_and_trains_as_without_it(project: Project, tasks):
    if not project.folder("alone").events.exists():
        project.train("alone", *WORDS, "--set", "evaluate.background.every=")
    assert not list(read_events(project.folder("alone").events, events.BACKGROUND_EVALUATION))

    out, metric = ("tasked", "nats/perplexity") if tasks else ("watched", "bpb")
    settings = [word for option in (*tasks, f"evaluate.background.keep_best={metric}") for word in ("--set", option)]
    run = project.start(out, *WORDS, *EVERY, *settings, HF_DATASETS_CACHE=str(project.root / "cache"))
    killed = one_process(project, out)
    with paused(project.folder(out)):
        os.kill(killed, signal.SIGKILL)
        (first,) = evaluated(project, out, 1, run)
    assert "was killed (signal 9)" in first["reason"]
    found = [first]
    for number in (2, 3):
        project.wait_for_step(out, found[-1]["step"] + 10, run, seconds=300)
        one_process(project, out)
        with paused(project.folder(out)):
            found = evaluated(project, out, number, run)
            pins_set(project, out, sum(one["best"] is not None for one in found), run)
    output = ended(run, 0)
    scored = [one["step"] for one in found[1:]]
    assert [one["reason"] for one in found[1:]] == ["", ""] and first["step"] < scored[0] < scored[1]
    assert f"evaluation of step {first['step']} failed: its process was killed" in output
    values = {}
    for step in scored:
        (own,), (in_loop,) = (logged(project, out, events.EVALUATION, step, background=b) for b in (True, False))
        assert own["tokens"] == in_loop["tokens"] and own["bpb"] == pytest.approx(in_loop["bpb"], rel=1e-6)
        samples = logged(project, out, events.SAMPLE, step)
        assert [one["prompt"] for one in samples] == PROMPTS and all(one["text"] for one in samples)
        values[step] = own["bpb"]
        if tasks:
            (scores,) = logged(project, out, events.TASK_SCORES, step)
            values[step] = scores["scores"]["nats"]["perplexity"]
            assert scores["lower_is_better"] == [metric] and scores["examples"] == {"nats": 3}
    assert not logged(project, out, events.EVALUATION, first["step"])
    best = min(values, key=lambda step: values[step])
    newest = list(read_events(project.folder(out).events, events.BEST_CHECKPOINT))[-1]
    assert (newest["step"], newest["metric"], newest["value"]) == (best, metric, values[best])
    saves = json.loads(project.ingot("ckpt", "ls", str(project.folder(out).root), "--json"))["checkpoints"]
    assert [save["step"] for save in saves if save["pinned"]] == [best]
    assert project.facts(out) == project.facts("alone")
    assert _processes(project.folder(out), PROCESS) == []


def test_a_launcher_that_is_killed_leaves_no_evaluation(project: Project):
    run = project.start("orphaned", *WORDS, *EVERY)
    process = identity_of(one_process(project, "orphaned"))
    run.send_signal(signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 20
    while not is_gone(process):
        assert time.monotonic() < deadline
        time.sleep(0.02)
