"""Numbers that are recorded by name, where people see them: the report, the page and the terminal."""

import json
import time

import pytest
from tests.watched import WatchedRun

from ingot.report.facts import gather
from ingot.report.measured import device_blocks
from ingot.report.render.page import HeatMap, TableBlock
from ingot.report.write import write_report
from ingot.schema import events
from ingot.schema.metric_files import TableWriter, lineage_folder
from ingot.schema.metrics import NewestRow
from ingot.watch.chapters import chapters
from ingot.watch.charts import chart, chart_keys
from ingot.watch.live import LiveRun
from ingot.watch.web.as_json import chart_json

OF_RUN = ("source_loss", "update_ratio", "param_norm", "layer_norms", "activations", "saturation", "route_flips",
          "goodput", "cost_to_come")  # fmt: skip


def measured(step: int, layers: int, factor: float = 1.0) -> list[dict]:
    """The events of a log line in which layers and routes were measured, too."""
    line = {"train/param_norm": 10.0 + step, "train/update_ratio": 1e-3 * factor, "run/goodput": 0.9,
            "run/cost_to_come_usd": 100.0 - step}  # fmt: skip
    by_layer = {"grad_norm": 0.1 * factor, "activation_rms": 2.0, "activation_saturation": 0.01}
    own = {
        f"layers/{layer}/{field}": value * (1 + layer) for layer in range(layers) for field, value in by_layer.items()
    }
    facts = {"time": 1e9 + step, "step": step}
    return [
        facts | {"kind": events.MEASURED, "values": line},
        facts | {"kind": events.MEASURED, "values": own | {"layers/other/grad_norm": 0.5}},
        facts | {"kind": events.MEASURED, "values": {"experts/route_flips": 0.25}},
        facts
        | {"kind": events.SOURCES, "loss": {"web": 3.0 * factor, "code": 2.0}, "share": {"web": 0.7, "code": 0.3}},
    ]


def written(tmp_path, layers: int = 3):
    """A run that went back from step 40 to 20, and trained ten of these steps again."""
    root = WatchedRun(back=None, slow=None, ranks=1).write(tmp_path / "run")
    found = [event for step in (10, 20, 30, 40) for event in measured(step, layers, 9.0 if step > 20 else 1.0)]
    found.append({"kind": events.ROLLED_BACK, "time": 1e9 + 31, "from_step": 40, "to_step": 20, "reason": "guard",
                  "why": "", "passed_over": []})  # fmt: skip
    found += measured(30, layers, factor=2.0)
    started = json.loads((root / "events.jsonl").read_text().splitlines()[0])
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [started, *found]))
    return root


def test_the_charts_and_chapters_of_recorded_numbers(tmp_path):
    run = LiveRun(written(tmp_path)).read_all()
    assert set(OF_RUN) <= set(chart_keys([run]))
    charts = {key: found for key in OF_RUN if (found := chart([run], key)) is not None}
    lines = {key: charts[key].lines for key in OF_RUN}
    assert all(json.dumps(chart_json(found)) for found in charts.values())
    ratio = {line.style: (line.points.steps.tolist(), line.points.values.tolist()) for line in lines["update_ratio"]}
    assert ratio == {"main": ([10, 20, 30], [1e-3, 1e-3, 2e-3]), "void": ([30, 40], [1e-3 * 9.0] * 2)}
    assert [line.name for line in lines["source_loss"]] == ["web", "code"]  # the largest first
    assert lines["source_loss"][0].points.values.tolist() == [3.0, 3.0, 6.0]
    assert [line.name for line in lines["layer_norms"]] == ["layer 0", "layer 1", "layer 2", "outside of layers"]
    assert lines["route_flips"][-1].points.values.tolist() == [25.0] * 3
    found = {one.section.anchor: one.section for one in chapters(run)}
    (table,) = [block for block in found["layers"].blocks if isinstance(block, TableBlock)]
    assert table.rows[1] == ("1", "0.4", "4", "2.00%") and table.rows[3] == ("other", "0.5", "", "")
    (table,) = [block for block in found["sources"].blocks if isinstance(block, TableBlock) and not block.folded]
    assert table.rows == [("web", "70.0%", "3.000", "6.000"), ("code", "30.0%", "2.000", "2.000")]


def test_of_many_layers_the_extremes_are_drawn(tmp_path):
    run = LiveRun(written(tmp_path, layers=40)).read_all()
    drawn = chart([run], "activations")
    assert drawn is not None
    largest, median, smallest = drawn.lines
    assert [line.points.values[-1] for line in (largest, median, smallest)] == pytest.approx([80.0, 41.0, 2.0])


def test_a_report_has_the_newest_numbers_of_steps_that_count(tmp_path):
    root = written(tmp_path)
    table = TableWriter(
        lineage_folder(root / "metrics", 2, 1) / "rank-00000", ["device/power_watts"], {"line_steps": 1}
    )
    table.add(30, time.time(), {"device/power_watts": 640.0})
    table.close()
    assert gather(root).measured["train/update_ratio"] == {10: 1e-3, 20: 1e-3, 30: 2e-3}
    text = write_report(root, out=tmp_path).markdown.read_text()
    for words in ("Norm of the weights", "Loss by source", "4 layers at step 30", "Routes that flipped", "640 W"):
        assert words in text, words


def test_a_log_with_any_number_of_names_is_bounded(tmp_path):
    root = written(tmp_path)
    values = {f"layers/{layer}/grad_norm": 1.0 for layer in range(5000)}
    wrong = [{"values": values}, {"values": {"train/param_norm": 10**400}}, {"values": [1]}, {"values": {"x": "y"}}]
    with (root / "events.jsonl").open("a") as log:
        for step, event in enumerate(wrong, 40):
            log.write(json.dumps({"kind": events.MEASURED, "time": 1e9 + 50, "step": step} | event) + "\n")
    run = LiveRun(root).read_all()
    assert len(run.measured) == len(run.data.measured) == 1024
    assert run.measured["train/param_norm"].last_step == 30 and chapters(run)


def test_gpus_in_trouble_come_first():
    healthy = {"device/utilization": 0.98, "device/throttle_reasons": 1.0, "device/ecc_uncorrected": 0.0}
    rows = {rank: NewestRow(9, 1e9, healthy) for rank in range(100)}
    rows[77] = NewestRow(9, 1e9, healthy | {"device/throttle_reasons": 4.0 + 64, "device/memory_bytes": 2.0**30})
    (heat,) = [block for block in device_blocks(rows) if isinstance(block, HeatMap)]
    assert len(heat.rows) == 40 and heat.rows[0].label == "77"
    assert heat.rows[0].values == ("98%", "power limit, heat (hardware)", "0", "1.0 GiB")
    assert heat.rows[0].levels == (0, 3, 0, 0) and heat.rows[1].values[1] == "nothing"
    assert device_blocks({0: NewestRow(9, 1e9, {"perf/step_seconds": 1.0})}) == []
