"""Real `ingot train` processes whose learning rate is too high: what the guard does, and what follows a command."""

import os
import signal

import pytest

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.guard_record import AGAIN, EARLIER, FAILED, LOWER, PASS, STOP, read_measures
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.manifest import read_manifest
from ingot.trainer.optim.schedule import learning_rate

from .conftest import Project, workers_of

EARLY = ("parallel.dp_shard=1", "guard.settle_steps=8", "guard.window=16", "guard.ready=8", "guard.lr_steps=40")


def options(*settings: str) -> list[str]:
    return [option for one in settings for option in ("--set", one)]


SPOILS = '''"""An update with a learning rate that is far too high, in the step that SPOIL names."""

import os

from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback
from ingot.trainer.optim.optimizer import Optimizer


class Spoil(StepCallback):
    def __init__(self, run, options):
        update, self.due = Optimizer.step, False

        def planted(optimizer, lr, **settings):
            update(optimizer, 3e4 * lr if self.due else lr, **settings)

        Optimizer.step = planted

    def on_gradients(self, step):
        self.due = step == int(os.environ.get("SPOIL", "0"))


CALLBACKS.register(CallbackPart(name="spoil", make=Spoil))
'''


@pytest.mark.slow
def test_the_checkpoint_that_a_start_takes(project: Project) -> None:
    """After a stop and after a kill the newest one, however young it is; after an end because of the numbers the newest
    that had enough steps before that, and a line has the reason."""
    root = project.root / "choice"
    root.mkdir()
    (root / "spoils.py").write_text(SPOILS)
    text = project.run_file.read_text().replace('"tokens"', '"../tokens"').replace("dp_shard = 2", "dp_shard = 1")
    plugin = (
        '[plugins]\nmodules = ["spoils"]\nfolder = "."\n[callbacks.spoil]\n[guard]\npreset = "off"\nhash_every = 0\n'
    )
    (root / "run.toml").write_text(text + plugin)
    own = Project(root)
    own.train("run", "--until-step", "30", code=10)
    folder, run = own.folder("run"), str(own.folder("run").root)
    assert "young: 0 of the 8 steps" in own.ingot("status", run)
    ended = own.train("run", SPOIL="45", code=93)
    assert "resume    step 30: it is the newest, and in no doubt" in ended and "E-LOSS-EXPLODED" in ended
    assert "young: 0 of the 8 steps" in ended
    (end,) = read_measures(folder.guard)
    assert (end.action, end.first, end.proven_to) == (FAILED, 46, 36)
    listed = own.ingot("ckpt", "ls", run)
    assert "health    proven: 20, 30; unproven: 40" in listed and "step 30: 8 steps" in listed
    again = own.train("run", "--until-step", "61", code=10)
    assert "resume    step 30: it is the newest without doubt; not step 40: only 5 steps of training" in again
    assert "proven: 8 steps and more after it" in again
    process = own.start("run")
    own.wait_for_step("run", 64, process, seconds=240)
    for pid in (*workers_of(folder), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert "resume    step 61: it is the newest, and in no doubt" in own.train("run", "--until-step", "64", code=10)
    assert [e["from_step"] for e in read_events(folder.events, events.RUN_STARTED)] == [0, 30, 30, 61, 61]


FLIPS = '''"""A bit that flips once in a gradient, in the first try of the step that FLIP names."""

import os

from ingot.drill.planted import flip_bit
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback
from ingot.trainer.parallel.apply import ShardedModel


class Flip(StepCallback):
    def __init__(self, run, options):
        reduce, self.step, self.due = ShardedModel.reduce, 0, int(os.environ.get("FLIP", "0"))

        def planted(model):
            reduce(model)
            if self.step + 1 == self.due:
                self.due = 0
                flip_bit(model.shards[0].grad, 5, 30)

        ShardedModel.reduce = planted

    def on_update(self, step):
        self.step = step


CALLBACKS.register(CallbackPart(name="flip", make=Flip))
'''


@pytest.mark.slow
def test_a_bit_that_flips_once_costs_no_update(project: Project) -> None:
    """The step is computed again before its update, with preset "strict": the bits are those of a run without it."""
    root = project.root / "once"
    root.mkdir()
    (root / "flips.py").write_text(FLIPS)
    text = project.run_file.read_text().replace('"tokens"', '"../tokens"')
    (root / "run.toml").write_text(text + '[plugins]\nmodules = ["flips"]\nfolder = "."\n[callbacks.flip]\n')
    own, settings = Project(root), options(*EARLY, 'guard.preset="strict"')
    own.train("plain", *settings, "--until-step", "24", code=10)
    output = own.train("flipped", *settings, "--until-step", "24", code=10, FLIP="22")
    assert "retried   step 22, because of " in output and "the fault was transient" in output
    plain, flipped = own.folder("plain"), own.folder("flipped")
    ((tried,), ()) = (list(read_events(one.events, events.RETRIED)) for one in (flipped, plain))
    assert (tried["step"], tried["healthy"], tried["same"]) == (22, True, False)
    assert own.facts("plain") == own.facts("flipped")
    tensors = [read_manifest(one.checkpoint(24)).tensors for one in (plain, flipped)]
    assert tensors[0] == tensors[1] and not list(read_events(flipped.events, events.SKIPPED))


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
