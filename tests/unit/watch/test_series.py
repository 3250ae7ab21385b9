"""Numbers by step: what becomes void, and what is left when they are thinned."""

import numpy as np
import pytest

from ingot.schema.metric_files import MISSING
from ingot.watch.series import Points, StepSeries, thinned


def series_of(steps, **options) -> StepSeries:
    series = StepSeries("loss", "norm", **options)
    for step in steps:
        series.add(step, 100.0 + step, (float(step), -float(step)))
    return series


def test_a_step_back_makes_later_rows_void():
    series = series_of(range(1, 11))
    assert series.go_back(6)
    assert series.last_step == 6
    assert not series.go_back(6)
    series.add(7, 200.0, (70.0, 0.0))
    assert series.points("loss").values.tolist() == [1, 2, 3, 4, 5, 6, 70]
    (void,) = series.void_points("loss")
    assert void.steps.tolist() == [7, 8, 9, 10]
    assert series.points("loss", 3, 5).steps.tolist() == [3, 4, 5]


def test_every_stretch_of_void_steps_is_a_line_of_its_own():
    series = series_of([1, 2, 3, 4, 2, 3, 4, 2, 3])
    assert [part.steps.tolist() for part in series.void_points("loss")] == [[2, 3, 4], [2, 3, 4]]
    assert series.points("loss").steps.tolist() == [1, 2, 3]


def test_of_many_void_stretches_only_the_newest_are_made(monkeypatch):
    series = series_of([step for _ in range(300) for step in range(1, 9)])
    series.add(5, 300.0, (50.0, 0.0))
    parts = [list(range(1, 9)) for _ in range(299)] + [[5, 6, 7, 8]]
    made, column = [], StepSeries._column
    monkeypatch.setattr(StepSeries, "_column", lambda self, rows, name: made.append(1) or column(self, rows, name))
    assert [part.steps.tolist() for part in series.void_points("loss")] == parts[-8:]
    assert [part.steps.tolist() for part in series.void_points("loss", 3, 4)] == [[3, 4]] * 8
    assert [part.steps.tolist() for part in series.void_points("loss", 7)][-2:] == [[7, 8], [7, 8]]
    assert series.void_points("loss", 9) == []
    assert len(made) == 24  # not one for each of the 300


def test_rows_at_once_are_as_one_by_one():
    steps = [1, 2, 5, 3, 4, 4, 9]
    rows = StepSeries("loss", "norm").new_rows(len(steps))
    rows["step"], rows["time"] = steps, 100.0 + np.array(steps)
    rows["values"] = np.stack((np.array(steps, float), -np.array(steps, float)), axis=1)
    together, single = StepSeries("loss", "norm"), series_of(steps)
    together.extend(rows)
    for name in ("loss", "norm"):
        assert together.points(name).steps.tolist() == single.points(name).steps.tolist() == [1, 2, 3, 4, 9]
    assert len(together) == len(single) == 7


def test_missing_values_have_no_point_and_computed_nans_have():
    series = StepSeries("loss", "norm")
    series.add(1, 1.0, (1.0, MISSING))
    series.add(2, 2.0, (float("nan"), MISSING))
    assert series.points("loss").steps.tolist() == [1, 2]
    assert len(series.points("norm").steps) == 0
    assert series.newest("norm") is None
    assert np.isnan(series.newest("loss"))


def test_new_rows_are_those_that_pages_do_not_have():
    series = series_of(range(1, 6))
    assert series.added(5)["step"].tolist() == []
    series.add(6, 1.0, (6.0, 0.0))
    assert series.added(5)["step"].tolist() == [6]
    series.add(5, 1.0, (5.0, 0.0))
    assert series.added(5)["step"].tolist() == [5]


def test_memory_is_bounded_and_extremes_stay():
    series = StepSeries("loss", "norm", most_rows=1000)
    for step in range(1, 20_001):
        series.add(step, 0.0, (99.0 if step == 321 else 1.0, -99.0 if step == 4321 else 1.0))
    assert len(series) <= 1000
    assert series.skipped > 18_000
    assert series.points("loss").values.max() == 99.0
    assert series.points("norm").values.min() == -99.0
    assert series.points("loss").steps[-500:].tolist() == list(range(19_501, 20_001))


@pytest.mark.parametrize("buckets", [1, 7, 100])
def test_the_extremes_of_every_bucket_stay(buckets):
    values = np.random.default_rng(1).normal(size=5000)
    points = Points(np.arange(10, 5010), values)
    chosen = thinned(points, buckets)
    assert len(chosen) <= 5 * buckets
    assert {0, 4999, int(values.argmin()), int(values.argmax())} <= set(chosen.tolist())
    assert (np.diff(chosen) > 0).all()
    for part in np.array_split(np.arange(5000), buckets) if buckets != 7 else ():
        own = set(chosen.tolist()) & set(part.tolist())
        assert {int(part[values[part].argmin()]), int(part[values[part].argmax()])} <= own


def test_few_points_all_stay():
    points = Points(np.array([1, 5, 9]), np.array([np.nan, 1.0, np.inf]))
    assert thinned(points, 100).tolist() == [0, 1, 2]


def test_values_that_are_not_finite_stay_visible():
    values = np.ones(10_000)
    values[[5, 777, 5000]] = np.nan, np.inf, -np.inf
    chosen = thinned(Points(np.arange(10_000), values), 50)
    assert {5, 777, 5000} <= set(chosen.tolist())
    every = thinned(Points(np.arange(10_000), np.full(10_000, np.nan)), 50)
    assert 0 < len(every) <= 250


def test_steps_of_any_size_are_thinned():
    steps = np.array([*range(1000), 10**17])
    chosen = thinned(Points(steps, np.arange(1001.0)), 10)
    assert chosen[0] == 0 and chosen[-1] == 1000 and len(chosen) < 60
