import os
import time

import pytest

from ingot.trainer.resilience.heartbeat import _SLOT, HEARTBEAT_VARIABLE, Heartbeats, Phase, open_heartbeat


@pytest.fixture
def beats(monkeypatch):
    made = Heartbeats(3)
    monkeypatch.setenv(HEARTBEAT_VARIABLE, str(made.fd))
    yield made
    made.close()


def test_a_rank_that_never_beat_is_at_its_start(beats):
    beat = beats.read(2)
    assert (beat.pid, beat.count, beat.phase, beat.stacks) == (0, 0, Phase.START, -1)
    assert time.monotonic() - beat.since < 5 and not any(beat.longest)


def test_another_process_beats_in_memory_that_both_share(beats):
    child = os.fork()
    if child == 0:
        heart = open_heartbeat(1, stacks=7, collectives=8)
        heart.enter(Phase.STEP, 12)
        time.sleep(0.05)
        heart.enter(Phase.SAVE, 12)
        os._exit(0)
    os.waitpid(child, 0)
    beat = beats.read(1)
    assert (beat.pid, beat.phase, beat.step, beat.stacks, beat.collectives) == (child, Phase.SAVE, 12, 7, 8)
    assert beat.longest[Phase.START] > 0  # from the beginning of the attempt, before the process existed
    assert beat.longest[Phase.STEP] >= 0.05 and beat.longest[Phase.SAVE] == 0
    assert beats.read(0).count == beats.read(2).count == 0  # of its neighbors


def test_a_rank_says_whether_it_waits_for_another_one(beats):
    heart = open_heartbeat(1)
    heart.enter(Phase.STEP, 5)
    heart.set_waiting(True)
    assert [beats.read(rank).waits for rank in range(3)] == [False, True, False]
    heart.enter(Phase.STEP, 6)  # from another place than its wait: nothing is lost
    assert beats.read(1).waits
    heart.set_waiting(False)
    assert not beats.read(1).waits
    heart.set_waiting(True)
    open_heartbeat(1)  # the rank starts again
    assert not beats.read(1).waits
    heart.set_waiting(True)
    beats.begin()
    assert not beats.read(1).waits


def test_a_rank_reports_how_long_a_whole_save_took(beats):
    """Training waited for a part of it only, and the rest ended during a step."""
    heart = open_heartbeat(1)
    heart.enter(Phase.SAVE, 4)
    time.sleep(0.01)
    heart.enter(Phase.STEP, 5)
    before = beats.read(1)
    assert before.longest[Phase.SAVE] == 0.0
    heart.learn(Phase.SAVE, 2.5)
    heart.learn(Phase.SAVE, 1.5)
    beat = beats.read(1)
    assert beat.longest[Phase.SAVE] == 2.5 and (beat.phase, beat.step, beat.since) == (Phase.STEP, 5, before.since)
    assert beats.read(0).longest[Phase.SAVE] == 0.0


def test_the_end_of_the_save_that_a_rank_waited_for_is_a_sign_of_life(beats):
    heart = open_heartbeat(1)
    heart.enter(Phase.SAVE, 4)
    began = beats.read(1)
    heart.wait_for_save(90.0)
    assert (beats.read(1).in_flight, beats.read(1).since) == (90.0, began.since)
    heart.learn(Phase.SAVE, 95.0)
    beat = beats.read(1)
    assert beat.in_flight == 0.0 and beat.since > began.since and beat.count > began.count


def test_an_attempt_begins_without_the_beats_of_the_last(beats):
    open_heartbeat(0).enter(Phase.STEP, 5)
    before = beats.read(0).since
    beats.begin()
    beat = beats.read(0)
    assert (beat.pid, beat.step, beat.phase) == (0, 0, Phase.START) and beat.since >= before and not any(beat.longest)


def test_without_a_supervisor_a_heart_beats_for_itself(beats):
    open_heartbeat().enter(Phase.STEP, 5)  # of a run in the program's own process
    assert all(beats.read(rank).count == 0 for rank in range(3))


def test_every_phase_has_words():
    assert all(phase.words for phase in Phase)


def test_a_beat_that_is_being_written_is_not_read(beats, monkeypatch):
    """A rank may be interrupted, or stopped, in the middle of a beat."""
    heart = open_heartbeat(1)
    heart.enter(Phase.STEP, 5)
    whole = beats.read(1)
    for cut in (0, 8, 40, 100):
        heart.enter(Phase.SAVE, 5)
        memory = beats._memory
        memory[_SLOT + cut : 2 * _SLOT] = bytes(_SLOT - cut)
        assert beats.read(1) == whole
    heart.enter(Phase.DATA, 6)
    assert beats.read(1).step == 6
