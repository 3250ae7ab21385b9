"""The time of a start by phase: pieces that add up, the warm-up, and what the launcher knew."""

import pytest
from tests.own_time import own_time

from ingot.trainer.resilience import start_times
from ingot.trainer.resilience.start_times import PHASES, Ordered, StartClock, phases_text


@pytest.fixture
def clock(monkeypatch):
    """A clock whose time the test sets."""
    now = [100.0]
    own_time(monkeypatch, start_times, monotonic=lambda: now[0])

    def later(seconds: float) -> None:
        now[0] += seconds

    return later


def test_phases_come_in_pieces_and_cover_all_the_time(clock):
    mine = StartClock()
    for phase, seconds in (("import", 2.0), ("groups", 0.5), ("build", 1.0), ("groups", 0.25), ("load", 3.0)):
        clock(seconds)
        mine.end(phase)
    found = mine.report()
    assert found is not None and list(found) == list(PHASES)
    assert {name: s for name, s in found.items() if s is not None} == {
        "import": 2.0, "groups": 0.75, "build": 1.0, "load": 3.0,
    }  # fmt: skip


def test_what_the_launcher_knew_comes_first(clock):
    """Lost at 90, seen at 91, gone at 93, ordered at 96, and the fork server imported for 3 of the 4 seconds since."""
    ordered = Ordered(detect=1.0, kill=2.0, gone_at=93.0, ordered_at=96.0).after_imports(3.0)
    mine = StartClock(Ordered.of_text(ordered.to_text()))
    clock(0.5)
    mine.end("import")
    found = mine.report()
    assert found is not None
    known = {"detect": 1.0, "kill": 2.0, "wait": 3.0, "schedule": 1.0, "import": 3.5}
    assert {name: s for name, s in found.items() if s is not None} == known
    assert sum(known.values()) == 100.5 - 90.0


def test_a_check_of_machines_is_no_wait(clock):
    found = StartClock(Ordered(kill=2.0, gone_at=93.0, ordered_at=98.0, check=4.5)).report()
    assert found is not None and (found["wait"], found["check"], found["schedule"]) == (0.5, 4.5, 2.0)
    first = StartClock(Ordered(ordered_at=98.0, check=4.5)).report()
    assert first is not None and (first["wait"], first["check"], first["schedule"]) == (None, 4.5, 2.0)


def test_a_first_start_detected_killed_and_waited_for_nothing(clock):
    found = StartClock(Ordered(ordered_at=98.0)).report()
    assert found is not None
    assert (found["detect"], found["kill"], found["wait"], found["schedule"]) == (None, None, None, 2.0)


def test_the_warm_up_is_what_the_first_line_took_longer(clock):
    mine = StartClock()
    assert mine.line(seconds=9.0, steps=4) is None
    found = mine.line(seconds=5.0, steps=10)
    assert found is not None and found["warm_up"] == 7.0
    assert mine.line(seconds=5.0, steps=10) is None and mine.report() is None  # an attempt is reported once


def test_a_first_line_that_was_fast_has_no_negative_warm_up(clock):
    mine = StartClock()
    mine.line(seconds=1.0, steps=4)
    found = mine.line(seconds=5.0, steps=10)
    assert found is not None and found["warm_up"] == 0.0


def test_an_attempt_that_ends_before_its_second_line_is_reported_without_a_warm_up(clock):
    mine = StartClock()
    mine.line(seconds=9.0, steps=4)
    found = mine.report()
    assert found is not None and found["warm_up"] is None


def test_phases_for_people_leave_out_those_without_time():
    assert phases_text({"detect": 0.25, "kill": None, "load": 0.001, "warm_up": 1.5}) == "detect 0.25 s, warm up 1.50 s"
