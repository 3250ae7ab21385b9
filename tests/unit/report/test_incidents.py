"""Faults and recoveries are read from the order of events, however many there are."""

import pytest

from ingot.report.facts import Facts, gather, read_run_events
from ingot.schema.run_folder import RunFolder


def read(folder, logs, events) -> Facts:
    facts = Facts(folder=RunFolder(logs.write_events(folder, events)))
    read_run_events(facts)
    return facts


def test_a_drilled_kill_is_measured(tmp_path, logs):
    (incident,) = read(tmp_path, logs, logs.drilled_events()).incidents
    assert (incident.rank, incident.cause) == (1, "was killed (SIGKILL)")
    assert incident.detect_seconds == pytest.approx(0.21)
    assert incident.recover_seconds == pytest.approx(4.41)
    assert (incident.resumed_from, incident.redone_steps) == (logs.RESUMED, logs.KILL - logs.RESUMED)
    assert (incident.compared_steps, incident.compared_equal) == (30, True)


def test_without_a_drill_there_is_no_time_of_detection(tmp_path, logs):
    events = [e for e in logs.drilled_events() if e["kind"] != "drill"]
    (incident,) = read(tmp_path, logs, events).incidents
    assert incident.detect_seconds is None
    assert incident.recover_seconds == pytest.approx(4.2)


def test_two_faults_are_two_incidents(tmp_path, logs):
    first, clock = logs.steps_events(1, 30, logs.START)
    second, later = logs.steps_events(21, 60, clock + 5)
    third, _ = logs.steps_events(41, 80, later + 5)
    fault = {"kind": "fault", "rank": 0, "cause": "hung"}
    events = [
        logs.started(logs.START, 0, 0), *first, fault | {"time": clock + 1, "step": 33},
        logs.started(clock + 4, 1, 20), *second, fault | {"time": later + 1, "step": None},
        logs.started(later + 4, 2, 40), *third,
    ]  # fmt: skip
    facts = read(tmp_path, logs, events)
    assert [i.redone_steps for i in facts.incidents] == [13, 20]
    assert [i.compared_steps for i in facts.incidents] == [10, 20]
    assert facts.last_step == 80


def test_time_between_attempts_is_not_training_time(tmp_path, logs):
    first, clock = logs.steps_events(1, 30, logs.START)
    second, end = logs.steps_events(31, 60, clock + 86_400)
    events = [
        logs.started(logs.START, 0, 0), *first, {"kind": "stopped", "time": clock, "step": 30, "reason": "requested"},
        logs.started(clock + 86_400, 0, 30), *second,
    ]  # fmt: skip
    facts = read(tmp_path, logs, events)
    assert facts.active_seconds == pytest.approx((clock - logs.START) + (end - clock - 86_400))
    assert facts.incidents == []


def test_the_last_event_of_a_step_counts(drilled_run, logs):
    facts = gather(drilled_run)
    assert len(facts.steps) == logs.STEPS
    assert facts.steps[logs.RESUMED + 1]["time"] > facts.incidents[0].detected_at
