"""Checkpoints with right hashes that a resume would refuse are found by loading them."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.expect import refused

from ingot.cli.main import main
from ingot.plugins.callback import StepCallback
from ingot.schema.checkpoint import WEIGHTS, FileEntry, file_of
from ingot.storage import sha256_file
from ingot.trainer.checkpoint.manifest import parse_manifest, read_manifest, write_manifest
from ingot.trainer.launch import deep
from ingot.trainer.launch.deep import inspect_deep
from ingot.trainer.launch.inspect import RESUMES_HERE, WEIGHTS_ALONE, inspect_checkpoints

GOLDEN = Path(__file__).parents[3] / "golden"
RANKS = 2


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of two ranks that trained four steps, and its checkpoint."""
    return Path(shutil.copytree(GOLDEN / "dense-2-ranks", tmp_path / "run"))


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000004"


def forge(path: Path, rank: int, change) -> None:
    """Change the tensors in the file of a rank, and the manifest, so that every hash is right."""
    file = path / file_of(rank)
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    manifest = parse_manifest(path, (path / "manifest.json").read_bytes())
    entry = FileEntry(bytes=file.stat().st_size, sha256=sha256_file(file))
    write_manifest(path, replace(manifest, files=manifest.files | {file.name: entry}))


def found(path: Path):
    """Return the state and the note of each save, which has its hashes."""
    assert inspect_checkpoints(path, hash_files=True).exit_code == 0
    inspected = inspect_deep(path)
    assert inspected.exit_code == (21 if any(row.state == "NO" for row in inspected.checkpoints) else 0)
    return [(row.state, row.note) for row in inspected.checkpoints]


@pytest.mark.parametrize("name", ["dense-2-ranks", "experts-2-ranks", "old/layouts", "old/experts"])
def test_a_sound_checkpoint_of_any_layout_and_format_loads(name):
    assert found(GOLDEN / name) == [("yes", RESUMES_HERE)]


def test_a_missing_tensor_is_found(run):
    manifest = read_manifest(newest(run))
    tensors = {name: entry for name, entry in manifest.tensors.items() if name != "optim.exp_avg.embed.weight"}
    write_manifest(newest(run), replace(manifest, tensors=tensors))
    assert found(run) == [("NO", "tensor optim.exp_avg.embed.weight: the checkpoint lacks it")]


def test_a_model_of_another_shape_is_found(run, capsys):
    text = (run / "run.toml").read_text()
    assert text.count("d_ffn = ") == 1
    lines = ["d_ffn = 96" if line.startswith("d_ffn = ") else line for line in text.splitlines()]
    (run / "run.toml").write_text("\n".join(lines) + "\n")
    ((state, note),) = found(run)
    assert state == "NO" and "in the checkpoint" in note and "in the model" in note
    assert main(["ckpt", "verify", str(run)]) == 0
    assert main(["ckpt", "verify", str(run), "--deep"]) == 21
    assert "loads" in capsys.readouterr().out


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_random_state_that_is_none_is_found_on_every_rank(run, rank):
    forge(newest(run), rank, lambda tensors: tensors.update({"random.cpu": torch.zeros(16, dtype=torch.uint8)}))
    ((state, note),) = found(run)
    assert state == "NO" and f"random state of rank {rank}" in note


def test_values_that_are_not_finite_are_named_by_parameter(run):
    def change(tensors):
        for key in [key for key in tensors if key.startswith(("model.embed", "optim.exp_avg.embed"))]:
            tensors[key].view(-1)[0] = float("nan")
        tensors[next(key for key in tensors if key.startswith("model.blocks.0"))].view(-1)[-1] = float("inf")

    forge(newest(run), 0, change)
    ((state, note),) = found(run)
    assert state == "NO" and "NaN or infinity in " in note
    assert "model.embed.weight" in note and "optim.exp_avg.embed.weight" in note and "model.blocks.0." in note


class Choosy(StepCallback):
    """Refuses every record."""

    def __init__(self, run, options):
        pass

    def restore(self, record):
        raise ValueError(f"no record {record}")


def test_a_callback_that_refuses_its_record_is_found(run, register):
    register(Choosy)
    with (run / "run.toml").open("a") as file:
        file.write("\n[callbacks.probe]\n")
    assert found(run) == [("yes", RESUMES_HERE)]  # a checkpoint without a record of it
    write_manifest(newest(run), replace(read_manifest(newest(run)), callbacks={"probe": 7}))
    ((state, note),) = found(run)
    assert state == "NO" and "no record 7" in note


def test_weights_alone_load_as_weights(run):
    manifest, path = read_manifest(newest(run)), run / "weights" / "step-00000004"
    shutil.copytree(newest(run), path)
    tensors = {name: entry for name, entry in manifest.tensors.items() if name.startswith("model.")}
    alone = replace(manifest, kind=WEIGHTS, ledger=(), tensors=tensors)
    write_manifest(path, alone)
    assert found(run) == [("yes", RESUMES_HERE), ("yes", WEIGHTS_ALONE)]
    assert found(path) == [("yes", WEIGHTS_ALONE)]
    first = min(tensors)
    write_manifest(path, replace(alone, tensors={name: tensors[name] for name in tensors if name != first}))
    assert found(run)[1] == ("NO", f"tensor {first.removeprefix('model.')}: the checkpoint lacks it")


def test_a_checkpoint_that_does_not_fit_is_not_loaded(run, monkeypatch):
    monkeypatch.setattr(deep, "read_machine", lambda: type("Machine", (), {"available_bytes": 1000}))
    with refused("E-CKPT-MEMORY", free_bytes=1000):
        inspect_deep(run)


def test_the_process_is_as_before(run):
    before = torch.get_rng_state(), torch.get_num_threads(), torch.distributed.is_initialized()
    inspect_deep(run)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (torch.get_num_threads(), torch.distributed.is_initialized()) == before[1:]


def test_a_copy_outside_of_a_run_is_refused(run, tmp_path):
    copy = shutil.copytree(newest(run), tmp_path / "away" / "x" / "step-00000004")
    with refused("E-RUN-NOT-FOUND"):
        inspect_deep(Path(copy))
