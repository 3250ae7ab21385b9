"""The sections that reports and the live page share: ranks, data mix, alerts, time and money, checkpoints by tier."""

import pytest
from tests.watched import HOSTILE, START, WatchedRun

from ingot.report.alert_list import alerts_section
from ingot.report.cost import cost_rows
from ingot.report.data_mix import SourceMix, mix_blocks, source_shares
from ingot.report.facts import RunData, read_run_events
from ingot.report.ranks import level_of, open_stragglers, rank_blocks, ranks_section
from ingot.report.render.markup import render_html, render_markdown
from ingot.report.render.page import HeatMap, ReportPage
from ingot.report.tiers import tiers_table
from ingot.schema.metrics import NewestRow
from ingot.schema.run_folder import RunFolder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> RunData:
    root = WatchedRun(hostile=True).write(tmp_path_factory.mktemp("chapters") / "run")
    found = RunData(folder=RunFolder(root), run=WatchedRun().config(), plan=WatchedRun().plan())
    read_run_events(found)
    return found


def test_the_map_of_ranks_is_a_table_of_the_report(data):
    section = ranks_section(data)
    page = ReportPage("t", "", [], "c", [section])
    html, markdown = render_html(page), render_markdown(page)
    assert '<td class="r above-3">84.0 ms</td>' in html
    assert "slow, 2.1 times its peers" in html and "slow, 2.1 times its peers" in markdown
    assert HOSTILE not in html


def test_of_many_ranks_those_that_differ_are_shown():
    names = ("perf/step_seconds", "perf/backward_seconds")
    rows = {rank: NewestRow(9, START, dict(zip(names, (0.1, 0.09 if rank == 777 else 0.04), strict=True)))
            for rank in range(1000)}  # fmt: skip
    heat = next(block for block in rank_blocks(rows, {}) if isinstance(block, HeatMap))
    assert len(heat.rows) == 40
    assert {row.label: row.levels for row in heat.rows}["777"] == (0, 3)


@pytest.mark.parametrize(("value", "level"), [(1.0, 0), (1.2, 1), (1.5, 2), (9.0, 3), (0.85, -1), (0.1, -3), (0.0, -3)])
def test_shades(value, level):
    assert level_of(value, 1.0) == level


def test_a_straggler_of_an_earlier_attempt_is_over():
    event = {"rank": 3, "time": START, "ended": False}
    data = RunData(folder=RunFolder(None), stragglers=[event], starts=[{"time": START - 1}])
    assert list(open_stragglers(data)) == [3]
    data.starts.append({"time": START + 1})
    assert open_stragglers(data) == {}


def test_open_alerts_come_first(data):
    section = alerts_section(data)
    assert section.blocks[0].text == "1 open of 2 alerts."
    assert [row[0] for row in section.blocks[1].rows] == ["straggler (rank 2)", "spike"]


def test_time_and_money(data):
    rows = dict(cost_rows(data))
    assert rows["Cost so far"] == "$0.04"
    assert rows["Steps trained again"].startswith("50, about 5.0 s")
    assert rows["Cost by the plan"] == "$12.00"


def test_a_checkpoint_that_is_gone_says_so(data):
    table = tiers_table(data)
    assert table.header == ("Step", "Size", "On disk", "Read back and compared")
    assert table.rows[0] == ("400", "14.0 MiB", "was removed", "when it was saved")


def test_the_mix_is_shown_beside_what_was_asked():
    shares = [SourceMix(source="web", asked=0.7, found=0.75, epochs=1.5),
              SourceMix(source="books", asked=0.3, found=0.25, epochs=0.2)]  # fmt: skip
    _, bars = mix_blocks(shares, 10, 10)
    assert bars.rows[0].values == ("75.0%", "70.0%", "+5.0%", "1.50")


def test_without_its_tokens_a_run_has_no_mix(data):
    assert source_shares(data.folder.root, 400) == ([], 0)
