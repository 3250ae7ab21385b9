"""Errors by family, and their mean over families."""

import pytest

from ingot.planner.published.run import shipped_rows
from ingot.planner.published.score import PlannerScore, RowScore, rank_correlation, score, score_row


def rows() -> PlannerScore:
    return PlannerScore(
        (
            RowScore(id="a", family="one", step_error=0.1, speed=(1.0, 2.0)),
            RowScore(id="b", family="one", step_error=-0.3, speed=(2.0, 3.0), memory_error=0.2),
            RowScore(id="c", family="one", step_error=0.2, speed=(3.0, 1.0), over=True, judged=True),
            RowScore(id="d", family="two", step_error=0.5, ran_out=True, over=True),
            RowScore(id="e", family="two", skipped="nothing to compare with"),
        )
    )


def test_each_family_is_scored_by_itself():
    families = rows().families
    assert families["one"] == {
        "n": 3, "step_time_mape": 20.0, "step_time_median_error": 10.0, "memory_mape": 20.0,
        "rank_correlation": -0.5, "oom_called": 0, "oom_false": 1,
    }  # fmt: skip
    assert families["two"]["n"] == 1
    assert families["two"]["oom_called"] == 1
    assert families["two"]["memory_mape"] is None


def test_the_mean_is_over_families_not_rows():
    assert rows().mean("step_time_mape") == pytest.approx((20 + 50) / 2)
    assert rows().mean("memory_mape") == pytest.approx(20)


def test_facts_have_every_row():
    facts = rows().facts()
    assert set(facts) >= {"families", "rows", "step_time_mape"}
    assert facts["rows"][4] == {"id": "e", "predicted": {}, "measured": {}, "skipped": "nothing to compare with"}


def test_rank_correlation_with_ties():
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == 1
    assert rank_correlation([1, 2, 3], [30, 20, 10]) == -1
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None


def test_a_few_shipped_rows_from_end_to_end():
    by_id = {row.id: row for row in shipped_rows()}
    wanted = ("nemo2407-llama2-7b-8", "tt-8b-fsdp-8-compile", "zb-1f1b-6.2b-m24", "maxtext-tpuv5e-16b-1x")
    found = score([by_id[name] for name in wanted])
    assert [row.skipped for row in found.rows] == [None] * 4
    assert all(row.step_error is not None and abs(row.step_error) < 0.4 for row in found.rows)
    one = found.rows[1]
    assert one.predicted["tok_s_gpu"] == pytest.approx(16 * 8192 / 8 / one.predicted["step_s"], rel=1e-3)
    assert one.measured["tok_s_gpu"] == 6667
    assert found.rows[3].measured["step_s_from"] == "FLOP/s"
    assert 0 < found.rows[2].predicted["bubble"] < 0.5


def test_what_a_row_prints_is_predicted_in_the_rows_own_convention():
    """A row's TFLOP/s may count recomputation, its MFU attention in full: their error is that of the step."""
    rows = [row for row in shipped_rows() if row.number("measured", "tflops_gpu")][:40:3]
    for row, found in ((row, score_row(row)) for row in rows):
        assert found.step_error is not None
        printed = row.number("measured", "tflops_gpu")
        assert printed and found.predicted["tflops_gpu"] == pytest.approx(printed / (1 + found.step_error), rel=1e-3)
