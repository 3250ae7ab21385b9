"""Evaluation in the background of a real `ingot train`: the same losses, the scores of the ranks, no process left."""

import os
import signal
import time

import pytest

from ingot.events import read_events
from ingot.machine.processes import identity_of, is_gone
from ingot.schema import events

from .conftest import Project, _processes, ended, paused, write_tokens

pytestmark = pytest.mark.slow
PROCESS = b"ingot.trainer.background_eval.process"
OPTIONS = (
    "data.heldout=heldout",
    "checkpoint.weights_every=10 steps",
    "evaluate.every_steps=10",
    # Ranks are paused while an evaluation runs, which takes minutes on a busy machine: nothing may kill them.
    "launch.watchdog_seconds=900",
    "evaluate.background.nice=0",
)


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


def test_a_run_is_evaluated_whatever_happens_to_the_process_and_trains_as_without_it(project: Project):
    write_tokens(project.root / "heldout", 3000)
    words = [word for option in OPTIONS for word in ("--set", option)]
    project.train("alone", *words, "--set", "evaluate.background.every=")
    assert not list(read_events(project.folder("alone").events, events.BACKGROUND_EVALUATION))

    run = project.start("watched", *words, "--set", "evaluate.background.every=10 steps")
    killed = one_process(project, "watched")
    with paused(project.folder("watched")):
        os.kill(killed, signal.SIGKILL)
        (first,) = evaluated(project, "watched", 1, run)
    assert "was killed (signal 9)" in first["reason"]
    project.wait_for_step("watched", first["step"] + 10, run, seconds=300)
    one_process(project, "watched")
    with paused(project.folder("watched")):
        second = evaluated(project, "watched", 2, run)[1]
    output = ended(run, 0)
    assert second["reason"] == "" and second["step"] > first["step"]
    assert f"evaluation of step {first['step']} failed: its process was killed" in output
    log = list(read_events(project.folder("watched").events, events.EVALUATION))
    (found,) = [event for event in log if event.get("background") and event["step"] == second["step"]]
    (in_loop,) = [event for event in log if not event.get("background") and event["step"] == second["step"]]
    assert found["tokens"] == in_loop["tokens"] and found["bpb"] == pytest.approx(in_loop["bpb"], rel=1e-6)
    assert project.facts("watched") == project.facts("alone")
    assert _processes(project.folder("watched"), PROCESS) == []


def test_a_launcher_that_is_killed_leaves_no_evaluation(project: Project):
    if not (project.root / "heldout").exists():
        write_tokens(project.root / "heldout", 3000)
    words = [word for option in OPTIONS for word in ("--set", option)]
    run = project.start("orphaned", *words, "--set", "evaluate.background.every=10 steps")
    process = identity_of(one_process(project, "orphaned"))
    run.send_signal(signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 20
    while not is_gone(process):
        assert time.monotonic() < deadline
        time.sleep(0.02)
