"""The knowledge of the weights of checkpoints, by the event log and the record of the guard."""

import math
from types import SimpleNamespace

from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.guard import Guard
from ingot.schema.guard_record import FAILED, NO_DOUBT, SUSPECT, UNPROVEN, Doubt, Measure, SanityState, doubt
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.health import good_steps, health_of


def line(log, *steps, bad=(), found=(), skipped=()):
    for step in steps:
        log.write(events.STEP, step=step, loss=math.nan if step in bad else 3.0, grad_norm=1.0, lr=0.1)
    for step in found:
        log.write(events.FINDING, step=step)
    if skipped:
        log.write(events.SKIPPED, steps=list(skipped))
    log.write(events.PROGRESS, step=steps[-1])


def test_good_steps_are_those_with_nothing_to_find(tmp_path):
    folder, log = RunFolder(tmp_path), EventLog(tmp_path / "events.jsonl")
    assert folder.events == tmp_path / "events.jsonl"
    log.write(events.RUN_STARTED, from_step=0)
    line(log, 1, 2, 3)
    line(log, 4, 5, 6, 7, bad=(4,), found=(5,), skipped=(6,))
    log.write(events.STEP, step=8, loss=3.0, grad_norm=1.0, lr=0.1)  # its line was never written
    assert good_steps(folder, [0, 2, 6, 7], 8) == {0: 4, 2: 2, 6: 1, 7: 0}
    assert good_steps(folder, [0], 2) == {0: 2}
    log.write(events.RUN_STARTED, from_step=2)  # a crash says nothing against the steps after the checkpoint of step 2
    assert good_steps(folder, [0, 2, 6], 8) == {0: 4, 2: 2, 6: 0}  # that of step 6 is saved again
    line(log, 3, 4, 5)
    assert good_steps(folder, [0, 2], 8) == {0: 6, 2: 4}
    log.write(events.ROLLED_BACK, to_step=0)
    assert good_steps(folder, [0, 2], 8) == {0: 6, 2: 0}


def health(good, about=NO_DOUBT, **sanity):
    manifest = SimpleNamespace(guard=SimpleNamespace(sanity=SanityState(**sanity)))
    return health_of(manifest, about, good, Guard(proven_steps=8)).text


def test_a_checkpoint_is_young_until_it_is_proven_or_in_doubt():
    assert health(7) == "young: 7 of the 8 good steps after it that prove it"
    assert health(8) == "proven: 8 good steps and more after it"
    assert health(8, step=40, loss=3.25) == "proven: 8 good steps and more after it, held-out text 3.25 at step 40"
    assert health(8, unfit="x").endswith("held-out text is of no use")
    assert health(8, Doubt(SUSPECT, "why")) == "suspect: why" and health(9, Doubt(UNPROVEN, "why")) == "unproven: why"


def test_an_end_because_of_the_numbers_puts_what_is_close_before_it_in_doubt():
    end = Measure(action=FAILED, first=46, last=46, found=("loss exploded",), proven_to=36)
    grades = [doubt([end], step, ()).grade for step in (30, 36, 37, 45, 46)]
    assert grades == [0, 0, UNPROVEN, UNPROVEN, SUSPECT] and "and ended" in doubt([end], 46, ()).reason
    assert doubt([end], 45, [end]) == NO_DOUBT  # saved by a run that knew of it
