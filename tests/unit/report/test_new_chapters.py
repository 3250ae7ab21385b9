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
from ingot.report.write import build_page
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


def test_money_of_void_steps_was_spent_and_their_tokens_do_not_count(tmp_path, logs):
    """The lines of steps 250 and 300 are void: their cost stays, and all else is that of the newest valid line."""

    def line(clock, step):
        return {"kind": "progress", "time": logs.START + clock, "step": step, "tokens": step * 1000,
                "tokens_per_second": 1000.0, "data_wait_seconds": 0.0, "step_seconds": 1.0, "cost_usd": clock / 100,
                "eta_seconds": 900.0 - step, "loss": 2.0}  # fmt: skip

    def step(clock, number, loss):
        return {"kind": "step", "time": logs.START + clock, "step": number, "loss": loss, "grad_norm": 1.0, "lr": 1e-3}

    back = {"kind": "rolled_back", "time": logs.START + 301, "from_step": 300, "to_step": 200}
    events = [logs.started(logs.START, 0, 0), step(1, 1, 9.0), step(200, 200, 2.0), line(200, 200), line(250, 250),
              step(300, 300, 77.0), line(300, 300), back]  # fmt: skip

    def read(*more):
        found = RunData(folder=RunFolder(logs.write_events(tmp_path, [*events, *more])))
        read_run_events(found)
        return dict(cost_rows(found)), build_page(found, "")

    rows, page = read()
    assert (rows["Tokens trained on"], rows["Cost so far"], rows["Time to come"]) == ("200k", "$3.00", "11 min 40 s")
    assert {one.label: one.value for one in page.headline}["Training loss"] == "2.000"
    assert page.subtitle.endswith("at step 200")
    rows, page = read(line(320, 210))
    assert rows["Tokens trained on"] == "210k" and rows["Cost so far"] == "$3.20" and "$3.20" in page.headline[-1].note
    assert page.subtitle.endswith("at step 210")


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
