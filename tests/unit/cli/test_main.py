"""The command line: instant help without torch, examples, suggestions, exit codes."""

import errno
import importlib
import json
import re
import subprocess
import sys

import pytest
from tests.expect import reported

from ingot.cli.ckpt_help import ABOUT
from ingot.cli.main import VERBS, main
from ingot.cli.terminal import Terminal
from ingot.errors import CheckpointError


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_help_with_examples_and_imports_no_torch(verb):
    code = (
        "import sys\nfrom ingot.cli.main import main\n"
        f"try:\n main([{verb!r}, '--help'])\nexcept SystemExit as e:\n assert not e.code\n"
        "assert 'torch' not in sys.modules, 'help imported torch'\n"
        "assert 'numpy' not in sys.modules, 'help imported numpy'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout
    assert f"ingot {verb}" in done.stdout


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_option_says_what_it_means(verb):
    import argparse

    module = importlib.import_module(f"ingot.cli.{verb}")
    parser = argparse.ArgumentParser()
    module.configure(parser)
    parsers = [parser]
    for found in parsers:
        for action in found._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += [p for p in action.choices.values() if p not in parsers]
            else:
                assert action.help, f"ingot {verb}: {action.option_strings or action.dest} has no help"


@pytest.mark.parametrize("action", ABOUT)
def test_the_help_of_an_action_on_checkpoints_names_what_it_removes_and_an_example(action, capsys):
    with pytest.raises(SystemExit):
        main(["ckpt", action, "--help"])
    shown = capsys.readouterr().out
    assert ABOUT[action] in shown and re.search("[Rr]emove", ABOUT[action])
    assert shown.partition("examples:\n")[2].startswith(f"  ingot ckpt {action} ")


def test_no_verb_prints_the_map(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == shown
    assert all(f"\n  {verb} " in shown for verb in VERBS)


def test_a_mistyped_verb_or_option_is_suggested(capsys):
    assert main(["trian"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--jsno"])
    assert caught.value.code == 2
    assert "did you mean --json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "build", "crawl.warc.gz", "--out", "data", "--wrokers=2"])
    shown = capsys.readouterr().err
    assert "did you mean --workers" in shown and shown.startswith("ingot data build: ")


def test_a_mistyped_action_is_suggested(capsys):
    with pytest.raises(SystemExit):
        main(["data", "verfy", "data"])
    assert "did you mean 'verify'" in capsys.readouterr().err


@pytest.mark.parametrize("line", [["trian", "--json"], ["data", "verfy", "--json"], ["doctor", "--jsno", "--json"]])
def test_a_usage_error_under_json_is_an_object(capsys, line):
    try:
        code = main(line)
    except SystemExit as stop:
        code = stop.code
    facts = json.loads(capsys.readouterr().out)
    assert code == facts["exit_code"] == 2 and facts["kind"] == "E-USAGE" and "did you mean" in facts["found"]


def test_help_names_the_exit_code_of_an_interruption(capsys):
    main(["--help"])
    assert "130 interrupted" in capsys.readouterr().out


def test_options_are_never_abbreviated(capsys):
    for line in (["plan", "--mod", "tiny"], ["data", "build", "crawl.warc.gz", "--out", "data", "--work", "2"]):
        with pytest.raises(SystemExit):
            main(line)
        assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "out/web.tokens"),
            "E-DISK-FULL  the disk of out/web.tokens is full, or its quota is reached (No space left on device)",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "a disk is full, or its quota is reached (Disk quota exceeded)"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), "out: Permission denied"),
    ],
)
def test_what_the_system_refuses_is_a_message_and_no_traceback(monkeypatch, capsys, error, message):
    def refuse(args, terminal):
        raise error

    monkeypatch.setattr("ingot.cli.doctor.run", refuse)
    assert main(["doctor"]) == 3
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert main(["doctor", "-v"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_json_mode_prints_one_object_and_no_text(capsys):
    terminal = Terminal(json_mode=True)
    terminal.say("hidden")
    terminal.table([["hidden"]])
    terminal.next("hidden")
    terminal.result({"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    terminal.error(CheckpointError("E-CHECKPOINT-TORN", "torn", fix="ingot ckpt verify", step=7))
    out = capsys.readouterr()
    assert json.loads(out.out) == {
        "error": "E-CHECKPOINT-TORN",
        "kind": "E-CKPT",
        "found": "torn",
        "fix": "ingot ckpt verify",
        "facts": {"step": 7},
        "exit_code": 21,
    }
    assert "torn" in out.err


def test_no_color_unless_a_terminal_asks(capsys):
    Terminal().say(Terminal().style("plain", "red"))
    Terminal().progress(0.5, "no bar in a pipe")
    assert capsys.readouterr().out == "plain\n"


def test_a_verb_whose_part_is_not_installed_names_the_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    for name in [
        n
        for n in sys.modules
        if n.startswith(("ingot.trainer.export", "ingot.hub", "ingot.trainer.checkpoint", "ingot.trainer.model"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "hf"), "--json"]) == 3
    reported(capsys.readouterr().out, "E-PART-MISSING", part="train")


def test_an_error_is_printed_with_its_code_rule_and_fix(capsys, tmp_path):
    """The layout of the text; what it says is tested by codes and facts."""
    assert main(["status", str(tmp_path / "absent")]) == 2
    first, rule, fix, more = capsys.readouterr().err.splitlines()
    assert first.startswith("E-RUN-FOLDER  ") and str(tmp_path / "absent") in first
    assert rule.startswith("  rule: ") and fix.startswith("  fix:  ") and len(rule) > 20 and len(fix) > 20
    assert more == "  more: ingot explain E-RUN-FOLDER"


def test_a_name_in_a_narrow_column_is_broken_after_an_underscore(capsys):
    rows = [("fineweb", "duplicate_line_characters 55, terminal_punctuation 7", "custom rules " * 9)]
    Terminal().table(rows, ("stage", "by", "what ran"))
    column = capsys.readouterr().out.splitlines()
    assert max(map(len, column)) <= 80
    Terminal().table([("a" * 40, "x " * 40, "duplicate_line_characters 55")], right=(0,))
    parts = [part for line in capsys.readouterr().out.splitlines() for part in line.split() if part[0] not in "ax"]
    assert parts == ["duplicate_line_", "characters", "55"]


@pytest.mark.parametrize("columns", ["40", "200"])
def test_tables_fit_80_columns_and_lose_no_text(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    long, address = "all rules but terminal punctuation and bad words " * 3, "https://example.org/" + "a" * 90
    rows = [("gopher", 1_234_567, long, address), ("c4", 5, "short", "http://b.example/")]
    Terminal().table(rows, ("stage", "left", "what ran", "url"), right=(1,))
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if address not in line) <= 80 and len(lines) > 3
    assert lines[0].split() == ["stage", "left", "what", "ran", "url"]
    place, last = lines[0].index("what ran"), lines[0].index("url")
    below = lines[1:-1]
    assert " ".join(line[place : last - 2].strip() for line in below).split() == long.split()
    assert lines[1][last:] == address  # whole, so that it can be copied
    assert lines[-1].split() == ["c4", "5", "short", "http://b.example/"]
