"""Times are judged by medians of seeds on a quiet machine, and a row that is too slow is red."""

import json
import os

import pytest

from ingot.drill.oracles import Verdicts

from . import __main__ as board
from .times import CRASH, NO_LIMITS, WARM, load_now, not_judged, too_slow


def _lines(*times, others=0.0, row="RS01", work_ms=10.0):
    facts = {"id": row, "machine": "this one", "others": others, "work_ms": work_ms, "passed": True}
    return [{"seed": seed, "detect_s": one, "recover_s": two, **facts} for seed, (one, two) in enumerate(times)]


FAST = _lines((0.04, 0.8), (0.05, 0.9), (0.03, 0.7))


def test_the_median_of_the_seeds_is_judged_by_the_limits():
    assert too_slow(CRASH, FAST, []) == []
    assert too_slow(CRASH, _lines((0.04, 0.8), (1.4, 7.0), (0.05, 0.9)), []) == []  # one seed may be slow
    detected, again = too_slow(CRASH, _lines((0.04, 0.8), (1.4, 7.0), (1.2, 6.5)), [])
    assert detected == "detected after 1.20 s, the median of 3; the limit is 1 s"
    assert again == "trained again after 6.50 s, the median of 3; the limit is 6 s"
    assert too_slow(WARM, _lines((0.5, 2.9)), []) == []
    assert "after its detection after 2.60 s" in too_slow(WARM, _lines((0.5, 3.1)), [])[0]


def test_a_row_whose_times_are_lost_is_not_green():
    """A row that no longer records when its fault was seen would pass for ever."""
    (lost,) = too_slow(CRASH, _lines((None, 0.8)), [])
    assert lost == "no seed shows when it was detected, whose limit is 1 s"


def test_nothing_is_judged_on_a_busy_machine():
    slow = _lines((9.0, 99.0), (9.0, 99.0), others=3.0)
    assert too_slow(CRASH, slow, FAST) == []
    assert not_judged(CRASH, slow) == "times of 2 seeds not judged: up to 3 other programs per core"
    old = [{key: value for key, value in line.items() if key != "others"} for line in slow]
    assert too_slow(CRASH, old, FAST) == []
    assert not_judged(CRASH, old) == "times of 2 seeds not judged: no load on record"
    assert not_judged(CRASH, FAST) == not_judged(NO_LIMITS, slow) == ""
    assert "detected after 2.00 s" in too_slow(CRASH, [*slow, *_lines((2.0, 3.0))], [])[0]


def test_a_median_of_more_than_twice_the_recorded_one_is_found():
    ours = _lines((0.1, 1.9))
    assert too_slow(NO_LIMITS, ours, FAST) == [
        "trained again after 1.90 s, the median of 1; more than 2 times the 0.80 s on record"
    ]
    assert too_slow(NO_LIMITS, _lines((0.1, 1.5)), FAST) == []
    assert too_slow(NO_LIMITS, ours, [line | {"machine": "another one"} for line in FAST]) == []
    assert too_slow(NO_LIMITS, ours, [line | {"recover_s": None} for line in FAST]) == []
    assert too_slow(NO_LIMITS, _lines((0.1, 3.9), work_ms=25.0), FAST) == []
    (slower,) = too_slow(NO_LIMITS, _lines((0.1, 4.1), work_ms=25.0), FAST)
    assert slower.endswith("more than 2 times the 0.80 s on record, on a machine 2.5 times as slow")
    assert len(too_slow(NO_LIMITS, _lines((0.1, 1.9), work_ms=4.0), FAST)) == 1  # a faster machine excuses nothing
    without = [{key: value for key, value in line.items() if key != "work_ms"} for line in FAST]
    assert too_slow(NO_LIMITS, ours, without) == []


def test_the_load_is_that_of_others():
    load = load_now()
    assert set(load) == {"load", "others", "work_ms"} and min(load.values()) >= 0 and load["work_ms"] > 0


@pytest.fixture
def played(tmp_path, monkeypatch):
    """`played(*words, seconds=S)`: the exit code of the board and its lines, of rows that take S to train again; a line
    has the process that played it."""
    monkeypatch.setattr(board, "RECORD", tmp_path / "record.jsonl")
    monkeypatch.setattr(board.killpoints, "missing", lambda: "")
    board.RECORD.write_text("")

    def plays(*words, seconds):
        def play(bench, row, seed):
            verdicts = Verdicts(detect=[0.04], recover=[seconds])
            verdicts.judge("o1", "case", "")
            facts = {"seconds": 1.0, "others": 0.0, "load": 2.5, "work_ms": 10.0, "process": os.getpid()}
            return verdicts.as_json(row.id, seed) | facts

        monkeypatch.setattr(board, "play", play)
        file = tmp_path / "lines.jsonl"
        code = board.main([*words, "--seeds", "2", "--json", str(file)])
        return code, [json.loads(text) for text in file.read_text().splitlines()]

    return plays


def test_a_slow_row_is_red(played, capsys):
    code, lines = played("--rows", "RS01", seconds=9.0)
    (row,) = (text for text in capsys.readouterr().out.splitlines() if text.startswith("| RS01 |"))
    assert code == 1 and all(line["passed"] for line in lines)
    assert "**RED**: slow" in row and "the limit is 6 s" in row and "| 2.50 |" in row
    board.RECORD.write_text("".join(json.dumps(line | {"recover_s": 0.5}) + "\n" for line in lines))
    assert played("--rows", "RS01", seconds=0.8)[0] == 0
    assert played("--rows", "RS01", seconds=2.0)[0] == 1
    assert "more than 2 times the 0.50 s on record" in capsys.readouterr().out


def test_rows_with_limits_are_played_with_none_beside_them(played):
    code, lines = played("--rows", "RS01,RS06,RS08,RS30", "--workers", "2", seconds=0.8)
    assert code == 0 and {line["id"] for line in lines[:4]} == {"RS01", "RS08"}
    assert [line["process"] == os.getpid() for line in lines] == [True] * 4 + [False] * 4
