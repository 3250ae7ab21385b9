"""The verbs of planning as a user meets them: doctor, init, plan, check."""

import json

import pytest

from ingot.cli.main import main


def out(capsys):
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_init_plan_check(capsys, tmp_path):
    assert main(["init", "demo"]) == 0
    assert "created demo/run.toml" in out(capsys)
    assert main(["plan", "--run", "demo/run.toml"]) == 0
    text = out(capsys)
    assert "880 x 2,048 tokens" in text
    assert main(["check", "demo/run.toml"]) == 3
    text = out(capsys)
    assert "ingot data build" in text and "Nothing was started" in text


def test_a_large_plan_needs_no_machine_of_that_size(capsys):
    command = ["plan", "--model", "llama3-8b", "--tokens", "1.5T", "--cluster", "16x8xh100", "--explain", "all"]
    assert main(command) == 0
    text = out(capsys)
    assert "8.03B parameters" in text and "MFU" in text and "$" in text and "memory.activations" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_a_plan_under_json_is_one_object(capsys):
    assert main(["plan", "--model", "tiny", "--tokens", "1.3M", "--json", "--out", "run.toml"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["plan"]["parameters"] > 10**6 and facts["run"]["train"]["steps"] > 0


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["plan"], 2, "either --run or --model"),
        (["plan", "--model", "tiny"], 2, "--tokens"),
        (["plan", "--model", "tyni", "--tokens", "1M"], 2, "did you mean 'tiny'"),
        (["plan", "--model", "tiny", "--tokens", "1M", "--cluster", "8xh10"], 2, "did you mean 'h100'"),
        (["plan", "--model", "tiny", "--tokens", "1M", "--steps", "-1"], 2, "--steps"),
        (["plan", "--model", "tiny", "--tokens", "1M", "--force"], 2, "--force without --out"),
        (["plan", "--run", "absent.toml"], 3, "no run file"),
        (["plan", "--run", "absent.toml", "--steps", "3"], 2, "--set"),
        (["check", "absent.toml"], 3, "no run file"),
        (["init", "demo", "--model", "tinny"], 2, "did you mean 'tiny'"),
        (["doctor", "--ranks", "-1"], 2, "--ranks"),
        (["doctor", "--bnech"], 2, "did you mean --bench"),
        (["status", "absent"], 2, "does not exist"),
    ],
)
def test_mistakes_are_named_with_the_way_out(capsys, command, code, says):
    try:
        assert main(command) == code
    except SystemExit as stop:  # argparse
        assert stop.code == code
    assert says in out(capsys)


def test_a_written_plan_is_not_overwritten(capsys):
    command = ["plan", "--model", "tiny", "--tokens", "1.3M", "--out", "run.toml"]
    assert main(command) == 0
    assert main(command) == 2
    assert "--force" in out(capsys)


def test_doctor_prints_every_check(capsys):
    assert main(["doctor"]) == 0
    text = out(capsys)
    assert "python" in text and "memory" in text and "Next:" in text
    assert main(["doctor", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["checks"]) >= 12
