"""Faults and recoveries are read from the order of events, however many there are."""

import math
import re
import time

import pytest

from ingot.cli.main import main
from ingot.config import to_toml
from ingot.planner.request.presets import load_model
from ingot.planner.show.layout import degrees_text
from ingot.report.cost import cost_rows
from ingot.report.diagnose.evidence import measure
from ingot.report.facts import RunData, gather, read_run_events
from ingot.report.faults import count_ends
from ingot.report.recovery import recovery_section
from ingot.report.render.page import Text
from ingot.report.status import read_status
from ingot.report.write import write_report
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.run_folder import RunFolder
from ingot.trainer.resilience.lock import RunLock
from ingot.watch.chapters import head
from ingot.watch.live import LiveRun


def read(folder, logs, events) -> RunData:
    facts = RunData(folder=RunFolder(logs.write_events(folder, events)))
    read_run_events(facts)
    return facts


def killed(clock: float, step: int) -> dict:
    return {
        "kind": "fault", "time": clock, "rank": 1, "failure": "killed", "cause": "was killed (SIGKILL)", "code": "",
        "step": step, "detected_by": "supervisor", "evidence": "", "seconds": None,
    }  # fmt: skip


def restart(clock: float) -> dict:
    return {"kind": "restart", "time": clock, "attempt": 1, "of": 3, "wait_seconds": 0.0, "kept": 0, "step": 30}


def rank_started(clock: float, attempt: int) -> dict:
    return {"kind": "rank_started", "time": clock, "rank": 0, "pid": 7, "host": "", "attempt": attempt}


def node(clock: float, action: str, host: str, started: float | None = 0.0) -> dict:
    started = float(ord(host[0])) if started == 0.0 else started
    return {"kind": "node", "time": clock, "action": action, "host": host, "pid": 7, "node": 0, "started": started}


def test_a_drilled_kill_is_measured(tmp_path, logs):
    (fault,) = read(tmp_path, logs, logs.drilled_events()).faults
    assert (fault.rank, fault.cause) == (1, "was killed (SIGKILL)")
    assert fault.detect_seconds == pytest.approx(0.21)
    assert fault.recover_seconds == pytest.approx(4.41)
    assert (fault.resumed_from, fault.redone_steps) == (logs.RESUMED, logs.KILL - logs.RESUMED)
    assert (fault.compared_steps, fault.compared_equal) == (30, True)


def test_without_a_drill_there_is_no_time_of_detection(tmp_path, logs):
    events = [e for e in logs.drilled_events() if e["kind"] not in ("drill", "start_times")]
    (fault,) = read(tmp_path, logs, events).faults
    assert fault.detect_seconds is None
    assert fault.recover_seconds == pytest.approx(4.2)


def test_a_recovery_lasts_as_long_as_the_restart_measured(tmp_path, logs):
    """`ingot status` shows the same time (start_times), with the time in which a hang was not seen."""
    events = [e | {"total_seconds": 69.2} if e["kind"] == "start_times" else e for e in logs.drilled_events()]
    (fault,) = read(tmp_path, logs, events).faults
    assert fault.recover_seconds == 69.2
    assert fault.gap_seconds == pytest.approx(4.41)  # what a diagnosis counts: it counts slow first steps apart


def test_a_fault_after_which_a_new_command_continues_is_not_recovered(tmp_path, logs):
    first, clock = logs.steps_events(1, 30, logs.START)
    second, _ = logs.steps_events(21, 60, clock + 400)
    fault = {"kind": "fault", "time": clock + 1, "rank": 0, "cause": "loss 673", "code": "E-LOSS-EXPLODED"}
    events = [logs.started(logs.START, 0, 0), *first, fault, logs.started(clock + 400, 0, 20), *second]
    (found,) = read(tmp_path, logs, events).faults
    assert (found.recovered, found.by_command, found.recover_seconds) == (False, True, None)
    assert (found.paused_seconds, found.redone_steps, found.code) == (pytest.approx(399), 10, "E-LOSS-EXPLODED")
    text = write_report(tmp_path).markdown.read_text()
    assert "The command ended. A new one continued the run" in text and "All ranks started again" not in text
    assert "0 of 1" in text and "1 fault ended the command" in text


