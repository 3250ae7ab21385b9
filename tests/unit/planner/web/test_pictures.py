"""The simulated pipeline as rectangles."""

import pytest

from ingot.planner.web import answers
from ingot.planner.web.pictures import MOST_PIECES, WINDOWS, picture
from ingot.planner.web.settings import PageSettings


def drawn(window="step", **setting):
    state = answers.settled(PageSettings(model="llama3-8b", cluster="8xh100", zero=1, **setting))
    timeline = answers.timeline_of(state)
    return picture(answers.answer(state).run, timeline, window), timeline


def test_every_action_of_a_small_schedule_is_a_rectangle_in_its_place():
    found, timeline = drawn(pp=4, batch=16)
    assert not found["merged"]
    for rank, row in enumerate(found["rows"]):
        assert len(row["pieces"]) == len(timeline.table.rows[rank])
        for piece, action, start in zip(row["pieces"], timeline.table.rows[rank], timeline.starts[rank], strict=True):
            assert piece[0] == action.kind
            assert piece[2] == str(action.micro_batch)
            assert piece[3] == pytest.approx(start / timeline.step_time, abs=1e-5)
    share = sum(piece[4] for row in found["rows"] for piece in row["pieces"]) / 4
    assert found["bubble"] == f"{1 - share:.1%}"


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v"])
def test_a_large_schedule_is_drawn_with_few_rectangles_and_its_idle_time(schedule):
    found, timeline = drawn(pp=4, batch=1024, schedule=schedule)
    assert found["merged"]
    for row, busy in zip(found["rows"], timeline.busy, strict=True):
        assert len(row["pieces"]) < MOST_PIECES
        covered = sum(piece[4] * piece[5] for piece in row["pieces"])
        assert covered == pytest.approx(busy / timeline.step_time, abs=0.005)
        ends = [piece[3] + piece[4] for piece in row["pieces"]]
        assert all(end <= after[3] + 1e-4 for end, after in zip(ends, row["pieces"][1:], strict=False))


@pytest.mark.parametrize("window", WINDOWS)
def test_parts_of_a_step_stay_within_it(window):
    found, _ = drawn(window, pp=8, batch=256, schedule="interleaved")
    for row in found["rows"]:
        for _, _, _, x, width, _ in row["pieces"]:
            assert 0 <= x <= 1 and 0 <= x + width <= 1 + 1e-4
    if window != "step":
        assert not found["merged"]
        assert any(piece[2] for row in found["rows"] for piece in row["pieces"])
