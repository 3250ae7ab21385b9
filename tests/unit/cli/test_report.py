"""`ingot report` and `ingot export` as a user calls them."""

import json

import pytest
from tests.expect import reported

from ingot.cli.main import main


def a_run(folder):
    start = {"kind": "run_started", "time": 1.7e9, "from_step": 0, "world_size": 2, "parameters": 10, "device": "cpu"}
    step = {"kind": "step", "time": 1.7e9 + 1, "loss": 5.0, "grad_norm": 1.0, "lr": 0.1}
    events = [start, step | {"step": 1}, step | {"step": 2, "loss": 4.25}]
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return folder


def test_report_writes_both_files_beside_the_run(tmp_path, capsys):
    assert main(["report", str(a_run(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert "4.250" in out
    assert str(tmp_path / "report.html") in out
    assert (tmp_path / "report.html").stat().st_size > 5_000
    assert (tmp_path / "report.md").read_text().startswith("# ")


def test_report_as_json_in_another_folder(tmp_path, capsys):
    out = tmp_path / "reports" / "a"
    assert main(["report", str(a_run(tmp_path)), "--out", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["html"] == str(out / "report.html")
    assert {"label": "Training loss", "value": "4.250", "note": "nats per token, 5.00 at the start"} in facts[
        "headline"
    ]
    assert not (tmp_path / "report.html").exists()


def test_report_of_no_run_says_the_way_out(tmp_path, capsys):
    assert main(["report", str(tmp_path), "--json"]) == 2
    assert reported(capsys.readouterr().out, "E-RUN-NO-LOG", run=str(tmp_path))["fix"]
    nothing = str(tmp_path / "nothing")
    for command in (["report"], ["status"], ["explain", "slow"]):
        assert main([*command, nothing, "--json"]) == 2
        assert reported(capsys.readouterr().out, "E-RUN-FOLDER", run=nothing)["found"].endswith("does not exist")


def test_export_of_no_run_says_the_way_out(tmp_path, capsys):
    pytest.importorskip("torch")
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "hf"), "--json"]) == 2
    reported(capsys.readouterr().out, "E-RUN-NOT-FOUND", path=str(tmp_path))
    assert not (tmp_path / "hf").exists()
