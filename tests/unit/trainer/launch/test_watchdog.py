"""The watchdog, with a clock and heartbeats of the test's own."""

from dataclasses import replace

import pytest
from tests.own_time import own_time

from ingot.schema.launch import Launch
from ingot.trainer.launch import watchdog as module
from ingot.trainer.launch.watchdog import FACTOR, LEAST, WHOLE_FACTOR, Watchdog
from ingot.trainer.resilience.heartbeat import REPORTED, Beat, Phase

NEVER = (0.0,) * len(Phase)


def longest(**seconds):
    """The longest time of each phase: longest(STEP=2.0)."""
    return tuple(seconds.get(phase.name, 0.0) for phase in Phase)


class Bench:
    """Two ranks in a step since 0 s that have had steps of 0.1 s; a step may take 3 s, other phases 60 s."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        own_time(monkeypatch, module, monotonic=lambda: self.now)
        self.ranks = 2
        times = longest(STEP=0.1, DATA=0.1)
        beat = Beat(pid=1, count=9, phase=Phase.STEP, step=7, since=0.0, stacks=-1, collectives=-1, longest=times)
        self.beats = dict.fromkeys(range(self.ranks), beat)
        monkeypatch.setattr(module, "state_of", lambda pid: "S")
        self.set_limits()

    def set_limits(self, **launch):
        self.watchdog = Watchdog(Launch(watchdog_seconds=3.0, watchdog_other_seconds=60.0, **launch), self)

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


@pytest.mark.parametrize("is_stopped", [False, True])
def test_looks_that_are_as_rare_as_it_permits_find_a_hang_as_soon(bench, monkeypatch, is_stopped):
    pauses = []
    if is_stopped:  # while the other one reads slow data
        bench.change(1, phase=Phase.DATA)
        monkeypatch.setattr(module, "state_of", lambda pid: "T")
    while (hang := bench.watchdog.look(())) is None or hang.suspects:
        pauses.append(bench.watchdog.look_seconds)
        bench.now += pauses[-1]
    assert 3.0 <= bench.now < 4.0 and min(pauses) == 0.2 and max(pauses) == 0.5


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
    """The very first step, save and evaluation, too; how long those of earlier attempts took is known."""
    bench.change(0, phase=phase, longest=tuple(0.0 if p in (Phase.COMPILE, *REPORTED) else 0.1 for p in Phase))
    assert bench.found_by(59.9) is None and bench.found_by(61) == pytest.approx(60, abs=0.11)
    assert (bench.hang.limit, bench.hang.setting) == (60.0, "launch.watchdog_other_seconds")


WHOLE = [(Phase.SAVE, "launch.watchdog_save"), (Phase.EVALUATE, "launch.watchdog_evaluate")]


@pytest.mark.parametrize(("phase", "setting"), WHOLE, ids=["save", "evaluation"])
def test_saves_and_evaluations_may_take_ten_times_the_longest_within_bounds(bench, phase, setting):
    """The longest of all ranks and attempts counts; the bounds are a few limits of a step, and that of other phases."""
    bench.change(0, longest=longest(**{phase.name: 2.0}))
    bench.watchdog.look(())
    for rank in (0, 1):
        bench.change(rank, phase=phase, longest=longest(**{phase.name: 0.1}))
    assert bench.found_by(60) == pytest.approx(WHOLE_FACTOR * 2.0, abs=0.11)
    assert (bench.hang.limit, bench.hang.setting) == (WHOLE_FACTOR * 2.0, setting)
    assert bench.hang.reason == f'{setting} = "auto", the longest one so far took 2.0 s'

    for took, limit, of in ((0.1, LEAST * 3.0, setting), (7.0, 60.0, "launch.watchdog_other_seconds")):
        bench.set_limits()
        bench.change(0, since=bench.now, longest=longest(**{phase.name: took}))
        assert bench.found_by(bench.now + 100) is not None
        assert (bench.hang.limit, bench.hang.setting) == (limit, of)
        assert bench.hang.reason.startswith(of)


def test_a_save_that_was_slow_before_training_waits_for_it_has_longer(bench):
    """The disk is slower than ever: what the last save waits for has taken 4 s already, and earlier ones 0.1 s."""
    for rank in (0, 1):
        bench.change(rank, phase=Phase.SAVE, longest=longest(SAVE=0.1))
    bench.change(1, in_flight=4.0)
    assert bench.found_by(100) == pytest.approx(WHOLE_FACTOR * 4.0, abs=0.11)
    bench.set_limits()
    bench.change(0, longest=NEVER, since=bench.now)
    bench.change(1, longest=NEVER, in_flight=2.0)  # no whole save is known: its age is no measure yet
    assert bench.found_by(bench.now + 100) is not None and bench.hang.limit == 60.0


def test_an_evaluation_may_compile_for_a_batch_of_another_shape(bench):
    bench.change(0, longest=longest(EVALUATE=0.1, SAVE=0.1, COMPILE=20.0))
    bench.watchdog.look(())
    assert (bench.watchdog.limit(Phase.EVALUATE), bench.watchdog.limit(Phase.SAVE)) == (40.0, LEAST * 3.0)


@pytest.mark.parametrize(("phase", "setting"), WHOLE, ids=["save", "evaluation"])
def test_the_run_file_may_give_the_limit_of_saves_and_evaluations(bench, phase, setting):
    bench.set_limits(watchdog_save="7s", watchdog_evaluate="7s")
    for rank in (0, 1):
        bench.change(rank, phase=phase)
    assert bench.found_by(60) == pytest.approx(7.0, abs=0.11)  # also the first one
    assert (bench.hang.limit, bench.hang.setting, bench.hang.reason) == (7.0, setting, f"{setting} = 7.0 s")
    bench.set_limits(watchdog_save="2min", watchdog_evaluate="2min")
    assert bench.watchdog.limit(phase) == 120.0


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