def test_a_command_that_was_killed_is_a_fault_that_ended_it(tmp_path, logs):
    first, clock = logs.steps_events(1, 30, logs.START)
    second, end = logs.steps_events(21, 60, clock + 400)
    stop = {"kind": "stopped", "time": end, "step": 60, "reason": "SIGTERM", "saved_step": 60}
    third, _ = logs.steps_events(61, 70, end + 5)
    events = [
        logs.started(logs.START, 0, 0), *first, logs.started(clock + 400, 0, 20), *second, stop,
        logs.started(end + 5, 0, 60), *third,
    ]  # fmt: skip
    (found,) = read(tmp_path, logs, events).faults
    assert (found.rank, found.fault_step, found.resumed_from, found.by_command) == (None, 30, 20, True)
    assert found.detected_at == first[-1]["time"] and "ended without an event" in found.cause


def test_later_starts_do_not_change_the_time_of_a_recovery(tmp_path, logs):
    """Every attempt logs its start_times: also that of the next command, and that after a planned restart."""
    events = [event for event in logs.drilled_events() if event["kind"] not in ("finished", "exported")]
    clock = events[-1]["time"]
    phases = {"detect": None, "kill": None, "wait": None, "import": 77.0}
    times = {"kind": "start_times", "attempt": 0, "total_seconds": 77.0, "seconds": phases}
    planned = {"kind": "planned_restart", "time": clock + 101, "reason": "2 nodes are there", "step": logs.STEPS}
    later = [
        {"kind": "stopped", "time": clock + 1, "step": logs.STEPS, "reason": "SIGTERM", "saved_step": logs.STEPS},
        rank_started(clock + 90, 0), logs.started(clock + 92, 0, logs.STEPS), times | {"time": clock + 100},
        planned, rank_started(clock + 103, 1), logs.started(clock + 105, 1, logs.STEPS),
        times | {"time": clock + 106, "attempt": 1, "total_seconds": 5.0, "seconds": phases | {"kill": 0.1}},
    ]  # fmt: skip
    (fault,) = read(tmp_path, logs, [*events, *later]).faults
    assert fault.recover_seconds == pytest.approx(4.41)


def test_the_time_of_a_launch_is_not_that_of_a_recovery(tmp_path, logs):
    """The next leader measures its own start only: the time until it noticed the loss is not in it."""
    first, clock = logs.steps_events(1, 30, logs.START)
    lost = {"rank": 0, "failure": "node", "cause": "was lost with the leader, node-a (process 7)", "code": ""}
    phases = {"detect": None, "kill": None, "wait": None, "import": 0.1}
    events = [
        node(logs.START, "leads", "a"), node(logs.START, "joined", "b"), logs.started(logs.START + 1, 0, 0), *first,
        node(clock + 1, "lost", "a", started=None), {"kind": "fault", "time": clock + 1, "step": 30, **lost},
        node(clock + 1, "leads", "b"), rank_started(clock + 8, 0), logs.started(clock + 9, 0, 20),
        {"kind": "start_times", "time": clock + 10, "attempt": 0, "total_seconds": 2.0, "seconds": phases},
    ]  # fmt: skip
    (fault,) = read(tmp_path, logs, events).faults
    assert fault.recover_seconds == pytest.approx(8)


def test_a_restart_that_ends_in_another_fault_is_two_faults_and_one_recovery(tmp_path, logs):
    first, clock = logs.steps_events(1, 30, logs.START)
    second, _ = logs.steps_events(21, 40, clock + 20)
    events = [
        logs.started(logs.START, 0, 0), *first, killed(clock + 1, 30), restart(clock + 1), rank_started(clock + 3, 1),
        killed(clock + 4, 30), restart(clock + 6), rank_started(clock + 9, 2), logs.started(clock + 11, 2, 20),
        *second,
    ]  # fmt: skip
    data = read(tmp_path, logs, events)
    assert [(one.recovered, one.by_command, one.redone_steps) for one in data.faults] == [
        (True, False, 10), (True, False, 0)
    ]  # fmt: skip
    assert [one.gap_seconds for one in data.faults] == pytest.approx([3, 7])  # together, the time that was lost
    assert [one.recover_seconds for one in data.faults] == pytest.approx([10, 7])
    text = write_report(tmp_path).markdown.read_text()
    assert "The restart after it ended in the next fault before it trained." in text


