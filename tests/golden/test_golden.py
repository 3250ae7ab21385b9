"""Artifacts of an earlier version are read, verified, reported, exported and trained on by this one."""

import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.expect import reported

from ingot.cli.main import main

HERE = Path(__file__).parent
RUNS = json.loads((HERE / "expected.json").read_text())  # run -> [loss, gradient norm] of each step, never stopped
OLD = sorted(path.parent.name for path in HERE.glob("old/*/run.toml"))  # made by older commits
OTHER_RANKS = ("dense-2-ranks", "experts-1-rank")  # the slow tests continue them, `make test` the others
STOP, STEPS = 4, 6
CLOSE = 1e-4  # relative: another processor or torch version adds in another order


@pytest.fixture
def golden(tmp_path) -> Path:
    """A copy of the artifacts, which a test may change."""
    return Path(shutil.copytree(HERE, tmp_path / "golden", ignore=shutil.ignore_patterns("*.py", "__pycache__")))


def ingot(capsys, *arguments: str | Path) -> dict:
    """Run one command in this process. Returns what it prints with --json."""
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    return json.loads(printed.out)


def steps_of(run: Path) -> list[list[float]]:
    """[loss, gradient norm] of each step in the event log of `run`, in order."""
    log = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [[event["loss"], event["grad_norm"]] for event in log if event["kind"] == "step"]


def assert_close(found: list[list[float]], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=CLOSE)


@pytest.mark.parametrize("name", RUNS)
def test_checkpoints_and_runs_are_read(name, golden, capsys):
    checked = ingot(capsys, "ckpt", "verify", golden / name)
    assert [(c["step"], c["state"]) for c in checked["checkpoints"]] == [(STOP, "yes")]
    assert ingot(capsys, "status", golden / name)["step"] == STOP
    report = ingot(capsys, "report", golden / name)
    assert Path(report["html"]).stat().st_size and Path(report["markdown"]).stat().st_size


@pytest.mark.parametrize("name", ["dense-2-ranks", "experts-2-ranks"])
def test_a_checkpoint_is_exported(name, golden, tmp_path, capsys):
    pytest.importorskip("torch")
    exported = ingot(capsys, "export", golden / name, "--out", tmp_path / "model")
    assert exported["step"] == STOP and (tmp_path / "model" / "model.safetensors").is_file()
    assert exported["max_logit_difference"] <= 1e-5


@pytest.mark.parametrize("name", ["dense-2-ranks", "experts-2-ranks"])
def test_a_checkpoint_is_converted_there_and_back(name, golden, tmp_path, capsys):
    """To a Hugging Face folder, and from that to a project whose run starts with the weights of the checkpoint."""
    torch = pytest.importorskip("torch")
    from ingot.theory.rules import load_run
    from ingot.trainer.checkpoint.load import load_model
    from ingot.trainer.export.model_folder import TRAINING_ONLY, first_weights
    from ingot.trainer.model.transformer import Transformer

    converted = ingot(capsys, "ckpt", "convert", golden / name, tmp_path / "hf")
    ingot(capsys, "export", golden / name, "--out", tmp_path / "exported")
    assert converted["files"].keys() == {path.name for path in (tmp_path / "hf").iterdir()} - {"ingot.json"}
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("hf", "exported")]
    assert weights[0] == weights[1]
    ingot(capsys, "ckpt", "convert", tmp_path / "hf", tmp_path / "mine")
    run, model = load_run(tmp_path / "mine" / "run.toml"), Transformer(load_run(golden / name / "run.toml").model)
    assert run.init == "../hf"
    load_model(golden / name / "checkpoints" / f"step-{STOP:08d}", model)
    first = first_weights(tmp_path / "mine" / run.init, run.model, drawn=None)
    for key, tensor in model.state_dict().items():
        if not key.endswith(TRAINING_ONLY):
            assert torch.equal(first(key, tensor.shape, (0,) * tensor.dim(), tensor.shape), tensor), key
    assert main(["ckpt", "convert", str(tmp_path / "hf"), str(tmp_path / "x"), "--dtype", "bfloat16", "--json"]) == 2
    reported(capsys.readouterr().out, "E-CONVERT-DTYPE", dtype="bfloat16")


def test_corpus_and_tokens_verify(golden, capsys):
    checked = ingot(capsys, "data", "verify", golden / "data")["verified"]
    assert sorted(Path(one["folder"]).name for one in checked) == ["corpus", "heldout", "train"]


@pytest.mark.parametrize("name", ["dense-1-rank", "experts-2-ranks"])
def test_a_step_is_traced_to_documents(name, golden, capsys):
    traced = ingot(capsys, "data", "trace", "--run", golden / name, "--step", "2")
    assert traced["step"] == 2 and traced["documents"]


