"""`ingot plan score`: its table, its JSON, its errors."""

import json

import pytest
from tests.expect import reported

from ingot.cli.main import main
from ingot.planner.published.run import shipped_rows


@pytest.fixture
def file(tmp_path):
    wanted = ("tt-8b-fsdp-8-eager", "tt-8b-fsdp-8-compile", "mpt-1b-h100-8-s512-mb56-bf16", "kor22-f1-22B-seqsel")
    rows = [dict(row.values) for row in shipped_rows() if row.id in wanted]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [*rows, {"id": "nothing", "family": "empty"}]}))
    return path


def test_json_has_families_and_rows(file, capsys):
    assert main(["plan", "score", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["families"]) == {"torchtitan", "llm_foundry", "korthikanti2022", "empty"}
    assert set(found["families"]["torchtitan"]) == {
        "n", "step_time_mape", "step_time_median_error", "memory_mape", "rank_correlation", "oom_called", "oom_false",
    }  # fmt: skip
    means = [f["step_time_mape"] for f in found["families"].values() if f["step_time_mape"] is not None]
    assert found["step_time_mape"] == pytest.approx(sum(means) / len(means), abs=0.01)
    by_id = {row["id"]: row for row in found["rows"]}
    assert by_id["nothing"]["skipped"]
    assert by_id["tt-8b-fsdp-8-eager"]["measured"]["step_s"] == 2.8435
    assert by_id["kor22-f1-22B-seqsel"]["predicted"]["mem_gb"] == pytest.approx(55.12, rel=0.1)


def test_text_is_a_table(file, capsys):
    assert main(["plan", "score", str(file), "--rows"]) == 0
    text = capsys.readouterr().out
    assert "mean over families" in text
    assert "skipped   nothing: " in text
    assert "tt-8b-fsdp-8-eager" in text


def test_leaving_out_changes_the_numbers(file, capsys):
    results = []
    for extra in ([], ["--leave-one-out"]):
        assert main(["plan", "score", str(file), "--json", *extra]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert [found["leave_one_out"] for found in results] == [False, True]
    assert results[0]["step_time_mape"] != results[1]["step_time_mape"]


def test_bad_files(tmp_path, capsys):
    assert main(["plan", "score", str(tmp_path / "absent.json")]) == 3
    bad = tmp_path / "bad.json"
    bad.write_text("[")
    assert main(["plan", "score", str(bad), "--json"]) == 20
    reported(capsys.readouterr().out, "E-ROWS-SYNTAX", path=str(bad))
