"""`ingot drill` as a command: what it prints where."""

import json

import pytest
from tests.e2e.conftest import RUN_FILE, write_tokens

from ingot.cli.main import main


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    """Return a run file whose drill shows a line and plays nothing."""
    write_tokens(tmp_path / "tokens")
    (tmp_path / "run.toml").write_text(RUN_FILE)

    def played(copy, faults, output, **_):
        output.say("reference  24 steps")
        output.progress(0.5, "RS01  step 12 of 24")
        return {"folder": str(copy.root), "rows": [], "left_out": {}, "red": [], "seconds": 1.0, "exit_code": 0}

    monkeypatch.setattr("ingot.drill.drill.drill", played)
    return tmp_path / "run.toml"


def test_json_is_alone_on_standard_output_and_progress_on_standard_error(run_file, capsys):
    assert main(["drill", str(run_file), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["red"] == []
    assert [line.split()[0] for line in printed.err.splitlines()] == ["drill", "changed", "reference"]
    assert main(["drill", str(run_file), "--json", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["red"] == [] and printed.err == ""
    assert main(["drill", str(run_file)]) == 0
    printed = capsys.readouterr()
    assert "reference  24 steps" in printed.out and printed.err == ""


def test_the_list_has_variants_and_the_rows_that_are_not_here(capsys):
    assert main(["drill", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "--rows RS03+" in shown and "RS09 disks" in shown and "not here, because" in shown
    assert main(["drill", "--list", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {"RS03", "RS03 all"} <= {row["id"] for row in printed["rows"]}
    commands = {row["id"]: row["command"] for row in printed["not_played"]}
    assert commands["RS09 disks"] == 'python -m tests.board --rows "RS09 disks" --seeds 1, in a clone of ingot'
    assert commands["RS34"].startswith("ingot drill RUN --soak")
