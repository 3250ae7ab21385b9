"""The evidence of a hang, from real processes and from reports of the test's own."""

import itertools
import json
import os
import signal
import time
from dataclasses import replace

import pytest

from ingot.schema.run_folder import RunFolder
from ingot.trainer.launch import native_stacks
from ingot.trainer.launch.evidence import Answers, examine, incident_of, judge, waits_for
from ingot.trainer.launch.watchdog import Hang, state_of
from ingot.trainer.resilience.collective_calls import CollectiveCall
from ingot.trainer.resilience.heartbeat import HEARTBEAT_VARIABLE, Beat, Heartbeats, Phase, open_heartbeat
from ingot.trainer.resilience.reports import REPORT_SIGNAL, Reports

BEAT = Beat(pid=1, count=9, phase=Phase.STEP, step=7, since=5.0, stacks=3, collectives=4, longest=(0.0,) * len(Phase))
SETTING = "launch.watchdog_seconds"
HANG = Hang({0: BEAT, 1: replace(BEAT, step=8, since=6.0)}, 3.04, 3.0, SETTING)
WAITS = CollectiveCall(
    group="dp", ranks=(0, 1), number=4, operation="all_reduce", sizes=((8,),), dtype="Float", finished=False
)
CAME = replace(WAITS, number=3, finished=True)


def _wait():
    time.sleep(30)


def _hold():
    sum(itertools.repeat(0))


def _block():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(30)


def _ignore():
    signal.signal(REPORT_SIGNAL, signal.SIG_IGN)
    time.sleep(30)


def _no_handler():
    signal.signal(REPORT_SIGNAL, signal.SIG_DFL)
    time.sleep(30)


@pytest.fixture
def hung(tmp_path, monkeypatch):
    """`hung(act, ...)`: one forked rank per act, each in a step. Returns their hang and the run folder."""
    children, memory = [], []
    monkeypatch.setattr(native_stacks, "_PROGRAMS", ())  # gdb takes seconds for each

    def make(*acts):
        beats = Heartbeats(len(acts))
        memory.append(beats)
        monkeypatch.setenv(HEARTBEAT_VARIABLE, str(beats.fd))
        for rank, act in enumerate(acts):
            children.append(os.fork())
            if children[-1] == 0:
                reports = Reports()
                open_heartbeat(rank, reports.stacks, reports.collectives).enter(Phase.STEP, 12)
                act()
                os._exit(0)
        while any(beats.read(rank).phase is not Phase.STEP for rank in range(len(acts))):
            time.sleep(0.005)
        return Hang({rank: beats.read(rank) for rank in range(len(acts))}, 3.0, 3.0, SETTING), RunFolder(tmp_path)

    yield make
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for beats in memory:
        beats.close()


def test_every_rank_is_asked_and_the_stopped_one_is_blamed(hung):
    hang, folder = hung(_wait, _wait)
    os.kill(hang.beats[1].pid, signal.SIGSTOP)
    cause, place = examine(hang, folder)
    assert (cause.ranks, cause.mismatch, cause.accident) == ((1,), False, True) and "stopped (SIGSTOP)" in cause.words
    assert "in _wait" in (place / "rank-0.stacks").read_text()
    assert "wrote no stacks: a signal" in (place / "rank-1.stacks").read_text()
    written = json.loads((place / "hang.json").read_text())
    assert written["ranks"] == [1] and written["state"]["0"]["answered"] and not written["state"]["1"]["answered"]
    assert written["state"]["1"]["process_state"] == "T" and written["state"]["1"]["step"] == 12
    again = examine(hang, folder)[1]
    assert again == folder.incidents / "0002"
    stacks = (again / "rank-0.stacks").read_text()
    assert stacks.count("in _wait") == 1  # the first answer is gone


def test_who_waits_for_whom_is_seen_before_a_hang_is_certain():
    """Rank 0 is overdue in a step, and rank 1 is in a save: a hang of rank 0 only if rank 1 waits for it."""
    for calls, blamed in (
        ({0: [CAME], 1: [WAITS]}, {0}),
        ({0: [WAITS], 1: [CAME]}, {1}),
        ({0: None, 1: [CAME]}, {0}),
        ({0: [CAME], 1: [CAME]}, set()),
    ):
        answers = Answers({0: "S", 1: "S"}, calls, with_stacks=())
        assert waits_for(HANG.beats, answers) == blamed


def test_a_node_that_does_not_answer_is_no_obstacle(tmp_path):
    def ask(beats, place):
        return Answers({0: "S"}, {0: [CAME]}, {0})

    cause, place = examine(HANG, RunFolder(tmp_path), ask)
    assert cause.ranks == (0,) and json.loads((place / "hang.json").read_text())["state"].keys() == {"0"}


def test_a_disk_without_room_keeps_no_hang_from_its_end(hung):
    hang, folder = hung(_wait)
    folder.incidents.write_text("a file where the folder should be")
    cause, place = examine(hang, folder)
    assert cause.ranks == (0,) and place is None


def test_a_rank_that_holds_its_interpreter_lock_is_blamed_and_its_stack_is_there(hung):
    hang, folder = hung(_hold, _wait)
    time.sleep(0.1)  # until it holds the lock
    cause, place = examine(hang, folder)
    assert cause.ranks == (0,) and "interpreter lock" in cause.words
    assert "in _hold" in (place / "rank-0.stacks").read_text()


def test_a_rank_whose_main_thread_blocks_all_signals_answers_too(hung):
    hang, folder = hung(_block)
    time.sleep(0.1)  # until it blocks them
    cause, place = examine(hang, folder)
    assert "in _block" in (place / "rank-0.stacks").read_text() and "SIGUSR2" not in cause.words
    assert json.loads((place / "hang.json").read_text())["state"]["0"]["answered"]


