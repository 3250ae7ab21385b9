"""The watchdog, with a clock and heartbeats of the test's own."""

from dataclasses import replace

import pytest

from ingot.schema.launch import Launch
from ingot.trainer.launch import watchdog as module
from ingot.trainer.launch.watchdog import FACTOR, Watchdog
from ingot.trainer.resilience.heartbeat import Beat, Phase

NEVER = (0.0,) * len(Phase)


def longest(**seconds):
    """The longest time of each phase: longest(STEP=2.0)."""
    return tuple(seconds.get(phase.name, 0.0) for phase in Phase)


class Bench:
    """Two ranks in a step since 0 s that have had steps of 0.1 s; a phase may take 3 s, the first of its kind 60 s."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.ranks = 2
        times = longest(STEP=0.1, DATA=0.1)
        beat = Beat(pid=1, count=9, phase=Phase.STEP, step=7, since=0.0, stacks=-1, collectives=-1, longest=times)
        self.beats = dict.fromkeys(range(self.ranks), beat)
        monkeypatch.setattr(module, "state_of", lambda pid: "S")
        self.watchdog = Watchdog(Launch(watchdog_seconds=3.0, watchdog_other_seconds=60.0), self)

    def read(self, rank):
        return self.beats[rank]

    def change(self, rank, **values):
        self.beats[rank] = replace(self.beats[rank], **values)

    def found_by(self, until, ended=()):
        """Look every 0.05 s. Returns when a hang was found, or None."""
        while self.now < until:
            self.now = round(self.now + 0.05, 2)
            if (hang := self.watchdog.look(ended)) and not hang.suspects:
                self.hang = hang
                return self.now
        return None


@pytest.fixture
def bench(monkeypatch):
    return Bench(monkeypatch)


def test_a_job_without_progress_hangs_after_its_limit_and_not_before(bench):
    bench.change(1, since=0.5)
    assert bench.found_by(20) == pytest.approx(3.55, abs=0.051)
    assert (bench.hang.limit, bench.hang.seconds) == (3.0, pytest.approx(3.05, abs=0.051))


def test_no_rank_hangs_while_one_makes_progress(bench):
    """Rank 0 has waited for a minute for rank 1, which reads slow data."""
    for second in range(1, 60):
        bench.change(1, since=float(second), phase=Phase.DATA)
        assert bench.found_by(second + 1) is None


def test_a_rank_that_is_overdue_in_a_step_is_a_suspect_while_the_others_are_in_none(bench):
    """They may wait for it in a save, or it for them: the supervisor asks, but not all the time."""
    bench.change(1, phase=Phase.SAVE)
    asked = {}
    while bench.now < 7.0:
        bench.now = round(bench.now + 0.05, 2)
        if hang := bench.watchdog.look(()):
            asked[bench.now] = hang
    assert list(asked) == pytest.approx([3.05, 6.05], abs=0.11)
    assert all((hang.suspects, hang.setting) == ({0}, "launch.watchdog_seconds") for hang in asked.values())
    bench.change(1, since=bench.now)  # a step that has only begun: if it hangs, it will be overdue as well
    assert bench.watchdog.look(()) is None


def test_a_step_may_take_five_times_its_longest_and_twice_a_first_one(bench):
    bench.change(0, longest=longest(STEP=2.0))
    assert bench.found_by(30) == pytest.approx(FACTOR * 2.0, abs=0.11)
    bench.change(0, longest=longest(STEP=2.0, COMPILE=480.0))
    bench.watchdog.look(())
    assert bench.watchdog.limit(Phase.STEP) == 960.0  # another shape may compile again


@pytest.mark.parametrize(
    "phase", [p for p in Phase if p not in (Phase.STEP, Phase.END, Phase.LEAVE)], ids=lambda phase: phase.name
)
def test_all_that_is_no_step_has_its_own_limit_however_short_it_was(bench, phase):
    """The very first step, too; how long those of earlier attempts took is known."""
    bench.change(0, phase=phase, longest=tuple(0.0 if p is Phase.COMPILE else 0.1 for p in Phase))
    assert bench.found_by(59.9) is None and bench.found_by(61) == pytest.approx(60, abs=0.11)
    assert (bench.hang.limit, bench.hang.setting) == (60.0, "launch.watchdog_other_seconds")


def test_the_first_step_after_a_restart_may_take_five_times_the_first_one_before(bench):
    bench.change(0, phase=Phase.COMPILE, longest=longest(COMPILE=2.0))
    bench.change(1, phase=Phase.COMPILE)
    assert bench.found_by(30) == pytest.approx(FACTOR * 2.0, abs=0.11)
    assert (bench.hang.limit, bench.hang.setting) == (FACTOR * 2.0, "launch.watchdog_seconds")


def test_a_stopped_process_is_overdue_in_any_phase(bench, monkeypatch):
    """Both ranks are in a save, where they may be for a minute, and rank 0 is stopped there. A pause that is shorter
    than a step's limit counts for nothing, also after a long time in the phase."""
    bench.change(0, phase=Phase.SAVE, pid=2)
    bench.change(1, phase=Phase.SAVE)
    state = {"is": "S"}
    monkeypatch.setattr(module, "state_of", lambda pid: state["is"] if pid == 2 else "S")
    assert bench.found_by(10) is None
    state["is"] = "T"
    assert bench.found_by(12) is None
    state["is"] = "S"
    assert bench.found_by(14) is None
    state["is"] = "T"
    assert bench.found_by(16) is None
    bench.now = 3600.0  # the supervisor did not run either: it may go on before the rank does
    assert bench.watchdog.look(()) is None
    assert bench.found_by(3610) == pytest.approx(3603, abs=0.3)


def test_what_was_learned_stays_for_the_next_attempt(bench):
    bench.change(0, longest=longest(STEP=2.0))
    bench.watchdog.look(())
    bench.change(0, longest=NEVER)
    bench.watchdog.look(())
    assert bench.watchdog.limit(Phase.STEP) == FACTOR * 2.0


def test_time_in_which_the_supervisor_did_not_run_does_not_count(bench):
    """A machine that was suspended for an hour: its ranks have had no time, either. Only that time does not count."""
    assert bench.found_by(1) is None
    bench.now = 3600.0
    assert bench.watchdog.look(()) is None
    assert bench.found_by(3610) == pytest.approx(3602, abs=0.11)


def test_the_last_uploads_have_their_time(bench):
    bench.change(0, phase=Phase.END)
    assert bench.found_by(655) is None and bench.found_by(670) == pytest.approx(660, abs=0.11)


def test_ranks_have_no_longer_to_leave_a_job_that_has_ended_than_a_step_may_take_at_least(bench):
    bench.change(0, phase=Phase.LEAVE, longest=longest(STEP=2.0, COMPILE=30.0))
    assert bench.found_by(20, ended=[1]) == pytest.approx(3, abs=0.11)
    assert (bench.hang.limit, bench.hang.setting) == (3.0, "launch.watchdog_seconds")


def test_a_rank_that_ended_is_not_waited_for(bench):
    bench.change(1, phase=Phase.END)
    assert bench.found_by(20, ended=[1]) is not None and bench.hang.beats.keys() == {0}
    assert bench.watchdog.look([0, 1]) is None


def test_it_can_be_switched_off(bench):
    bench.watchdog = Watchdog(Launch(watchdog_seconds=0.0), bench)
    assert bench.found_by(300) is None
