"""The measured figures that follow from what a row states; and the rows that ship."""

import json

import pytest
from tests.expect import refused

from ingot.planner.published.run import PublishedRun, SkippedRow, published_run, read_rows, shipped_rows
from ingot.planner.published.score import RowScore, score_row
from ingot.theory.flops import train_flops_per_token
from ingot.theory.layout import positions

MODEL = {"layers": 32, "hidden": 4096, "ffn": 11008, "heads": 32, "vocab": 32000, "seq": 4096, "act": "swiglu"}
PLAN = {"dp": 8, "fsdp_zero": 3, "global_batch": 32, "micro_batch": 1, "precision": "bf16"}
CLUSTER = {"gpu": "A100-80", "n_gpus": 8, "gpus_per_node": 8, "peak_tflops": 312}


def measured(tmp_path, *, plan=None, **values):
    one = {"id": "a", "family": "f", "model": MODEL, "plan": PLAN | (plan or {}), "cluster": CLUSTER}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [one | values]}))
    found = published_run(read_rows(path)[0])
    assert isinstance(found, PublishedRun), found
    return found


def seconds(tmp_path, **values) -> float:
    found = measured(tmp_path, **values).measured.step_seconds
    assert found is not None
    return found


def test_the_rows_own_step_time_comes_first(tmp_path):
    found = measured(tmp_path, measured={"step_s": 2.0, "tok_s_gpu": 1.0})
    assert (found.measured.step_seconds, found.measured.derived) == (2.0, "")


def test_step_time_from_throughput(tmp_path):
    found = measured(tmp_path, measured={"tok_s_gpu": 4096})
    assert found.measured.step_seconds == pytest.approx(32 * 4096 / (8 * 4096))


def test_step_time_from_mfu_counts_flops_as_the_row_does(tmp_path):
    half = {"mfu_pct": 50}
    flops = train_flops_per_token(measured(tmp_path, measured=half).run.model, 4096, causal=False)
    full = seconds(tmp_path, measured=half)
    assert full == pytest.approx(32 * 4096 * flops / (8 * 156e12))
    assert seconds(tmp_path, measured=half, flops_convention="causal attention (half), logits included") < full


def test_hardware_flops_count_what_is_recomputed(tmp_path):
    model = seconds(tmp_path, plan={"recompute": "full"}, measured={"tflops_gpu": 100, "tflops_kind": "model"})
    hardware = seconds(tmp_path, plan={"recompute": "full"}, measured={"tflops_gpu": 100, "tflops_kind": "hardware"})
    assert hardware == pytest.approx(4 / 3 * model)


def test_shares_of_a_low_precision_peak_are_not_compared(tmp_path):
    found = measured(tmp_path, plan={"precision": "fp8"}, measured={"mfu_pct": 40})
    assert found.measured.step_seconds is None


def test_device_hours_hold_more_than_steps(tmp_path):
    hours = {"gpu_hours": 1000, "tokens": 32 * 4096 * 1000}
    found = measured(tmp_path, measured=hours)
    assert found.measured.step_seconds == pytest.approx(0.9 * 1000 * 3600 / 8 / 1000)
    logged = measured(tmp_path, measured=hours, note="hours computed from logged iteration time")
    assert logged.measured.step_seconds == pytest.approx(1000 * 3600 / 8 / 1000)


def test_memory_by_unit_and_by_who_counted(tmp_path):
    gib = measured(tmp_path, measured={"step_s": 1, "mem_gb": 10, "mem_kind": "GiB peak, max over ranks"})
    assert gib.measured.memory_bytes == 10 * 2**30
    assert gib.measured.memory_without == ("runtime",)
    allocated = measured(tmp_path, measured={"step_s": 1, "mem_gb": 10, "mem_kind": "GB, max-allocated"})
    assert allocated.measured.memory_bytes == 10e9
    assert allocated.measured.memory_without == ("runtime", "fragmentation")


def test_shipped_rows_have_their_sources_and_can_all_be_laid_out():
    rows = shipped_rows()
    assert len(rows) > 300
    assert all(row.text("source") and row.text("url").startswith("http") for row in rows)
    found = [published_run(row) for row in rows]
    assert not [one for one in found if isinstance(one, SkippedRow)]
    for one in found:
        assert isinstance(one, PublishedRun)
        parallel = one.run.parallel
        assert parallel.world_size == one.row.count("cluster", "n_gpus") or one.row.count("cluster", "n_gpus") is None
        assert len(positions(one.run, one.software)) == parallel.pp
        if parameters := one.row.number("model", "params"):
            counted = train_flops_per_token(one.run.model, 1) / 6
            assert counted < 1.1 * parameters


@pytest.mark.parametrize(
    "values",
    [
        {}, {"id": 3, "family": None}, {"id": "x", "model": []}, {"id": "x", "model": {"layers": "many"}},
        {"id": "x", "model": MODEL, "cluster": CLUSTER, "plan": None, "measured": {"step_s": 1}},
        {"id": "x", "model": MODEL, "cluster": CLUSTER | {"n_gpus": 7}, "plan": {"tp": 5}, "measured": {"step_s": 1}},
        {"id": "x", "model": MODEL | {"heads": 7}, "cluster": CLUSTER, "plan": PLAN, "measured": {"mem_gb": 1}},
        {"id": "x", "model": MODEL, "cluster": CLUSTER, "plan": PLAN | {"cp": 3}, "measured": {"step_s": 1}},
        {"id": "x", "model": MODEL, "cluster": CLUSTER, "plan": PLAN, "measured": {"step_s": float("nan")}},
        {"id": "x", "model": MODEL, "cluster": CLUSTER, "plan": {"tp": 1, "pp": 1e30}, "measured": {"step_s": 1}},
        {"id": "x", "model": MODEL, "cluster": CLUSTER | {"n_gpus": 1e30}, "plan": PLAN, "measured": {"step_s": 1}},
        {"id": "x", "model": MODEL | {"seq": 5}, "cluster": CLUSTER, "plan": {"tp": 8}, "measured": {"step_s": 1}},
    ],
)  # fmt: skip
def test_odd_rows_are_predicted_or_skipped_but_never_raise(tmp_path, values):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [values]}))
    found = score_row(read_rows(path)[0])
    assert isinstance(found, RowScore)
    assert found.skipped or found.predicted["step_s"] > 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "E-ROWS-SYNTAX"),
        ("{}", "E-ROWS-SHAPE"),
        ('{"rows": [1]}', "E-ROWS-SHAPE"),
        ('{"rows": []}', "E-ROWS-SHAPE"),
    ],
)
def test_files_that_are_no_published_runs(tmp_path, text, code):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with refused(code, path=str(path)):
        read_rows(path)
    with refused("E-ROWS-MISSING"):
        read_rows(tmp_path / "absent.json")