def test_signals_that_the_launcher_blocked_reach_the_ranks(hung):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [REPORT_SIGNAL])
    try:
        hang, folder = hung(_wait)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert "in _wait" in (examine(hang, folder)[1] / "rank-0.stacks").read_text()


@pytest.mark.parametrize(("act", "words"), [(_ignore, "ignores"), (_no_handler, "has no handler for")])
def test_a_rank_that_takes_no_question_is_not_said_to_hold_its_lock(hung, act, words):
    hang, folder = hung(act, act)
    time.sleep(0.1)
    cause, place = examine(hang, folder)
    assert cause.ranks == (0,) and f"it {words} SIGUSR2" in cause.words and "lock" not in cause.words
    assert f"wrote no stacks: it {words} SIGUSR2" in (place / "rank-1.stacks").read_text()
    assert words in json.loads((place / "hang.json").read_text())["state"]["1"]["deaf"]
    assert all(state_of(beat.pid) == "S" for beat in hang.beats.values())  # the question has ended none


def test_of_ranks_that_take_no_question_the_one_that_others_wait_for_is_blamed():
    deaf = {1: "it ignores SIGUSR2, which asks it what it does"}
    cause = judge(HANG, Answers({0: "S", 1: "S"}, {0: [WAITS], 1: None}, {0}, deaf))
    assert cause.ranks == (1,) and "rank 0 waits for rank 1" in cause.words and "it ignores SIGUSR2" in cause.words


def test_of_ranks_that_take_no_question_one_that_waits_for_no_other_is_blamed():
    """Both are in the same step, and the one that waits began it first."""
    deaf = dict.fromkeys((0, 1), "it ignores SIGUSR2, which asks it what it does")
    silence = Answers({0: "S", 1: "S"}, {0: None, 1: None}, set(), deaf)
    for waits, blamed in (((True, False), 1), ((False, True), 0), ((False, False), 0), ((True, True), 0)):
        beats = {rank: replace(BEAT, since=5.0 + rank, waits=waits[rank]) for rank in (0, 1)}
        assert judge(Hang(beats, 3.04, 3.0, SETTING), silence).ranks == (blamed,), waits


def test_a_rank_that_is_gone_is_no_obstacle(hung):
    hang, folder = hung(_wait)
    gone = replace(hang.beats[0], pid=2**22 + 1)
    assert examine(Hang({0: gone}, 3.0, 3.0, SETTING), folder)[0].ranks == (0,)
    unborn = replace(hang.beats[0], pid=0, stacks=0, collectives=0)  # signal 0 would be for our own group
    assert examine(Hang({0: unborn}, 3.0, 3.0, SETTING), folder)[0].ranks == (0,)


@pytest.mark.parametrize(
    ("states", "calls", "ranks", "words"),
    [
        ({0: "S", 1: "S"}, {0: [WAITS], 1: [CAME]}, (1,), "rank 0 waits for rank 1 in all_reduce [8]"),
        ({0: "S", 1: "D"}, {0: [WAITS], 1: None}, (1,), "waits in the kernel"),
        ({0: "S", 1: "R"}, {0: [WAITS], 1: None}, (1,), "native code holds its interpreter lock"),
        ({0: "T", 1: "S"}, {0: None, 1: [WAITS]}, (0,), "stopped (SIGSTOP)"),
        ({0: "S", 1: "S"}, {0: [], 1: []}, (0,), "hung for 3.0 s in a step"),
        ({0: "S", 1: "S"}, {0: [WAITS], 1: [replace(WAITS, sizes=((9,),))]}, (0, 1), "rank 1 called all_reduce [9]"),
    ],
)
def test_the_cause_follows_from_states_and_collectives(states, calls, ranks, words):
    cause = judge(HANG, Answers(states, calls, with_stacks={0, 1}))
    assert cause.ranks == ranks and words in cause.words and cause.mismatch == ("called" in words)
    assert cause.accident == any(state in "TD" for state in states.values())


def test_a_rank_that_answers_nothing_is_not_judged(hung):
    assert "it does not answer" in judge(HANG, Answers({0: "S", 1: "S"}, {0: [WAITS], 1: None}, with_stacks={0})).words


def test_a_hang_is_an_incident_and_a_mismatch_an_error(tmp_path):
    cause = judge(HANG, Answers({0: "S", 1: "S"}, {0: [WAITS], 1: [CAME]}, {0, 1}))
    incident = incident_of(HANG, cause, tmp_path, 5)
    assert (incident.rank, incident.step, incident.kind, incident.detected_by) == (1, 8, "hang", "watchdog")
    assert incident.error is None and incident.setting == SETTING and incident.evidence == tmp_path
    assert incident.signature == "hung in a step"  # again at the same step: no accident
    first = Hang({rank: replace(beat, phase=Phase.COMPILE) for rank, beat in HANG.beats.items()}, 3.04, 3.0, SETTING)
    assert incident_of(first, cause, None, 5).signature == "hung in a step"  # it is the first step after a restart
    assert incident_of(HANG, cause, None, 12).step == 12
    bug = incident_of(HANG, replace(cause, mismatch=True), tmp_path, 5)
    assert bug.kind == "bug" and bug.error is not None and bug.error.code == "E-COLLECTIVES-DIFFER"
    assert str(tmp_path) in bug.error.fix


def test_accidents_and_slow_starts_are_no_bugs():
    stopped = judge(HANG, Answers({0: "T", 1: "S"}, {0: None, 1: [WAITS]}, {1}))
    assert incident_of(HANG, stopped, None, 5).signature == ""
    start = replace(HANG, beats={0: replace(BEAT, phase=Phase.START)})
    assert incident_of(start, judge(start, Answers({0: "S"}, {0: ()}, {0})), None, 5).signature == ""
