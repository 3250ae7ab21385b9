"""Every command that reads a run file refuses a layout that its model does not allow, with the line of the run file."""

import pytest
from tests.expect import named

from ingot.cli.main import main

# Two rules of the schema and two of layouts, which one report names together.
ILLEGAL = """
name = "demo"

[model]
vocab_size = 512
d_model = 64
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 16
d_ffn = 176
max_seq_len = 128

[data]
tokens = "tokens"

[train]
steps = 10
seq_len = 64
global_batch = 8
micro_batch = 4

[schedule]
warmup_steps = 20

[parallel]
tp = 3
cp = 5
"""
TP_LINE = next(n for n, line in enumerate(ILLEGAL.splitlines(), 1) if line == "tp = 3")


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "demo" / "run.toml"
    path.parent.mkdir()
    path.write_text(ILLEGAL)
    return path


def refusal(main, command, capsys) -> str:
    assert main(command) == 3
    captured = capsys.readouterr()
    return captured.out + captured.err


def says(text: str, place: str, *words: object) -> bool:
    """Return whether a line of `text` has, after `place`, each of `words`."""
    return any(named([line.partition(place)[2]], *words) for line in text.splitlines() if place in line)


@pytest.mark.parametrize(
    "command", [["train"], ["check"], ["check", "--simulate"], ["plan", "--run"], ["plan", "--explain", "--run"]]
)
def test_a_command_refuses_an_illegal_layout_and_names_every_problem(command, run_file, capsys):
    if command[0] == "train" or "--simulate" in command:
        pytest.importorskip("torch")
    text = refusal(main, [command[0], *command[1:], str(run_file)], capsys)
    assert says(text, f"run.toml:{TP_LINE}: parallel.tp: ", 3, "model.num_heads=4", "2 or 4")
    assert says(text, f"run.toml:{TP_LINE + 1}: parallel.cp: ", 5)
    assert says(text, ": schedule.warmup_steps: ", 10)


@pytest.mark.parametrize("command", ["train", "check"])
def test_an_override_that_makes_a_layout_illegal_is_refused(command, run_file, capsys):
    if command == "train":
        pytest.importorskip("torch")
    run_file.write_text(ILLEGAL.replace("tp = 3\ncp = 5\n", "").replace("warmup_steps = 20", "warmup_steps = 2"))
    text = refusal(main, [command, str(run_file), "--set", "parallel.tp=3"], capsys)
    assert says(text, "--set parallel.tp: ", 3, "model.num_heads=4")


def test_a_rank_refuses_an_illegal_layout(run_file, capsys):
    pytest.importorskip("torch")
    from ingot.trainer.main import main as rank

    assert says(refusal(rank, [str(run_file.parent)], capsys), "parallel.tp: ", 3, "model.num_heads=4")


@pytest.mark.parametrize("command", [["status"], ["report"], ["export"]])
def test_a_reader_of_a_run_folder_refuses_an_illegal_layout(command, run_file, capsys):
    if command == ["export"]:
        pytest.importorskip("torch")
        command = ["export", "--out", str(run_file.parent / "hf")]
    (run_file.parent / "events.jsonl").write_text("")
    (run_file.parent / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run_file.parent / "checkpoints" / "step-00000001" / "manifest.json").write_text("{}")
    text = refusal(main, [command[0], str(run_file.parent), *command[1:]], capsys)
    assert says(text, "parallel.tp: ", 3, "model.num_heads=4")
