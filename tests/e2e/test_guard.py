"""Real `ingot train` processes whose learning rate is too high: what the guard does, and what follows a command."""

import pytest

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.guard_record import AGAIN, EARLIER, LOWER, PASS, STOP, read_measures
from ingot.theory.rules import load_run
from ingot.trainer.optim.schedule import learning_rate

from .conftest import Project

EARLY = ("parallel.dp_shard=1", "guard.settle_steps=8", "guard.window=16", "guard.ready=8", "guard.lr_steps=40")


def options(*settings: str) -> list[str]:
    return [option for one in settings for option in ("--set", one)]


@pytest.mark.slow
def test_an_accepted_rate_that_is_too_high(project: Project) -> None:
    """The run goes back to the step of the change and no further, and lowers the rate of the steps that hurt. The rate
    that its user chooses then holds at once."""
    folder = project.folder("raised")
    project.train("raised", *options(*EARLY, "optim.lr=0.003"), "--until-step", "50", code=10)
    run, accept = str(folder.root), ("--accept-change", "optim.lr")
    stopped = project.ingot("train", run, "--set", "optim.lr=3.0", *accept, code=93)
    measures = read_measures(folder.guard)
    assert [one.action for one in measures] == [AGAIN, PASS, EARLIER, LOWER, STOP]
    assert {event["to_step"] for event in read_events(folder.events, events.ROLLED_BACK)} == {50}
    lower = measures[3]
    assert all(51 <= one.first <= one.last for one in measures) and (lower.first, lower.lr) == (51, 3.0)
    config = load_run(folder.config)
    high = learning_rate(config.train.steps, 3.0, config.schedule)
    newest = {step: lr for step, (*_, lr) in project.facts("raised").items() if step > lower.last}
    assert newest == {step: high(step) * 0.5 for step in newest} and newest
    command = f"ingot train {run} --set optim.lr=0.003 --accept-change optim.lr"
    assert "E-GUARD-STOPPED" in stopped and command in stopped
    output = project.ingot(*command.split()[1:], "--until-step", "70", code=10)
    assert "no longer lowered: 0.5 of the learning rate" in output and "has no effect" not in output
    plain = learning_rate(config.train.steps, 0.003, config.schedule)
    last = {step: lr for step, (*_, lr) in project.facts("raised").items() if lower.last < step <= 70}
    assert last == {step: plain(step) for step in last} and lower.last < 69
    assert "lowered" not in project.ingot("train", run, "--until-step", "71", code=10).replace("no longer lowered", "")


@pytest.mark.slow
def test_a_rate_that_is_too_high_before_the_first_checkpoint(project: Project) -> None:
    """One command takes all measures, and its error names the rate. The command that it prints begins anew."""
    folder = project.folder("hot")
    stopped = project.train("hot", *options(*EARLY, "optim.lr=100.0", 'train.precision="bf16"'), code=93)
    assert [one.action for one in read_measures(folder.guard)] == [AGAIN, PASS, EARLIER, LOWER, STOP]
    assert "lowered: 0.5 of the learning rate" in stopped and "E-GUARD-STOPPED" in stopped
    command = f"ingot train {folder.root} --set optim.lr=10.0 --accept-change optim.lr"
    assert command in stopped and f"ingot explain nan {folder.root}" in stopped
    output = project.ingot(*command.replace("=10.0", "=0.003").split()[1:], "--until-step", "20", code=10)
    assert "has no effect" not in output and "begins anew with optim.lr = 0.003" in output
    config = load_run(folder.config)
    plain = learning_rate(config.train.steps, 0.003, config.schedule)
    rates = {step: lr for step, (*_, lr) in project.facts("hot").items() if step <= 20}
    assert rates == {step: plain(step) for step in range(1, 21)} and not read_measures(folder.guard)
