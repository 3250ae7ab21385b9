"""A run that begins with a model from elsewhere: read once, at step 0; refused where it is another model."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.expect import named, refused

from ingot.config import to_toml
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.trainer.export.model_folder import write_model
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