def test_a_new_command_whose_first_attempt_fails_recovers_from_that_only(tmp_path, logs):
    first, clock = logs.steps_events(1, 30, logs.START)
    hours = clock + 30_000
    second, _ = logs.steps_events(21, 40, hours + 20)
    events = [
        logs.started(logs.START, 0, 0), *first, killed(clock + 1, 30), rank_started(hours, 0),
        killed(hours + 1, 30), restart(hours + 1), rank_started(hours + 4, 1), logs.started(hours + 6, 1, 20), *second,
    ]  # fmt: skip
    data = read(tmp_path, logs, events)
    ended, recovered = data.faults
    assert (ended.by_command, ended.recovered, ended.gap_seconds) == (True, False, None)
    assert (recovered.recovered, recovered.gap_seconds, recovered.redone_steps) == (True, pytest.approx(5), 0)
    assert (ended.resumed_from, ended.redone_steps) == (20, 10)  # what the command lost that had trained
    assert count_ends(data.faults, running=True) == (1, 1)
    without_ranks = [event for event in events if event["kind"] != "rank_started"]  # they failed on import
    assert [one.by_command for one in read(tmp_path, logs, without_ranks).faults] == [True, False]


def test_an_end_without_an_event_is_as_old_as_the_last_sign_of_training(tmp_path, logs):
    """A new command writes several events before its ranks train, hours later perhaps."""
    first, clock = logs.steps_events(1, 30, logs.START)
    drill = {"kind": "drill", "time": clock + 0.1, "action": "kill", "rank": 1, "pid": 7, "step": 30}
    later, more = clock + 30_000, {"step": 30, "store": "s3://bucket/run", "bytes": 1, "seconds": 1.0}
    events = [
        logs.started(logs.START, 0, 0), *first, drill, {"kind": "checkpoint_fetched", "time": later, **more},
        rank_started(later + 20, 0),
        {"kind": "setting_changed", "time": later + 21, "key": "optim.lr", "old": 1, "new": 2, "step": 30},
        logs.started(later + 22, 0, 30),
    ]  # fmt: skip
    (fault,) = read(tmp_path, logs, events).faults
    assert (fault.detected_at, fault.detect_seconds) == (first[-1]["time"], None)
    assert fault.paused_seconds == pytest.approx(30_022)
    cut = read(tmp_path, logs, [*events[:-1], killed(later + 21, 30)]).faults  # this one is of the new command
    assert [(one.rank, one.by_command) for one in cut] == [(None, True), (1, False)]


@pytest.mark.parametrize("joins", [True, False])
def test_a_job_that_is_lost_on_all_nodes_ended_its_command(tmp_path, logs, joins):
    """The next leader records the loss when it starts. It goes on with the job if a launcher of that has joined it."""
    first, clock = logs.steps_events(1, 30, logs.START)
    later = clock + 30_000
    lost = {"rank": 0, "failure": "node", "cause": "was lost with the leader, node-a (process 7)", "code": ""}
    events = [
        node(logs.START, "leads", "a"), node(logs.START, "joined", "b"), logs.started(logs.START + 1, 0, 0), *first,
        node(later, "lost", "a", started=None), {"kind": "fault", "time": later, "step": 30, **lost},
        node(later, "leads", "a", started=9.0), node(later, "joined", "b", started=0.0 if joins else 10.0),
        rank_started(later + 2, 0), logs.started(later + 3, 0, 20),
    ]  # fmt: skip
    (fault,) = read(tmp_path, logs, events).faults
    assert (fault.recovered, fault.by_command) == (joins, not joins)
    assert fault.detected_at == first[-1]["time"]


@pytest.mark.parametrize("joins", ["before", "after", "after another fault", "never"])
def test_a_job_goes_on_when_a_leader_that_stepped_down_joins_the_next_one(tmp_path, logs, joins):
    """The next leader may be a launcher that is new, and its ranks may begin before the one that waits has joined.
    One that never joins may have been killed: then the new launchers are a new command."""
    first, clock = logs.steps_events(1, 30, logs.START)
    second, _ = logs.steps_events(21, 40, clock + 40)
    again = [node(clock + 31, "joined", "a")]
    failed = [killed(clock + 25, 30), restart(clock + 26), *again, rank_started(clock + 32, 1)]
    events = [
        node(logs.START, "leads", "a"), node(logs.START, "joined", "b"), logs.started(logs.START + 1, 0, 0), *first,
        node(clock + 1, "lost", "b", started=None), killed(clock + 1, 30), restart(clock + 2),
        node(clock + 12, "steps_down", "a"), node(clock + 20, "leads", "c", started=5.0),
        node(clock + 21, "joined", "d", started=6.0), *(again if joins == "before" else []),
        rank_started(clock + 22, 0),
        *(failed if joins == "after another fault" else []), logs.started(clock + 33, int("fault" in joins), 20),
        *(again if joins == "after" else []), *second,
    ]  # fmt: skip
    lost, *others = read(tmp_path, logs, events).faults
    assert (lost.recovered, lost.by_command) == ((False, True) if joins == "never" else (True, False))
    assert lost.gap_seconds == {"never": None, "after another fault": pytest.approx(24)}.get(joins, pytest.approx(32))
    assert all(one.recovered and not one.by_command for one in others) and lost.redone_steps == 10


