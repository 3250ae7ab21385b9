"""A run may start from a model whose config.json equals [model]; settings that act in training only are free."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.expect import refused

from ingot.hub.arch_config import huggingface_config
from ingot.hub.config_file import read_arch, require_fit, run_of
from ingot.schema.arch import Arch, Moe
from ingot.schema.run_folder import RunFolder

from ..trainer.export.test_model_folder import DEEPSEEK, MIXTRAL

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def folder_of(tmp_path):
    def make(arch: Arch):
        (tmp_path / "config.json").write_text(json.dumps(huggingface_config(arch, eot_id=0, dtype="float32")))
        assert read_arch(tmp_path) == arch
        return tmp_path

    return make


def with_moe(arch: Arch, **changes) -> Arch:
    return replace(arch, moe=replace(arch.moe, **changes))


@pytest.mark.parametrize(
    ("there", "ours"),
    [
        (MIXTRAL, replace(MIXTRAL, max_seq_len=8)),
        (MIXTRAL, with_moe(MIXTRAL, noise=0.1, sequence_loss=0.1, global_loss=0.2, z_loss=0.3)),
        (MIXTRAL, with_moe(MIXTRAL, capacity_factor=1.5, overflow="fallback", bias_rate=0.1, bias_steps=5)),
        (DEEPSEEK, with_moe(DEEPSEEK, bias_rate=0.5)),
    ],
)
def test_what_acts_in_training_only_is_the_runs_own(folder_of, there, ours):
    require_fit(folder_of(there), ours)


@pytest.mark.parametrize(
    ("there", "ours", "keys"),
    [
        (MIXTRAL, replace(MIXTRAL, max_seq_len=65), ["model.max_seq_len is 65, but 64 in the folder"]),
        (MIXTRAL, replace(MIXTRAL, moe=Moe()), ["model.moe.num_experts is 0, but 4 in the folder"]),
        (MIXTRAL, replace(MIXTRAL, norm_eps=1e-5, rope_theta=1e4), ["model.norm_eps", "model.rope_theta"]),
        (MIXTRAL, with_moe(MIXTRAL, top_k=3), ["model.moe.top_k is 3, but 2 in the folder"]),
        (DEEPSEEK, with_moe(DEEPSEEK, bias_rate=0.0), ["model.moe.bias_rate is 0.0, but 0.001 in the folder"]),
        (DEEPSEEK, replace(DEEPSEEK, mla=replace(DEEPSEEK.mla, v_dim=8)), ["model.mla.v_dim"]),
    ],
)
def test_everything_else_is_named(folder_of, there, ours, keys):
    with refused("E-HF-INIT-DIFFERS") as error:
        require_fit(folder_of(there), ours)
    assert all(any(key in problem for problem in error.value.facts["problems"]) for key in keys)


def test_a_run_folder_and_what_it_saved_name_the_model_of_the_run(tmp_path, folder_of):
    run = RunFolder(tmp_path)
    shutil.copy(GOLDEN / "dense-2-ranks" / "run.toml", run.config)
    (run.root / "models" / "hf").mkdir(parents=True)
    for place in (tmp_path, run.checkpoint(4), run.weights.checkpoint(4)):
        assert run_of(place).root == tmp_path.resolve() and read_arch(place).d_model == 16
    assert run_of(tmp_path / "models" / "hf") is None
    folder_of(MIXTRAL)  # a config.json: the folder of a model, although a run file is there
    assert run_of(tmp_path) is None
