"""Charts are well-formed, stay inside their frame, and draw what they were given."""

import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.report.render.charts import ChartMark, Line, line_chart, nice_ticks, smooth, thin

coordinates = st.floats(-1e9, 1e9).filter(lambda v: v == 0 or abs(v) > 1e-9)


def drawn(svg: str) -> list[tuple[float, float]]:
    root = ElementTree.fromstring(svg)
    pairs = " ".join(line.get("points", "") for line in root.iter("polyline")).split()
    points = [tuple(map(float, pair.split(","))) for pair in pairs]
    return points + [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter("circle")]


@given(st.lists(st.tuples(coordinates, coordinates), min_size=1, max_size=40), st.booleans())
def test_every_point_is_inside_the_picture(points, from_zero):
    svg = line_chart([Line("main", points), Line("dots", points)], width=400, height=200, label="a<b>&\"'",
                     marks=[ChartMark(points[0][0], "<kill>")], from_zero=from_zero)  # fmt: skip
    found = drawn(svg)
    assert len(found) == 2 * len(points)
    assert all(0 <= x <= 400 and 0 <= y <= 200 for x, y in found)


def test_higher_values_are_higher_and_later_steps_further_right():
    (x1, y1), (x2, y2) = drawn(line_chart([Line("main", [(1, 3.0), (9, 7.0)])], width=400, height=200, label="x"))
    assert x2 > x1
    assert y2 < y1


def test_nothing_to_draw_is_no_chart():
    assert line_chart([], width=400, height=200, label="x") == ""
    assert line_chart([Line("main", [(1.0, math.nan), (2.0, math.inf)])], width=400, height=200, label="x") == ""


def test_marks_outside_are_not_drawn():
    svg = line_chart([Line("main", [(1, 1), (9, 2)])], width=400, height=200, label="x", marks=[ChartMark(12, "late")])
    assert "late" not in svg


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 10, [0, 5, 10]), (4.7, 8.9, [4, 6, 8, 10]), (0, 0.003, [0, 0.001, 0.002, 0.003]), (-3, 3, [-4, -2, 0, 2, 4])],
)
def test_ticks_are_round_and_enclose(low, high, ticks):
    assert nice_ticks(low, high, count=4) == pytest.approx(ticks)


@given(st.floats(-1e4, 1e4), st.floats(1e-2, 1e6), st.integers(2, 12))
def test_ticks_enclose_any_range_with_few_steps(low, size, count):
    ticks = nice_ticks(low, low + size, count)
    step = ticks[1] - ticks[0]
    assert ticks[0] <= low + step * 1e-6
    assert ticks[-1] >= low + size - step * 1e-6
    assert len(ticks) <= count + 2


def test_smoothing_does_not_lag_and_keeps_the_ends():
    slope = [(float(x), 3.0 * x) for x in range(50)]
    assert [y for _, y in smooth(slope, 9)] == pytest.approx([y for _, y in slope])
    noisy = [(float(x), float(x % 2)) for x in range(50)]
    assert all(abs(y - 0.5) < 0.07 for _, y in smooth(noisy, 21)[10:-10])
    assert smooth([(0.0, 1.0), (1.0, math.nan), (2.0, 3.0)], 3) == [(0.0, 1.0), (2.0, 3.0)]


def test_thinning_keeps_peaks_and_order():
    points = [(float(x), 1.0) for x in range(10_000)]
    points[4_321] = (4_321.0, 99.0)
    points[7_000] = (7_000.0, -99.0)
    few = thin(points, 600)
    assert len(few) <= 600
    assert few == sorted(few)
    assert {(4_321.0, 99.0), (7_000.0, -99.0)} <= set(few)
    assert thin(points[:600], 600) == points[:600]


@pytest.mark.parametrize(("speed", "label"), [(12_000.0, "10k"), (80.0, "50"), (0.4, "0.5")])
def test_labels_of_speeds_are_short_and_slow_runs_have_them_too(speed, label):
    lines = [Line("main", [(1, speed), (2, speed)])]
    assert f">{label}<" in line_chart(lines, width=400, height=200, label="speed", y_format="si", from_zero=True)
