"""The knowledge of the weights of checkpoints, by the event log and the record of the guard."""

import math
from types import SimpleNamespace
from unittest.mock import Mock

from ingot.events import EventLog, _event_of, read_events, read_events_back
from ingot.plugins.callback import StepFinding, StepNumbers
from ingot.schema import events
from ingot.schema.guard import Guard
from ingot.schema.guard_record import (
    FAILED,
    NO_DOUBT,
    SUSPECT,
    UNPROVEN,
    Doubt,
    GuardState,
    Measure,
    SanityState,
    doubt,
)
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.health import RunPosition, health_of, position_of
from ingot.trainer.guard.ladder import Ladder


def line(log, *steps, bad=(), found=(), skipped=()):
    for step in steps:
        log.write(events.STEP, step=step, loss=math.nan if step in bad else 3.0, grad_norm=1.0, lr=0.1)
    for step in found:
        log.write(events.FINDING, step=step)
    if skipped:
        log.write(events.SKIPPED, steps=list(skipped))
    log.write(events.PROGRESS, step=steps[-1])


def health(step, position, about=NO_DOUBT, proven_steps=8, **sanity):
    manifest = SimpleNamespace(step=step, guard=SimpleNamespace(sanity=SanityState(**sanity)))
    return health_of(manifest, about, position, Guard(proven_steps=proven_steps)).text


def test_the_next_trouble_is_after_the_last_line_or_in_the_row_at_its_end(tmp_path):
    folder, log = RunFolder(tmp_path), EventLog(tmp_path / "events.jsonl")
    trouble = []

    def look():
        trouble.append(position_of(folder).trouble)

    look()
    log.write(events.RUN_STARTED, from_step=0)
    line(log, 1, 2, 3, skipped=(2,))
    look()
    line(log, 4, 5, 6, 7, bad=(4,), found=(5,), skipped=(6, 7))
    log.write(events.STEP, step=8, loss=3.0, grad_norm=1.0, lr=0.1)  # its line was never written
    look()
    line(log, 8, skipped=(8,))  # a row that began in the line before
    look()
    log.write(events.RUN_STARTED, from_step=2)
    look()
    line(log, 3, 4, 5)
    look()
    log.write(events.ROLLED_BACK, to_step=0)
    look()
    assert trouble == [1, 4, 6, 6, 3, 6, 1]
    for event in ({"step": int("9" * 400)}, {"step": "9"}, {"step": -4}, {}):
        log.write(events.PROGRESS, **event)
    log.write(events.SKIPPED, steps=7)
    look()
    assert trouble[-1] == 1


def test_steps_that_the_run_went_back_from_prove_nothing(tmp_path):
    folder, log = RunFolder(tmp_path), EventLog(tmp_path / "events.jsonl")
    line(log, *range(21, 29))
    log.write(events.ROLLED_BACK, to_step=20)
    line(log, *range(21, 25), found=range(21, 25))
    assert health(20, position_of(folder)) == "young: 3 of the 8 steps after it that prove it"


def test_a_checkpoint_is_proven_if_the_next_trouble_would_leave_it_without_doubt(tmp_path):
    """The doubt is that of the measures which the guard takes then."""
    for trouble, changed_after in ((109, 0), (110, 0), (110, 104), (110, 109), (3, 0)):
        guard = Guard(proven_steps=8)
        ladder = Ladder(guard, RunFolder(tmp_path), Mock(), [], Mock(), Mock())
        ladder.restore(GuardState(), changed=False, new_window=False, changed_after=changed_after)
        finding = StepFinding(("loss spike",), 9.0, 0.0, 1.0)
        ladder.look([StepNumbers(trouble + i, 9.0, 1.0, skipped=True, finding=finding) for i in range(guard.in_a_row)])
        ladder.verdict()
        for step in range(1, trouble):
            shown = health(step, RunPosition(trouble=trouble, changed_after=changed_after)).startswith("proven")
            assert shown == (doubt(ladder.measures, step, ()) == NO_DOUBT), (trouble, changed_after, step)


def test_only_the_end_of_the_log_is_read(tmp_path, monkeypatch):
    folder, log = RunFolder(tmp_path), EventLog(tmp_path / "events.jsonl")
    for step in range(1, 3000):
        line(log, step)
    read = Mock(side_effect=_event_of)
    monkeypatch.setattr("ingot.events._event_of", read)
    assert position_of(folder).trouble == 3000 and read.call_count < 10
    for block in (7, 100, 64 << 10):
        monkeypatch.setattr("ingot.events._FIRST_BLOCK", block)
        kinds = events.STEP, events.PROGRESS
        assert list(read_events_back(folder.events, *kinds)) == list(read_events(folder.events, *kinds))[::-1]


def test_a_checkpoint_is_young_until_it_is_proven_or_in_doubt():
    at = RunPosition
    assert health(40, at(trouble=49)) == "young: 7 of the 8 steps after it that prove it"
    assert health(40, at(trouble=41)) == "young: 0 of the 8 steps after it that prove it"
    assert health(40, at(trouble=50)) == "proven: 8 steps and more after it"
    assert health(40, at(trouble=50), loss=3.25).endswith(", held-out text 3.25 at step 0")
    assert health(40, at(trouble=50), unfit="x").endswith("held-out text is of no use")
    assert health(40, RunPosition(trouble=44, changed_after=40)) == "proven: an accepted change holds after step 40"
    assert health(40, at(trouble=41), proven_steps=0) == "young: no step followed it yet"
    doubts = Doubt(SUSPECT, "why"), Doubt(UNPROVEN, "why")
    assert [health(40, at(trouble=99), each) for each in doubts] == ["suspect: why", "unproven: why"]


def test_an_end_because_of_the_numbers_puts_what_is_close_before_it_in_doubt():
    end = Measure(action=FAILED, first=46, last=46, found=("loss exploded",), proven_to=36)
    grades = [doubt([end], step, ()).grade for step in (30, 36, 37, 45, 46)]
    assert grades == [0, 0, UNPROVEN, UNPROVEN, SUSPECT] and "and ended" in doubt([end], 46, ()).reason
    assert doubt([end], 45, [end]) == NO_DOUBT  # saved by a run that knew of it