@pytest.mark.parametrize(("age", "after", "state"), [
    (30.0, [], "waiting"),
    (700.0, [], "failed"),  # it has given up: launch.node_wait_seconds is 600
    (30.0, ["leads"], "failed"),  # and was killed before its ranks began
    (30.0, ["leads", "stopped"], "stopped"),
])  # fmt: skip
def test_a_leader_that_stepped_down_waits(tmp_path, logs, capsys, age, after, state):
    clock = time.time() - age
    first, lost = logs.steps_events(1, 30, clock - 90)[0], killed(clock - 20, 30)
    more = {"leads": node(clock + 1, "leads", "b"), "stopped": {"kind": "stopped", "time": clock + 2, "step": 30,
            "reason": "requested", "saved_step": 20}}  # fmt: skip
    events = [node(clock - 100, "leads", "a"), logs.started(clock - 99, 0, 0), *first, lost,
              node(clock, "steps_down", "a"), *(more[kind] for kind in after)]  # fmt: skip
    folder = RunFolder(logs.write_events(tmp_path, events))
    train = Train(steps=100, seq_len=8, global_batch=2, micro_batch=2)
    run = RunConfig(name="demo", model=load_model("tiny").arch, data=Data(tokens="t"), train=train)
    folder.config.write_text(to_toml(run))
    waits, own = state == "waiting", head(LiveRun(tmp_path).read_all())
    assert [read_status(tmp_path).state, own.state] == [state] * 2 and ("other nodes" in own.note) == waits
    words = "waiting for its nodes at step 30" if waits else f"{state} at step 30"
    assert words in write_report(tmp_path).markdown.read_text()
    assert main(["status", str(tmp_path)]) == 0
    assert ("waits  for other nodes" in capsys.readouterr().out) == waits


def test_while_a_run_starts_again_its_fault_has_not_ended_the_command(tmp_path, logs):
    first, clock = logs.steps_events(1, 30, logs.START)
    events = [logs.started(logs.START, 0, 0), *first, killed(clock + 1, 30), restart(clock + 1)]
    folder = RunFolder(logs.write_events(tmp_path, events))
    with RunLock(folder.lock):
        text = write_report(tmp_path).markdown.read_text()
        assert "failed at step" not in text and "The run starts again." in text and "ended the command" not in text
    text = write_report(tmp_path).markdown.read_text()
    assert "failed at step 30" in text and "did not go on afterwards" in text and "1 fault ended the command" in text


def test_steps_trained_again_after_a_new_command_are_counted_everywhere(tmp_path, logs):
    first, clock = logs.steps_events(1, 30, logs.START)
    second, _ = logs.steps_events(21, 60, clock + 400)
    events = [logs.started(logs.START, 0, 0), *first, killed(clock + 1, 30), logs.started(clock + 400, 0, 20), *second]
    data = read(tmp_path, logs, events)
    assert dict(cost_rows(data))["Steps trained again"].startswith("10, ")
    measured = measure(data)
    assert (measured.restarts, measured.redone_steps) == (1, 10)
    assert measured.restart_seconds == pytest.approx(10 * measured.step_seconds / 60)


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
    assert [i.redone_steps for i in facts.faults] == [13, 20]
    assert [i.compared_steps for i in facts.faults] == [10, 20]
    assert facts.last_step == 80


FAULT = {"kind": "fault", "rank": 0, "cause": "hung"}


