"""Save intervals as a run file says them."""

import pytest
from tests.expect import refused

from ingot.schema.run import Checkpoint
from ingot.schema.save_interval import SaveInterval, parse_interval


@pytest.mark.parametrize(
    "text, interval",
    [
        ("500 steps", SaveInterval(steps=500)),
        ("1 step", SaveInterval(steps=1)),
        ("60 min", SaveInterval(seconds=3600)),
        (" 1 H ", SaveInterval(seconds=3600)),
        ("30s", SaveInterval(seconds=30)),
        ("auto", SaveInterval()),
    ],
)
def test_an_interval_has_a_unit_or_is_auto(text, interval):
    assert parse_interval(text) == interval
    assert interval.is_auto == (text == "auto")
    assert parse_interval(str(interval)) == interval  # what is printed can be written


@pytest.mark.parametrize("text", ["", "500", "0 steps", "0 s", "-1 steps", "1.5 steps", "1000000001 steps", "9999d"])
def test_anything_else_is_refused(text):
    with refused("E-QUANTITY", value=text):
        parse_interval(text)


def test_an_interval_in_the_other_unit():
    assert [SaveInterval(seconds=3600).in_steps(step) for step in (7.0, 1e9)] == [514, 1]
    assert SaveInterval(steps=5).in_steps(7.0) == 5 and SaveInterval().in_steps(7.0) == 0
    assert SaveInterval(steps=5).in_seconds(7.0) == 35.0 and SaveInterval(seconds=9).in_seconds(7.0) == 9


def test_a_run_without_an_interval_saves_every_hour_and_the_weights_every_ten_minutes():
    saves = Checkpoint()
    assert (saves.interval, saves.weights_interval) == (SaveInterval(seconds=3600), SaveInterval(seconds=600))
    assert Checkpoint(every_steps=7).interval == SaveInterval(steps=7)
    assert Checkpoint(every="7 steps").interval == SaveInterval(steps=7)
    assert Checkpoint(every="auto", weights_every="auto").interval.is_auto


@pytest.mark.parametrize("text", ["", "0 steps"])
def test_weights_alone_can_be_switched_off(text):
    assert Checkpoint(weights_every=text).weights_interval is None


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"every": "1 h", "every_steps": 5}, "every"),
        ({"every": "0 steps"}, "every"),
        ({"every": "5"}, "every"),
        ({"weights_every": "often"}, "weights_every"),
    ],
)
def test_intervals_that_cannot_be(settings, name):
    assert [where for where, _ in Checkpoint(**settings).problems()] == [name]


def test_an_advised_interval_has_the_form_of_the_run_file():
    assert Checkpoint(every_steps=5).with_steps(9) == {"checkpoint.every_steps": 9}
    assert Checkpoint(every="1 h").with_steps(9) == Checkpoint().with_steps(9) == {"checkpoint.every": "9 steps"}
