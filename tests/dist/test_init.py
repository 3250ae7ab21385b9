"""A run that begins with a model of Hugging Face computes what `transformers` does, and goes on from there."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ingot.trainer.build import build_parts
from ingot.trainer.export.model_folder import write_model
from ingot.trainer.model.transformer import Transformer

from .steps import CPU, batch_of, join, keep, mean_losses, run_of, same_bits, train
from .test_reference_moe import DEEPSEEK, MIXTRAL

LAYOUTS = {
    "one process": {},
    "ep": {"dp_shard": 2, "ep": 2},
    "ep, zero 3": {"dp_shard": 2, "ep": 2, "zero": 3},
    "pp x tp": {"pp": 2, "tp": 2},
}


@pytest.fixture
def mixtral(tmp_path):
    """A random one, made and saved in several files by transformers; and its folder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = transformers.MixtralConfig(
        vocab_size=MIXTRAL.vocab_size, hidden_size=MIXTRAL.d_model, num_hidden_layers=MIXTRAL.num_layers,
        num_attention_heads=MIXTRAL.num_heads, num_key_value_heads=MIXTRAL.num_kv_heads, head_dim=MIXTRAL.head_dim,
        intermediate_size=MIXTRAL.moe.d_expert, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=MIXTRAL.sliding_window, max_position_embeddings=MIXTRAL.max_seq_len,
        rms_norm_eps=MIXTRAL.norm_eps, tie_word_embeddings=True, initializer_range=0.3, experts_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": MIXTRAL.rope_theta},
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    return model.double(), tmp_path / "hf"


def starting_from(folder: Path, arch, **layout):
    return replace(run_of(arch=arch, **layout), init=str(folder))


def three_losses(rank, world, run):
    return train(run, [1, 2, 3]).losses


def first_state(rank, world, run):
    parts = build_parts(run, CPU, Path())
    assert parts.balance is not None
    return keep((piece, piece.value) for piece in (*parts.model.shards, *parts.balance.shards))


@pytest.mark.slow
def test_the_first_loss_is_that_of_transformers_and_training_goes_on(fork_ranks, mixtral):
    theirs, folder = mixtral
    runs = {name: starting_from(folder, MIXTRAL, **layout) for name, layout in LAYOUTS.items()}
    alone: Any = SimpleNamespace(data_ranks=1, data_rank=0)
    batch = batch_of(runs["one process"], alone, 1)
    with torch.no_grad():
        logits = theirs(batch.inputs.flatten(0, 1)).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).item()
    losses = {name: mean_losses(fork_ranks(three_losses, run.parallel.world_size, run)) for name, run in runs.items()}
    one = losses["one process"]
    assert one[0] == pytest.approx(expected, rel=1e-6)  # their norms are taken in float32
    assert abs(one[0] - np.log(MIXTRAL.vocab_size)) > 0.1  # drawn weights would give the latter
    for name, found in losses.items():
        assert found == pytest.approx(one, rel=1e-12), name


@pytest.mark.parametrize("layout", [{"dp_shard": 2, "ep": 2, "zero": 3}, {"pp": 2, "tp": 2, "ep": 2}], ids=str)
def test_every_block_is_that_of_the_folder_biases_of_routers_too(fork_ranks, tmp_path, layout):
    torch.manual_seed(4)
    model = Transformer(DEEPSEEK)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.normal_()
    write_model(tmp_path, DEEPSEEK, model.state_dict(), eot_id=0, max_file_bytes=20_000)
    run = starting_from(tmp_path, DEEPSEEK, precision="bf16", **layout)
    found = join(fork_ranks(first_state, run.parallel.world_size, run))
    assert same_bits(found, {name: tensor.numpy() for name, tensor in model.state_dict().items()})
    assert any(name.endswith("router.bias") for name in found)


def test_what_serves_training_only_is_drawn(fork_ranks, mixtral):
    _, folder = mixtral
    own = {"capacity_factor": 1.0, "overflow": "fallback", "global_loss": 0.01, "bias_rate": 0.001}
    run = starting_from(folder, replace(MIXTRAL, max_seq_len=16, moe=replace(MIXTRAL.moe, **own)))
    found = join(fork_ranks(first_state, 1, run))
    drawn = join(fork_ranks(first_state, 1, replace(run, init="")))
    alike = {name for name in found if np.array_equal(found[name], drawn[name])}
    extra = {name for name in found if "fallback" in name or name.endswith(("router.load", "router.bias"))}
    norms = {name for name in found if "norm" in name}  # 1 in a new model of theirs as well
    assert len(extra) == 5 * MIXTRAL.num_layers and alike == extra | norms