def test_a_fault_after_a_roll_back_redoes_the_steps_since_then_alone(tmp_path, logs):
    first, clock = logs.steps_events(1, 60, logs.START)
    second, later = logs.steps_events(21, 30, clock + 5)
    third, _ = logs.steps_events(21, 80, later + 5)
    back = {"kind": "rolled_back", "time": clock + 1, "from_step": 60, "to_step": 20}
    events = [
        logs.started(logs.START, 0, 0), *first, back, *second, FAULT | {"time": later + 1, "step": 33},
        logs.started(later + 4, 1, 20), *third,
    ]  # fmt: skip
    (fault,) = read(tmp_path / "one", logs, events).faults
    assert (fault.fault_step, fault.redone_steps) == (33, 13)
    assert (fault.compared_steps, fault.compared_equal) == (10, True)  # not those of before the roll-back
    right_after = [*events[: 1 + len(first)], back, FAULT | {"time": clock + 2}, logs.started(clock + 4, 1, 20), *third]
    (fault,) = read(tmp_path / "two", logs, right_after).faults
    assert (fault.fault_step, fault.redone_steps, fault.compared_steps) == (20, 0, 0)


def test_steps_that_follow_a_roll_back_are_not_compared_with_those_that_a_fault_lost(tmp_path, logs):
    first, clock = logs.steps_events(1, 60, logs.START)
    second, later = logs.steps_events(21, 30, clock + 5)
    third, _ = logs.steps_events(21, 60, later + 5)
    passed = [event | {"loss": event["loss"] + 1} for event in third]  # on other data
    events = [
        logs.started(logs.START, 0, 0), *first, FAULT | {"time": clock + 1, "step": 60},
        logs.started(clock + 4, 1, 20), *second,
        {"kind": "rolled_back", "time": later + 1, "from_step": 30, "to_step": 20}, *passed,
    ]  # fmt: skip
    (fault,) = read(tmp_path, logs, events).faults
    assert (fault.redone_steps, fault.compared_steps, fault.compared_equal) == (40, 10, True)


def test_steps_lost_by_a_second_fault_are_those_of_its_own_attempt(tmp_path, logs):
    first, clock = logs.steps_events(1, 60, logs.START)
    second, later = logs.steps_events(21, 30, clock + 5)
    third, _ = logs.steps_events(21, 80, later + 5)
    times = {"kind": "start_times", "seconds": {"kill": 0.1}, "attempt": 1}
    events = [
        logs.started(logs.START, 0, 0), *first, FAULT | {"time": clock + 1, "step": 60},
        logs.started(clock + 4, 1, 20), times | {"time": clock + 5, "total_seconds": 3.0},
        *second, FAULT | {"time": later + 1, "step": 30},
        logs.started(later + 4, 2, 20), times | {"time": later + 5, "total_seconds": 4.0}, *third,
        {"kind": "planned_restart", "time": later + 90, "reason": "drain", "step": 80, "kept": 0},
        logs.started(later + 94, 3, 80), times | {"time": later + 95, "total_seconds": 99.0},
    ]  # fmt: skip
    faults = read(tmp_path, logs, events).faults
    assert [(one.fault_step, one.redone_steps, one.compared_steps) for one in faults] == [(60, 40, 40), (30, 10, 10)]
    assert all(one.compared_equal for one in faults)
    assert [one.recover_seconds for one in faults] == [3.0, 4.0]


def test_losses_that_are_no_numbers_are_equal(tmp_path, logs):
    first, clock = logs.steps_events(1, 30, logs.START)
    second, _ = logs.steps_events(21, 40, clock + 5)
    for event in (*first, *second):
        event |= {"loss": math.nan} if event["kind"] == "step" and event["step"] > 25 else {}
    again = FAULT | {"time": clock + 1}, logs.started(clock + 4, 1, 20), *second
    events = [logs.started(logs.START, 0, 0), *first, *again]
    (fault,) = read(tmp_path, logs, events).faults
    assert (fault.compared_steps, fault.compared_equal) == (10, True)


def test_a_restart_that_fails_before_it_trains_is_a_fault_of_its_own(tmp_path, logs):
    first, clock = logs.steps_events(1, 60, logs.START)
    second, _ = logs.steps_events(41, 80, clock + 20)
    events = [
        logs.started(logs.START, 0, 0), *first, FAULT | {"time": clock + 1, "step": 60},
        {"kind": "restart", "time": clock + 2, "attempt": 1, "of": 3}, FAULT | {"time": clock + 9, "step": 60},
        {"kind": "restart", "time": clock + 10, "attempt": 2, "of": 3},
        logs.started(clock + 14, 2, 40), *second,
    ]  # fmt: skip
    faults = read(tmp_path, logs, events).faults
    assert [(one.resumed_from, one.redone_steps, one.compared_steps) for one in faults] == [(40, 20, 20), (40, 0, 0)]
    assert [one.recover_seconds for one in faults] == [pytest.approx(13), pytest.approx(5)]


