"""The part of a report about experts: its sentences, its charts, and its robustness."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.config import to_toml
from ingot.report.experts import NAMES, counted, load_cells, load_map
from ingot.report.facts import gather
from ingot.report.render.markup import render_html, render_markdown
from ingot.report.write import build_page, write_report
from ingot.schema.arch import Mla, Moe
from ingot.schema.run_folder import RunFolder
from ingot.trainer.telemetry.progress import expert_load


def experts_event(time: float, step: int, counts, dropped=0.0, with_loads=True, overflow="drop") -> dict:
    """Return the event that the trainer writes: counts [layers, experts] of 100 tokens with an entropy of 1.25 nats."""
    counts = np.asarray(counts, dtype=np.float64)
    rest = np.array([[dropped * row.sum(), 125.0, 100.0] for row in counts])
    load = expert_load(
        np.concatenate((counts, rest), 1), range(1, 1 + len(counts)), step=step, steps=10, with_loads=with_loads,
        overflow=overflow,
    )  # fmt: skip
    return json.loads(json.dumps({"kind": "experts", "time": time, **asdict(load)}))


def run_of(tmp_path, logs, *events):
    return logs.write_events(tmp_path, [logs.started(logs.START, 0, 0), *events])


UNEVEN = [[50, 30, 20, 0], [25, 25, 25, 25]]


def test_loads_are_told_by_layer(tmp_path, logs):
    """Layer 1: 50 of 100 to one of 4 experts is 2x its share; deviation of (2, 1.2, 0.8, 0) is 0.721."""
    report = write_report(run_of(tmp_path, logs, experts_event(logs.START + 1, 20, UNEVEN, dropped=0.125)))
    markdown = report.markdown.read_text()
    assert "the busiest expert had 2.0x its share (layer 1)" in markdown
    assert "12.50% of the assignments were beyond the capacity of their expert, and dropped" in markdown
    assert "| 1 | 0.721 | 2.00 | 0.00 | 1.250 | 12.50% |" in markdown
    assert "| 2 | 0.000 | 1.00 | 1.00 | 1.250 | 12.50% |" in markdown
    assert 'id="experts"' in report.html.read_text()


def test_the_map_of_cells_has_experts_from_the_busiest_to_the_idlest():
    few = load_cells([1, 2], [[0.2, 4.0, 1.0, 0.8], [1.0, 1.0, 1.0, 1.0]])
    assert few.header == ("Layer", "busiest", "2", "3", "idlest")
    assert (few.rows[0].label, few.rows[0].values) == ("1", ("4.00", "1.00", "0.80", "0.20"))
    assert few.rows[0].levels == (3, 0, 0, -3) and few.rows[1].levels == (0, 0, 0, 0)
    many = load_cells(list(range(90)), [[number / 50 for number in range(101)]] * 90)
    assert len(many.rows) == 40 and many.rows[-1].label == "89"
    assert many.header[:3] == ("Layer", "busiest", "9%") and many.header[-1] == "idlest"
    assert len(many.header) == 13 and (many.rows[0].values[0], many.rows[0].values[-1]) == ("2.00", "0.00")
    assert load_cells([0], [[1.0]]).header == ("Layer", "busiest")


def test_what_a_fallback_expert_takes_is_not_called_dropped(tmp_path, logs):
    events = [experts_event(logs.START + s, s, UNEVEN, dropped=0.125, overflow="fallback") for s in (10, 20)]
    report = write_report(run_of(tmp_path, logs, *events))
    markdown = report.markdown.read_text()
    assert "12.50% of the assignments were beyond the capacity of their expert, and taken by the fallback" in markdown
    assert "| To fallback |" in markdown and "**To the fallback expert" in markdown
    section = markdown[markdown.index("Experts") :]
    assert "ropped" not in section[: section.find("\n## ", 1)]


def test_an_event_from_before_there_was_such_a_number_is_read(tmp_path, logs):
    event = experts_event(logs.START, 10, UNEVEN)
    del event["fallback"]
    assert list(gather(run_of(tmp_path, logs, event)).experts) == [10]


def test_where_all_are_taken_nothing_is_said_to_be_dropped(tmp_path, logs):
    events = [experts_event(logs.START + s, s, UNEVEN, overflow="") for s in (10, 20)]
    markdown = write_report(run_of(tmp_path, logs, *events)).markdown.read_text()
    assert "capacity" not in markdown and "Idlest expert (x mean load)" in markdown


def test_a_dense_run_has_no_such_part(tmp_path, logs):
    assert "Experts" not in write_report(run_of(tmp_path, logs)).markdown.read_text()


def test_charts_go_over_the_run_and_the_map_shows_the_last_loads_there_are(tmp_path, logs):
    events = [
        experts_event(logs.START + s, s, [[50 - s, 25, 25, s], [25] * 4], with_loads=s == 20) for s in (10, 20, 25)
    ]
    markdown = write_report(run_of(tmp_path, logs, *events)).markdown.read_text()
    for title in ("Deviation of loads", "Busiest expert", "Entropy of a token", "Dropped, beyond capacity"):
        assert f"**{title}" in markdown
    assert "4 experts of each layer, steps up to 20" in markdown
    assert "Loads by layer, steps up to 25" in markdown


def test_a_step_done_again_replaces_its_first_try(tmp_path, logs):
    events = [experts_event(logs.START, 10, [[100, 0, 0, 0]]), experts_event(logs.START + 9, 10, [[25] * 4])]
    facts = gather(run_of(tmp_path, logs, *events))
    assert [event["max_load"] for event in facts.experts.values()] == [[1.0]]


def rects(svg: str) -> list[dict]:
    return [element.attrib for element in ElementTree.fromstring(svg).iter("rect")]


def test_the_map_has_a_row_a_layer_sorted_from_the_busiest():
    svg = load_map([3, 4], [[0.1, 3.0, 0.9], [1.0, 1.0, 1.0]], width=400, label="a<b")
    drawn = rects(svg)
    assert [r["class"] for r in drawn] == ["above-2", "even", "below-3", "even"]
    starts, widths = [float(r["x"]) for r in drawn], [float(r["width"]) for r in drawn]
    assert starts[1] == pytest.approx(starts[0] + widths[0], abs=0.2)
    assert sum(widths[:3]) == pytest.approx(widths[3], abs=0.2)
    assert drawn[0]["y"] == drawn[2]["y"] != drawn[3]["y"]
    assert re.findall(r">(\d+)<", svg) == ["3", "4"]


def test_every_edge_belongs_to_the_class_above_it():
    assert counted([0.0, 0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 64.0]) == [1, 1, 1, 2, 1, 1, 2]
    assert len(NAMES) == 7


def test_the_map_of_the_largest_model_is_small_and_inside_its_picture():
    loads = np.random.default_rng(0).gamma(1.0, 1.0, (58, 256))
    svg = load_map(range(3, 61), loads.tolist(), width=350, label="loads")
    assert len(svg) < 60_000
    root = ElementTree.fromstring(svg)
    height = float(root.attrib["height"])
    for r in rects(svg):
        assert float(r["x"]) >= 0 and float(r["x"]) + float(r["width"]) <= 350.1
        assert float(r["y"]) >= 0 and float(r["y"]) + float(r["height"]) <= height


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)


def test_no_value_of_any_field_breaks_the_report(tmp_path, logs):
    good = [experts_event(logs.START + s, s, UNEVEN) for s in (10, 20, 30)]

    @settings(max_examples=60, deadline=None)
    @given(st.sampled_from(sorted(good[0])), st.integers(0, 2), json_values, st.booleans())
    def check(name, number, value, inside):
        events = json.loads(json.dumps(good))
        target = events[number]
        if inside and isinstance(target[name], list):
            target[name][0] = value
        else:
            target[name] = value
        page = build_page(gather(run_of(tmp_path, logs, *events)), "ingot train")
        assert render_html(page) and render_markdown(page)

    check()


def test_an_event_whose_lists_do_not_match_is_counted_not_used(tmp_path, logs):
    event = experts_event(logs.START, 10, UNEVEN) | {"min_load": [1.0]}
    markdown = write_report(run_of(tmp_path, logs, event)).markdown.read_text()
    assert "1 event could not be read" in markdown and "Experts" not in markdown


def test_no_feed_forward_is_named_where_all_blocks_have_experts(tmp_path, logs):
    config = logs.run_config()
    arch = replace(config.model, moe=Moe(num_experts=8, d_expert=32))
    folder = RunFolder(run_of(tmp_path, logs))
    folder.config.write_text(to_toml(replace(config, model=arch)))
    markdown = write_report(tmp_path).markdown.read_text()
    assert "8 of width 32 in a layer, 2 for a token" in markdown and "feed-forward" not in markdown


def test_settings_name_experts_attention_and_the_layout_of_each_attempt(tmp_path, logs):
    config = logs.run_config()
    arch = replace(
        config.model,
        moe=Moe(num_experts=64, top_k=6, d_expert=1408, shared_experts=2, first_dense=1),
        mla=Mla(kv_rank=512, nope_dim=16, rope_dim=16, v_dim=32),
        num_kv_heads=4,
        sliding_window=256,
    )
    starts = [
        logs.started(logs.START, 0, 0) | {"layout": {"pp": 2, "dp_shard": 4, "ep": 4}},
        logs.started(logs.START + 1, 1, 40) | {"layout": {"pp": 2, "dp_shard": 4, "ep": 4}},
        logs.started(logs.START + 2, 2, 80) | {"layout": {"dp_shard": 2, "tp": 2}},
    ]
    RunFolder(logs.write_events(tmp_path, starts)).config.write_text(to_toml(replace(config, model=arch)))
    markdown = write_report(tmp_path).markdown.read_text()
    assert "64 of width 1,408 in a layer, 6 for a token, 2 shared, after 1 dense layer" in markdown
    assert f"feed-forward {arch.d_ffn}" in markdown
    assert "4 heads of 32, latents of 512, window of 256 tokens" in markdown
    assert "pp 2 x dp\\_shard 4, ep 4; dp\\_shard 2 x tp 2 from step 80" in markdown
