"""The table shows every row, and what was recorded is not played again."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ingot.drill import clean
from ingot.drill.faults import FAULTS
from ingot.drill.job import RUN_VARIABLE
from ingot.drill.oracles import Verdicts
from ingot.drill.rows import NOT_PLAYED
from ingot.events import EventLog
from ingot.schema.run_folder import RunFolder

from . import ALL, MISSING
from . import __main__ as board
from .row import Row, carry_out
from .table import CASES, cases_of, restores_of, table_of, with_all_points


def test_every_row_of_the_design_is_in_the_table():
    listed = {name.split()[0] for name in [*MISSING, *(row.id for row in ALL)]}
    assert listed == {*(f"RS{number:02d}" for number in range(1, 37)), "RD1", "RD2", "RD3"}
    verdicts = Verdicts()
    verdicts.judge("o1", "here", "step 3 | differs")
    verdicts.judge("o3", "here", "")
    green = Verdicts()
    green.judge("o1", "here", "")
    table = table_of([green.as_json("RS09", 0), verdicts.as_json("RS10", 1)])
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()[2:]}
    assert set(rows) == {*MISSING, *(row.id for row in ALL)}
    assert "**RED** in 1" in rows["RS10"] and "**NO**" in rows["RS10"] and "step 3 / differs" in rows["RS10"]
    assert "passes" in rows["RS09"] and "not run" in rows["RS11"]
    assert len({line.count("|") for line in table.splitlines()}) == 1


def test_a_drill_plays_each_row_of_the_board_or_gives_the_reason():
    rows, played = {row.id for row in ALL}, {fault.id for fault in FAULTS}
    assert sorted(row.id for row in NOT_PLAYED) == sorted(rows - played)
    assert {name.split()[0] for name in played - rows} <= {name.split()[0] for name in rows}  # variants
    assert all(row.injects and row.why for row in NOT_PLAYED)


@pytest.mark.parametrize("finding", ["", "wrong"])
def test_a_row_that_asked_nothing_does_not_pass(finding):
    verdicts = Verdicts()
    assert verdicts.as_json("RS09", 0)["passed"] is False
    verdicts.judge("o2", "case", finding)
    line = verdicts.as_json("RS09", 0)
    assert (line["passed"], line["o2"], line["o1"]) == (not finding, not finding, None)


def _line(row, seed, *cases):
    verdicts = Verdicts()
    verdicts.judge("o2", "case", "")
    for fault, place, outcome, finding in cases:
        since = verdicts.findings
        verdicts.judge("o6", place, finding)
        verdicts.came_of(fault, place, outcome, since)
    return json.loads(json.dumps(verdicts.as_json(row, seed)))


LINES = (
    _line("RS09", 0, ("kill, sync", "manifest: rename", "step 4", ""), ("power, sync", "samples: write", "step 4", "")),
    _line(
        "RS09", 1, ("kill, sync", "manifest: rename", "step 8", ""), ("kill, sync", "manifest: rename", "step 4", "")
    ),
    _line("RS09", 4, ("kill, sync", "samples: write", "step 4", "")),
    _line("RS09", 2, ("power, sync", "samples: write", "step 4", "torn")),
    _line("RS09", 3),  # of a row, or of an earlier board, that records no cases
    _line("RS13", 0, ("503", "PUT manifest", "whole", "")),
)
_ROWS = {"RS09", "RS09 disks", "RS09 memory", "RS09 weights"}
SHAPES = tuple(_line(row, 0, ("kill, shape", "tensors: write", "step 4", "")) for row in sorted(_ROWS - {"RS09"}))


def test_cases_are_counted_by_place_fault_and_outcome():
    assert "outcomes" not in LINES[4]
    assert cases_of(LINES).splitlines()[2:] == [
        "| 503 | 1 | whole | PUT manifest (1) |",
        "| kill, sync | 3 | step 4 | manifest: rename (2), samples: write (1) |",
        "| kill, sync | 1 | step 8 | manifest: rename (1) |",
        "| power, sync | 1 | **RED** | samples: write (1) |",
        "| power, sync | 1 | step 4 | samples: write (1) |",
    ]


def test_restores_are_counted_by_row_and_tier(tmp_path):
    """A fetch from the store counts with the load after it; nodes fetch while a checkpoint is loaded."""
    folder, verdicts = RunFolder(tmp_path), Verdicts()
    log = EventLog(folder.events)
    log.write("checkpoint_loaded", step=4, bytes=3000, seconds=0.5)
    log.write("checkpoint_fetched", step=8, store="s3://b", bytes=5000, seconds=2.0)
    log.write("checkpoint_loaded", step=8, bytes=3000, seconds=0.25)
    log.write("checkpoint_fetched", step=8, node=1, files=1, bytes=1000, whole_bytes=5000, seconds=0.5)
    log.write("checkpoint_loaded", step=8, bytes=3000, seconds=1.0)
    log.write("checkpoint_fetched", step=8, store="s3://b", bytes=4000, seconds=0.25)  # memory had a newer one
    log.write("snapshot_restored", step=9, own_bytes=2000, peer_bytes=1000, seconds=0.125)
    log.write("checkpoint_loaded", step=4, bytes=3000, seconds=0.5)
    log.close()
    for _ in range(2):  # a run that is judged twice counts once
        verdicts.restored(folder)
    verdicts.judge("o6", "case", "")
    lines = [json.loads(json.dumps(verdicts.as_json("RS07", seed))) for seed in range(2)]
    assert restores_of([*lines, *LINES]).splitlines()[2:] == [
        "| RS07 | disk | 4 | 3 | 0 | 0 | 0 | 0.50 | 0.50 |",
        "| RS07 | memory | 2 | 0 | 2 | 1 | 4 | 0.38 | 0.38 |",
        "| RS07 | store | 4 | 3 | 0 | 0 | 3 | 1.62 | 2.25 |",
    ]


def test_cases_of_a_row_with_all_points_count_once():
    played = {"points": 8.0, "played": 8.0}
    whole, sample = (SHAPES[0] | {"numbers": played | {"played": number}} for number in (8.0, 5.0))
    assert with_all_points([*LINES, sample]) == [*LINES, sample]
    assert with_all_points([*LINES, sample, whole]) == [*LINES, whole]


def test_tables_are_written_between_their_marks(tmp_path, monkeypatch):
    """Tables of cases without the rows that have them, and the table of all rows without all rows, stay."""
    page, recorded = tmp_path / "page.md", tmp_path / "lines.jsonl"
    names = ["", *(f"{name}, " for name in CASES)]
    marks = [f"<!-- begin: {name}written by python -m tests.board -->\nold\n<!-- end: {name}" for name in names]
    page.write_text("".join(f"{mark}written by python -m tests.board -->\n" for mark in marks))
    lines = [line | board.own() | {"seconds": 1.0} for line in (*LINES, *SHAPES)]
    recorded.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(board, "PAGE", page)
    monkeypatch.setattr(board.killpoints, "missing", lambda: "")
    assert board.main(["--rows", ",".join(_ROWS), "--seeds", "1", "--lines", str(recorded), "--write"]) == 1
    sections = page.read_text().split("<!-- begin: ")[1:]
    written = {part.partition("written by")[0]: part.splitlines()[1:-1] for part in sections}
    assert [name for name in names if written[name] == ["old"]] == ["", "disk faults, ", "store faults, "]
    assert f"{', '.join(sorted(_ROWS))}, seeds 0, 1, 2, 4." in written["crash points, "][0]
    assert sum("**RED**" in line for line in written["crash points, "]) == 1
    assert "| kill, shape | 3 | step 4 | tensors: write (3) |" in written["crash points, "]


def test_a_table_is_not_written_without_some_of_its_rows(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("old")
    monkeypatch.setattr(board, "PAGE", page)
    monkeypatch.setattr(board, "play", lambda *_: pytest.fail("it was played"))
    monkeypatch.setattr(board.killpoints, "missing", lambda: "")
    with pytest.raises(SystemExit):
        board.main(["--rows", "RS13,RS12", "--write"])
    refusal = capsys.readouterr().err
    assert "'store faults' has RS13, RS13 killed, RS31 store: ask for all" in refusal and "--lines" in refusal
    assert page.read_text() == "old"


def test_recorded_lines_are_not_played_again(tmp_path, monkeypatch, capsys):
    """The board takes an hour: what an earlier run has recorded counts, and each line is recorded at once."""
    played = []

    def play(bench, row, seed):
        played.append((row.id, seed))
        return Verdicts().as_json(row.id, seed) | {"seconds": 1.0, "passed": True}

    monkeypatch.setattr(board, "play", play)
    monkeypatch.setattr(board.killpoints, "missing", lambda: "")
    recorded = tmp_path / "lines.jsonl"
    assert board.main(["--rows", "RS06", "--seeds", "1", "--json", str(recorded)]) == 0
    more = ["--rows", "RS06,RS03", "--seeds", "2", "--lines", str(recorded), "--json", str(recorded)]
    assert board.main(more) == 0
    assert played == [("RS06", 0), ("RS03", 0), ("RS03", 1), ("RS06", 1)]
    lines = [json.loads(text) for text in recorded.read_text().splitlines()]
    assert len(lines) == 4 and all(line["commit"] and line["date"] and line["machine"] for line in lines)
    assert "2 rows with 2 seeds in 0.1 minutes: 0 red" in capsys.readouterr().out
    assert board.main(["--rows", "RS06,RS03", "--seeds", "1", "--lines", str(recorded)]) == 0
    assert "2 rows with 1 seeds or more in 0.1 minutes: 0 red" in capsys.readouterr().out and len(played) == 4


def test_processes_record_each_line_at_once_and_their_end_makes_rows_red(monkeypatch):
    def play(bench, row, seed):
        if (row.id, seed) == ("RS06", 1):
            raise SystemExit("killed")
        return {"id": row.id, "seed": seed, "passed": True}

    monkeypatch.setattr(board, "play", play)
    rows = {row.id: row for row in board.ALL}
    to_play = [(rows["RS06"], 0), (rows["RS06"], 1), (rows["RS06"], 2), (rows["RS03"], 0)]
    lines = {(line["id"], line["seed"]): line for line in board.play_all(to_play, 2, 0)}
    passed = {of: line["passed"] for of, line in lines.items()}
    assert passed == {("RS06", 0): True, ("RS06", 1): False, ("RS06", 2): False, ("RS03", 0): True}
    assert "killed" in str(lines["RS06", 1])


def test_a_command_that_a_row_leaves_is_found_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(clean, "END_SECONDS", 0.1)
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    started = []

    def leaves(bench, seed, verdicts):
        started.append(subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE))

    verdicts, row = Verdicts(), Row("RD9", "a command that does not end", leaves)
    carry_out(SimpleNamespace(root=tmp_path), row, 0, verdicts)
    with started[0] as process:
        assert verdicts.wrong == {"o7": [f"after the row: processes [{process.pid}] are left"]}
    assert RUN_VARIABLE not in os.environ


def test_a_row_that_this_machine_cannot_play_is_not_green(monkeypatch, capsys):
    row = replace(ALL[0], missing=lambda: "needs root")
    monkeypatch.setattr(board, "ALL", (row,))
    monkeypatch.setattr(sys.modules[board.__package__], "ALL", (row,))
    monkeypatch.setattr(board, "play", lambda *_: pytest.fail("it was played"))
    monkeypatch.setattr(board.killpoints, "missing", lambda: "")
    assert board.main(["--rows", row.id, "--seeds", "1"]) == 0
    printed = capsys.readouterr()
    (line,) = (line for line in printed.out.splitlines() if line.startswith(f"| {row.id} "))
    assert "not played" in line and "needs root" in line and "passes" not in line
    assert "0 red" in printed.out and "1 not played" in printed.out and "needs root" in printed.err