def test_the_report_has_the_newest_faults_with_their_days(tmp_path, logs):
    events = [logs.started(logs.START, 0, 0)]
    for number in range(1, 23):  # one every six hours
        day = logs.START + number * 21_600
        events += [FAULT | {"time": day, "step": number}, logs.started(day + 4, number, 0)]
    section = recovery_section(read(tmp_path, logs, events))
    texts = [block.text for block in section.blocks if isinstance(block, Text)]
    assert texts[0] == "These are the newest 20 faults. The event log has 2 before them."
    assert "near step 3, rank 0 hung" in texts[1] and "near step 22," in texts[-1]
    assert re.match(r"At 2026-\d\d-\d\d \d\d:\d\d:\d\d UTC, near", texts[-1])


def test_a_drill_that_ended_no_attempt_is_not_the_cause_of_a_later_fault(tmp_path, logs):
    first, clock = logs.steps_events(1, 30, logs.START)
    second, later = logs.steps_events(31, 60, clock + 400)
    events = [
        logs.started(logs.START, 0, 0), *first,
        {"kind": "drill", "time": clock, "action": "SIGTERM", "rank": None, "step": 30},
        {"kind": "stopped", "time": clock + 1, "step": 30, "reason": "SIGTERM", "saved_step": 30},
        logs.started(clock + 400, 0, 30), *second, FAULT | {"time": later + 1, "step": 60},
    ]  # fmt: skip
    (fault,) = read(tmp_path, logs, events).faults
    assert fault.injected_at is None and fault.detected_at == later + 1


def test_a_clock_that_is_set_back_takes_no_training_time_away(tmp_path, logs):
    first, clock = logs.steps_events(1, 30, logs.START)
    second, _ = logs.steps_events(31, 60, clock - 3600)
    third, end = logs.steps_events(61, 90, clock + 60)
    events = [logs.started(logs.START, 0, 0), *first, *second, logs.started(clock + 60, 0, 60), *third]
    assert read(tmp_path, logs, events).active_seconds == pytest.approx(end - clock - 60)


def test_time_between_attempts_is_not_training_time(tmp_path, logs):
    first, clock = logs.steps_events(1, 30, logs.START)
    second, end = logs.steps_events(31, 60, clock + 86_400)
    events = [
        logs.started(logs.START, 0, 0), *first, {"kind": "stopped", "time": clock, "step": 30, "reason": "requested"},
        logs.started(clock + 86_400, 0, 30), *second,
    ]  # fmt: skip
    facts = read(tmp_path, logs, events)
    assert facts.active_seconds == pytest.approx((clock - logs.START) + (end - clock - 86_400))
    assert facts.faults == []


def test_the_last_event_of_a_step_counts(drilled_run, logs):
    facts = gather(drilled_run)
    assert len(facts.steps) == logs.STEPS
    assert facts.steps[logs.RESUMED + 1]["time"] > facts.faults[0].detected_at


@pytest.mark.parametrize(
    "layout, text",
    [
        ({"dp_shard": 1}, "dp_shard 1"),
        ({"pp": 2, "dp_shard": 1}, "pp 2"),
        ({"pp": 2, "dp_shard": 4, "cp": 2, "ep": 8}, "pp 2 x dp_shard 4 x cp 2, ep 8"),
        ({"dp_shard": 1, "cp": 8, "context": "usp, ulysses 2"}, "cp 8 (usp, ulysses 2)"),
    ],
)
def test_layouts_in_words(layout, text):
    assert degrees_text(layout) == text


def test_passed_steps_that_the_run_went_back_from_are_trained_later(tmp_path):
    data = RunData(folder=RunFolder(tmp_path))
    data.pass_steps([4, 5])
    data.pass_steps([9, 5])
    assert [data.trained_between(*between) for between in ((3, 10), (4, 9), (5, 8))] == [4, 3, 3]
    data.go_back(5)
    assert data.trained_between(3, 10) == 5
