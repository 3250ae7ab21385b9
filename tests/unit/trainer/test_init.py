"""A run that begins with a model from elsewhere: read once, at step 0; refused where it is another model."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.expect import named, refused

from ingot.config import to_toml
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.folders import find_weights
from ingot.trainer.checkpoint.load import load_model
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.trainer.export import saved_weights as module
from ingot.trainer.export.model_folder import write_model
from ingot.trainer.export.saved_weights import saved_weights
from ingot.trainer.launch.checks import preflight
from ingot.trainer.model.transformer import Transformer

from .test_loop import run_rank, step_facts


@pytest.fixture
def begins_elsewhere(make_run, tmp_path):
    """begins_elsewhere(name) -> its RunFolder; the model is in tmp_path / "hf"."""

    def make(name: str):
        folder = make_run(name, dp_shard=2)
        config = load_run(folder.config)
        if not (tmp_path / "hf").exists():
            torch.manual_seed(7)
            (tmp_path / "hf").mkdir()
            write_model(tmp_path / "hf", config.model, Transformer(config.model).state_dict(), eot_id=0)
        folder.config.write_text(to_toml(replace(config, init="../hf")))
        return folder

    return make


@pytest.mark.slow
def test_a_run_that_has_a_checkpoint_reads_the_folder_no_more(fork_ranks, make_run, begins_elsewhere, tmp_path):
    whole, broken, drawn = begins_elsewhere("whole"), begins_elsewhere("broken"), make_run("drawn", dp_shard=2)
    fork_ranks(run_rank, 2, whole)
    fork_ranks(run_rank, 2, broken, 7)
    fork_ranks(run_rank, 2, drawn, 2)
    shutil.rmtree(tmp_path / "hf")
    assert [ending for ending, _ in fork_ranks(run_rank, 2, broken)] == [(12, False)] * 2
    assert step_facts(broken) == step_facts(whole)
    assert step_facts(whole)[1] != step_facts(drawn)[1]


@pytest.mark.parametrize(
    ("change", "there"), [({"num_layers": 1}, 2), ({"max_seq_len": 65}, 64), (None, None)], ids=str
)
def test_what_does_not_fit_is_refused_before_training(fork_ranks, begins_elsewhere, tmp_path, change, there):
    folder = begins_elsewhere("run")
    config = load_run(folder.config)
    if change:
        folder.config.write_text(to_toml(replace(config, model=replace(config.model, **change))))
    else:
        (tmp_path / "hf" / "model.safetensors").write_bytes(b"torn")

    def expect_refusal(rank, ranks):
        with refused("E-HF-INIT-DIFFERS" if change else "E-WEIGHTS-READ") as caught:
            run_rank(rank, ranks, folder)
        if not change:
            return Path(caught.value.facts["path"]).resolve() == tmp_path / "hf" / "model.safetensors"
        ((key, value),) = change.items()
        return named(caught.value.facts["problems"], f"model.{key}", value, there)

    assert fork_ranks(expect_refusal, 2) == [True, True]
    assert not list_checkpoints(folder.checkpoints)


def test_a_run_starts_from_a_save_of_another_run_in_any_layout(fork_ranks, make_run, tmp_path):
    """Two ranks save the weights of step 4 and a checkpoint of step 6; one rank starts from the first of them."""
    source = make_run("source", dp_shard=2, weights_every="4 steps")
    fork_ranks(run_rank, 2, source, 6)
    arch = load_run(source.config).model
    saves = {source.root: 6, source.checkpoint(6): 6, source.weights.checkpoint(4): 4}
    wholes = {}
    for folder, step in saves.items():
        whole = Transformer(arch)
        assert load_model(find_weights(folder)[1], whole).step == step
        wholes[step], read = whole, saved_weights(folder, arch, drawn=None)
        for name, tensor in whole.state_dict().items():
            offsets = [size // 2 for size in tensor.shape]
            sizes = [size - first for size, first in zip(tensor.shape, offsets, strict=True)]
            block = tensor[tuple(slice(first, None) for first in offsets)]
            assert torch.equal(read(name, tensor.shape, offsets, sizes), block), name
    (tmp_path / "hf").mkdir()
    write_model(tmp_path / "hf", arch, wholes[4].state_dict(), eot_id=0)
    first = {}
    for name, init in {"ours": f"../{source.root.name}/weights/step-00000004", "theirs": "../hf"}.items():
        folder = make_run(name, dp_shard=1)
        folder.config.write_text(to_toml(replace(load_run(folder.config), init=init)))
        preflight(folder, load_run(folder.config), print)
        fork_ranks(run_rank, 1, folder, 1)
        first[name] = step_facts(folder)
    assert first["ours"] == first["theirs"]


def test_all_ranks_start_from_the_save_that_rank_0_finds(make_run, fork_ranks, monkeypatch):
    """The source still trains: rank 1 looks before its checkpoint of step 4 is finished, rank 0 after that."""
    source = make_run("source", dp_shard=1, every_steps=2)
    fork_ranks(run_rank, 1, source, 4)
    arch = load_run(source.config).model
    name, shape = "norm.weight", [arch.d_model]

    def first_values(rank, ranks):
        if rank:
            monkeypatch.setattr(module, "find_weights", lambda path: (source, source.checkpoint(2)))
        return saved_weights(source.root, arch, drawn=None)(name, shape, [0], shape).tolist()

    ours, theirs = fork_ranks(first_values, 2)
    assert ours == theirs


def test_a_save_that_is_damaged_or_of_another_model_is_refused(make_run, fork_ranks):
    source = make_run("source", dp_shard=2)
    fork_ranks(run_rank, 2, source, 2)
    arch = load_run(source.config).model
    with refused("E-HF-INIT-DIFFERS"):
        saved_weights(source.checkpoint(2), replace(arch, num_layers=1), drawn=None)
    file = source.checkpoint(2) / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)
    read = saved_weights(source.root, arch, drawn=None)
    with refused("E-CKPT-HASH", file=file.name):
        for name, tensor in Transformer(arch).state_dict().items():
            read(name, tensor.shape, [0] * tensor.dim(), tensor.shape)
    empty = make_run("empty", dp_shard=1)
    empty.config.write_text(to_toml(replace(load_run(empty.config), init="../source/checkpoints/step-00000001")))
    with refused("E-RUN-NOT-FOUND"):
        preflight(empty, load_run(empty.config), print)
