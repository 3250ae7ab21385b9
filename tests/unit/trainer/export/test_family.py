"""Families of plug-ins: a model that no class of Hugging Face computes is written and read as the plug-in says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.expect import refused

from ingot.hub.arch_config import arch_of, family_of
from ingot.plugins.family import FAMILIES
from ingot.plugins.load import load_plugins
from ingot.plugins.registry import INGOT
from ingot.schema.arch import Arch
from ingot.trainer.export.model_folder import first_weights, import_huggingface, write_model
from ingot.trainer.model.init import initialize
from ingot.trainer.model.transformer import Transformer

EXAMPLES = Path(__file__).parents[4] / "examples" / "extend"
ARCH = Arch(
    vocab_size=61,
    d_model=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    d_ffn=40,
    max_seq_len=32,
    feed_forward="squared_relu",
    block="parallel",
)


@pytest.fixture
def plugins(process):
    load_plugins(["squared_relu", "parallel_block", "gated_attention", "parallel_family"], EXAMPLES)


def test_ingots_own_families_are_the_first_entries():
    own = [entry.part.name for entry in FAMILIES.entries() if entry.module == INGOT]
    assert own == ["llama", "mistral", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3"]


def test_a_model_of_plugins_is_written_read_back_and_started_from(plugins, tmp_path):
    model = Transformer(ARCH)
    initialize(model, ARCH, 3)
    write_model(tmp_path, ARCH, model.state_dict(), eot_id=0)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("parallel_llama", ["ParallelLlamaForCausalLM"])
    arch, state = import_huggingface(tmp_path)
    assert arch == ARCH and family_of(arch).title == "Llama with a parallel block"
    again = Transformer(arch)
    again.load_state_dict(state)
    ids = torch.arange(20)[None]
    assert torch.equal(again(ids), model(ids))
    value = first_weights(tmp_path, ARCH, lambda *place: pytest.fail(f"{place[0]} is not read from the folder"))
    name, own = next(iter(model.named_parameters()))
    assert torch.equal(value(name, own.shape, (0,) * own.dim(), own.shape), own)


def test_a_model_that_fits_no_family_is_refused_with_the_problems_of_all(plugins):
    with refused("E-HF-EXPORT") as caught:
        family_of(replace(ARCH, qk_norm=True))
    assert any("ParallelLlamaForCausalLM" in text and "qk_norm" in text for text in caught.value.facts["problems"])


def test_a_class_that_leaves_a_setting_out_is_refused(plugins):
    config = {"model_type": "parallel_llama", "architectures": ["ParallelLlamaForCausalLM"], "hidden_size": 24}
    with refused("E-HF-IMPORT") as caught:
        arch_of(config, "there")
    assert any("num_hidden_layers is missing" in text for text in caught.value.facts["problems"])


def test_without_the_plugin_the_class_is_unknown():
    with refused("E-HF-CLASS", model_type="parallel_llama"):
        arch_of({"model_type": "parallel_llama"}, "there")


def test_a_tensor_that_the_family_does_not_name_is_refused(plugins, tmp_path, monkeypatch):
    arch = replace(ARCH, attention="gated")
    monkeypatch.setitem(FAMILIES._entries, "any", replace(FAMILIES._entries["parallel_llama"], part=_anything()))
    model = Transformer(arch)
    with refused("E-HF-NAME", tensor="blocks.0.attention.gate.weight"):
        write_model(tmp_path, arch, model.state_dict(), eot_id=0)


def _anything():
    return replace(FAMILIES["parallel_llama"], name="any", problems=lambda arch: ())
