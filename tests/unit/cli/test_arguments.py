"""Options within ranges, with units, and never empty, on the real command line."""

import json

import pytest
from tests.expect import reported

from ingot.cli.main import main

PLAN = ["plan", "--model", "tiny", "--tokens", "1M"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "read"),
    [
        (["--seq", "1k", "--batch", "4"], 1_000),
        (["--seq", "1Ki", "--batch", "4"], 1_024),
        (["--seq", "0.5k", "--batch", "4"], 500),
        (["--seq", "128"], 128),
    ],
)
def test_a_sequence_length_takes_units(capsys, options, read):
    assert main([*PLAN, *options, "--cluster", "h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["train"]["seq_len"] == read


@pytest.mark.parametrize(
    ("line", "option", "value", "limits"),
    [
        ("plan --model tiny --tokens 1M --seq 0", "seq", 0, [1, 10**9]),
        ("plan --model tiny --tokens 1M --seq 1T", "seq", 10**12, [1, 10**9]),
        ("plan --model tiny --tokens 1M --steps -1", "steps", -1, [1, 10**9]),
        ("plan --model tiny --tokens 1M --tp 1T", "tp", 10**12, [0, 10**9]),
        ("plan --model tiny --tokens 1M --lr 1e300", "lr", 1e300, [1e-12, 100.0]),
        ("explain mem --model tiny --tokens 1M --seq 1T", "seq", 10**12, [1, 10**9]),
        ("train run.toml --until-step 1T", "until-step", 10**12, [1, 10**9]),
        ("data build a --out data --vocab-size 1T", "vocab-size", 10**12, [1, 10**8]),
        ("sample run --temperature -1", "temperature", -1.0, [0.0, 1e6]),
    ],
)
def test_a_number_out_of_range_names_the_option_and_its_range(capsys, line, option, value, limits):
    assert main([*line.split(), "--json"]) == 2
    reported(capsys.readouterr().out, "E-OPTION-RANGE", option=option, value=value, range=limits)


@pytest.mark.parametrize(
    "words",
    [
        [*PLAN, "--out", ""],
        [*PLAN, "--run", " "],
        [*PLAN, "--steps", "1.5"],
        [*PLAN, "--steps", "1" * 5_000],
        [*PLAN, "--seq", "many"],
        ["data", "build", "crawl", "--out", ""],
        ["data", "build", "", "--out", "data"],
        ["train", ""],
        ["quickstart", "--dir", ""],
        ["export", "runs/a", "--out", ""],
        ["report", ""],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_an_empty_path_or_a_number_that_is_none_is_a_mistake_of_usage(capsys, tmp_path, words):
    with pytest.raises(SystemExit) as stop:
        main([*words, "--json"])
    assert stop.value.code == 2
    assert json.loads(capsys.readouterr().out)["error"] == "E-OPTION-INVALID"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["a\0b", "\udce4"])
def test_an_argument_that_is_not_text_is_refused(capsys, word):
    assert main(["init", word, "--json"]) == 2
    reported(capsys.readouterr().out, "E-ARGUMENT-TEXT")


@pytest.mark.parametrize("value", ["[" * 5_000, "0x" + "f" * 5_000, "{a = " * 5_000])
def test_a_pinned_value_that_would_exhaust_the_parser_is_refused(capsys, value):
    assert main([*PLAN, "--pin", f"tp={value}", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"] in ("E-CONFIG-NESTING", "E-CONFIG-NUMBER")
