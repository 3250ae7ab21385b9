"""`ingot explain` as a user calls it."""

import json

import pytest
from tests.expect import reported

from ingot.cli.main import main
from ingot.config import to_toml
from ingot.schema.arch import Arch
from ingot.schema.run import Checkpoint, Data, RunConfig, Train
from ingot.schema.run_folder import RunFolder
from ingot.trainer.resilience.lock import RunLock

ARCH = Arch(
    vocab_size=256, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=176, max_seq_len=64
)


@pytest.fixture
def slow_run(tmp_path):
    """A run that waits for its data, 0.04 of 0.1 seconds a step, and saves at each tenth for half a second."""
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    train = Train(steps=200, seq_len=64, global_batch=8, micro_batch=8)
    config = RunConfig(
        name="thirsty", model=ARCH, data=Data(tokens="t"), train=train, checkpoint=Checkpoint(every_steps=10)
    )
    folder.config.write_text(to_toml(config))
    events = [{"kind": "run_started", "time": 1.7e9, "from_step": 0, "world_size": 1, "device": "cpu"}]
    for step in range(10, 51, 10):
        events.append({"kind": "progress", "time": 1.7e9 + step, "step": step, "tokens": 1, "tokens_per_second": 1.0,
                       "step_seconds": 0.1, "data_wait_seconds": 0.04})  # fmt: skip
        events.append({"kind": "checkpoint", "time": 1.7e9 + step, "step": step, "bytes": 1, "stall_seconds": 0.5})
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_slow_names_causes_in_their_order_with_remedies(slow_run, capsys):
    assert main(["explain", "slow", str(slow_run.root)]) == 0
    out = capsys.readouterr().out
    assert "thirsty   is not running, step 50 of 200" in out
    assert out.index("1. checkpoint stall") < out.index("2. data stall")
    assert "-> checkpoint.every_steps = 200" in out and "saves" in out
    assert "unknown   there is no plan.json: planned now" in out
    assert f"ingot train {slow_run.root} --set checkpoint.every_steps=200" in out


def test_slow_as_json_of_a_run_that_goes_on(slow_run, capsys):
    with RunLock(slow_run.lock):
        assert main(["explain", "slow", str(slow_run.root), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["running"] and facts["planned_step_seconds"] == 0
    assert [cause["name"] for cause in facts["causes"]] == ["checkpoint stall", "data stall"]
    assert facts["causes"][1]["seconds"] == pytest.approx(0.04)


def test_slow_of_a_finished_run_does_not_send_it_on(slow_run, capsys):
    slow_run.config.write_text(slow_run.config.read_text().replace("steps = 200", "steps = 50", 1))
    assert main(["explain", "slow", str(slow_run.root)]) == 0
    out = capsys.readouterr().out
    assert "step 50 of 50" in out and f"Next:  ingot report {slow_run.root}" in out and "ingot train" not in out


def test_slow_of_no_run_says_the_way_out(tmp_path, capsys):
    assert main(["explain", "slow", str(tmp_path)]) == 2
    assert "E-RUN-NO-LOG" in capsys.readouterr().err
    assert main(["explain", "slow", str(tmp_path), "--json"]) == 2
    error = reported(capsys.readouterr().out, "E-RUN-NO-LOG", run=str(tmp_path))
    assert error["exit_code"] == 2 and error["fix"]


@pytest.mark.parametrize("topic", ["mem", "time", "comms", "bubble", "lr", "batch"])
def test_topics_are_explained_with_numbers(topic, capsys):
    assert main(["explain", topic, "--model", "smollm2-135m", "--tokens", "1B", "--cluster", "2xh100", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["topic"] == topic and any(any(c.isdigit() for c in line) for line in facts["lines"])


def test_a_run_file_is_explained_as_it_is(slow_run, capsys):
    assert main(["explain", "mem", str(slow_run.config), "--cluster", "8xh100"]) == 0
    before = capsys.readouterr().out
    change = ["--set", "train.micro_batch=2"]
    assert main(["explain", "mem", str(slow_run.config), "--cluster", "8xh100", *change]) == 0
    assert capsys.readouterr().out != before


@pytest.mark.parametrize(
    "words",
    [
        ["time"],
        ["time", "run.toml", "--model", "tiny"],
        ["time", "--model", "tiny", "--tokens", "1B", "--set", "a.b=1"],
        ["nothing", "run.toml"],
    ],
)
def test_what_cannot_be_explained_is_a_usage_error(words, capsys):
    try:
        code = main(["explain", *words])
    except SystemExit as stop:  # argparse's own
        code = stop.code
    assert code == 2 and capsys.readouterr().err


def test_a_code_is_explained(capsys):
    assert main(["explain", "e-run-folder"]) == 0
    assert "cause:" in capsys.readouterr().out
    assert main(["explain", "E-RUN-FOLDER", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["code"] == "E-RUN-FOLDER" and facts["meaning"] and facts["causes"] and facts["fix"]


def test_an_unknown_code_suggests_similar_ones(capsys):
    assert main(["explain", "E-RUN-FOLDR", "--json"]) == 2
    facts = json.loads(capsys.readouterr().out)
    assert facts["error"] == "E-CODE-UNKNOWN" and "E-RUN-FOLDER" in facts["facts"]["similar"]
    assert main(["explain", "E-CHANGED", "--json"]) == 2  # part of a code, and not the most similar ones by letters
    assert json.loads(capsys.readouterr().out)["facts"]["similar"][0].endswith("-CHANGED")


def test_without_a_topic_the_topics_are_listed_and_with_the_prefix_all_codes(capsys):
    assert main(["explain"]) == 0
    assert "slow" in capsys.readouterr().out
    assert main(["explain", "E-", "--json"]) == 0
    packages = json.loads(capsys.readouterr().out)["packages"]
    assert {"cli", "report"} <= packages.keys() and "E-RUN-FOLDER" in packages["report"]