def continue_alone(run: Path) -> list[list[float]]:
    """Train the run of `run` to its end on one rank. Returns its steps after the checkpoint.

    In a fork of this process: torch's flight recorder keeps the collectives of a process, and later forks inherit them.
    """
    pytest.importorskip("torch")
    from ingot.schema.run_folder import RunFolder
    from ingot.trainer.run import run_rank

    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(run_rank(RunFolder(run)).exit_code))
    process.start()
    process.join()
    assert process.exitcode == 0
    return steps_of(run)[STOP:]


@pytest.mark.parametrize("name", RUNS)
def test_one_rank_continues_whatever_wrote_the_checkpoint(name, golden):
    run_file = golden / name / "run.toml"
    run_file.write_text(run_file.read_text().replace("dp_shard = 2", "dp_shard = 1").replace("ep = 2", "ep = 1"))
    assert_close(continue_alone(golden / name), RUNS[name][STOP:])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in OTHER_RANKS else name for name in RUNS]
)
def test_the_same_command_continues(name, golden, capsys, monkeypatch):
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    ended = ingot(capsys, "train", golden / name)
    assert (ended["finished"], ended["step"], ended["saved_step"]) == (True, STEPS, STEPS)
    assert_close(steps_of(golden / name), RUNS[name])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name != "first" else name for name in OLD]
)
def test_a_run_of_every_earlier_state_continues(name, golden, capsys, monkeypatch):
    """The bare command, without a word about settings that came later."""
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    run = golden / "old" / name
    ended = ingot(capsys, "train", run)
    assert (ended["finished"], ended["step"], ended["saved_step"]) == (True, STEPS, STEPS)
    assert_close(steps_of(run), json.loads((run / "expected.json").read_text()))


@pytest.mark.parametrize("name", OLD)
def test_a_checkpoint_of_every_earlier_state_is_written_in_another_layout(name, golden, tmp_path, capsys):
    old, new = golden / "old" / name, tmp_path / "new"
    found = ingot(capsys, "ckpt", "reshard", old, new, "--layout", "dp_shard=1")
    assert (found["step"], found["ranks"], found["layout"]) == (STOP, 1, {"dp_shard": 1})
    checked = ingot(capsys, "ckpt", "verify", new)
    assert [(c["step"], c["state"]) for c in checked["checkpoints"]] == [(STOP, "yes")]
    continue_alone(new)
    assert_close(steps_of(new), json.loads((old / "expected.json").read_text())[STOP:])


def files_in(run: Path) -> dict[str, bytes]:
    """The checkpoints and samples of `run`, by name."""
    return {
        str(path.relative_to(run)): path.read_bytes() for path in (*run.glob("checkpoints/*/*"), *run.glob("ledger/*"))
    }


@pytest.mark.parametrize("name", OLD)
def test_a_checkpoint_of_every_earlier_state_comes_back_from_a_store(name, golden, tmp_path, capsys):
    """The disk is lost after the upload. Formats are the same in a store: what was loadable there stays loadable."""
    run = golden / "old" / name
    run_file = run / "run.toml"
    assert run_file.read_text().count("[checkpoint]\n") == 1
    (tmp_path / "store").mkdir()
    store = f'[checkpoint]\nremote = {{ url = "file://{tmp_path}/store" }}\n'
    run_file.write_text(run_file.read_text().replace("[checkpoint]\n", store).replace("dp_shard = 2", "dp_shard = 1"))
    before = files_in(run)
    assert ingot(capsys, "ckpt", "push", run)["step"] == STOP
    for folder in ("checkpoints", "ledger"):
        shutil.rmtree(run / folder)
    fetched = ingot(capsys, "ckpt", "fetch", run)
    assert (fetched["step"], fetched["bytes"] > 0) == (STOP, True)
    assert files_in(run) == before and len(before) == 4  # two ranks, manifest, samples
    continue_alone(run)
    assert_close(steps_of(run)[STOP:], json.loads((run / "expected.json").read_text())[STOP:])


@pytest.mark.parametrize(
    ("edit", "code", "exit_code"),
    [("optim.lr=0.001", "E-RUN-CHANGED", 11), ("model.d_ffn=32", "E-RUN-OTHER-MODEL", 3)],
)
def test_an_edit_that_needs_more_than_the_bare_command(golden, capsys, edit, code, exit_code):
    before = (golden / "dense-1-rank" / "events.jsonl").read_bytes()
    assert main(["train", str(golden / "dense-1-rank"), "--set", edit, "--json"]) == exit_code
    reported(capsys.readouterr().out, code, keys=[edit.partition("=")[0]])
    assert (golden / "dense-1-rank" / "events.jsonl").read_bytes() == before
