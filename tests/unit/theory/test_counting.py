"""Parameters, FLOPs and peaks against what others published."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.recipes.load import load_model, model_names
from ingot.schema.arch import Arch
from ingot.theory.flops import (
    forward_flops_per_token,
    model_flops_utilisation,
    train_flops_per_token,
)
from ingot.theory.params import count_matrix_parameters, count_parameters, parameters_by_part
from ingot.theory.peaks import ACCELERATORS, find_accelerator, peak_flops
from ingot.theory.scaling import suggested_batch_tokens, suggested_learning_rate

LLAMA3_8B = load_model("llama3-8b").arch
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("name", [n for n in model_names() if load_model(n).parameters])
def test_published_parameter_counts(name):
    preset = load_model(name)
    assert count_parameters(preset.arch) == preset.parameters


def test_parts_sum_to_all_and_tying_counts_once():
    import dataclasses

    untied = dataclasses.replace(LLAMA3_8B, tied_embeddings=False)
    tied = dataclasses.replace(LLAMA3_8B, tied_embeddings=True)
    assert sum(parameters_by_part(untied).values()) == count_parameters(untied)
    assert count_parameters(untied) - count_parameters(tied) == LLAMA3_8B.vocab_size * LLAMA3_8B.d_model
    assert count_matrix_parameters(untied) == count_matrix_parameters(tied)


def test_parameters_are_those_of_the_model():
    torch = pytest.importorskip("torch")
    from ingot.model.transformer import Transformer

    for qk_norm, tied in ((False, True), (True, False)):
        arch = Arch(
            vocab_size=96, d_model=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=80,
            qk_norm=qk_norm, tied_embeddings=tied,
        )  # fmt: skip
        with torch.device("meta"):
            model = Transformer(arch)
        assert count_parameters(arch) == sum(p.numel() for p in model.parameters())


def test_full_convention_gives_megatrons_llama3_row():
    # Megatron-LM's Llama table: 800 TFLOP/s at 13,812 tokens/s per GPU.
    assert train_flops_per_token(LLAMA3_8B, 8192, causal=False) == pytest.approx(800e12 / 13_812, rel=1e-3)


@pytest.mark.parametrize(("tokens_per_second", "full", "norm"), [(6667, 0.390, 0.347), (5762, 0.337, 0.300)])
def test_torchtitans_published_utilisation(tokens_per_second, full, norm):
    peak = peak_flops(H100, "bf16")
    assert peak is not None
    for causal, expected in ((False, full), (True, norm)):
        flops = train_flops_per_token(LLAMA3_8B, 8192, causal)
        assert model_flops_utilisation(tokens_per_second, flops, peak) == pytest.approx(expected, abs=6e-4)


@given(st.integers(1, 65_536))
def test_training_is_three_forwards_and_causal_attention_half(seq_len):
    assert train_flops_per_token(LLAMA3_8B, seq_len) == pytest.approx(3 * forward_flops_per_token(LLAMA3_8B, seq_len))
    matmul = 6 * count_matrix_parameters(LLAMA3_8B)
    causal, full = (train_flops_per_token(LLAMA3_8B, seq_len, c) - matmul for c in (True, False))
    assert full == pytest.approx(2 * causal)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA GH200 480GB", 989),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_driver_names_find_their_peak(name, tera):
    assert peak_flops(name, "bf16") == tera * 1e12


def test_no_peak_is_guessed():
    assert peak_flops("NVIDIA H200 MIG 1g.18gb", "bf16") is None
    assert peak_flops("Some Future Card", "bf16") is None
    assert peak_flops(H100, "fp64") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None


def test_each_accelerator_is_found_by_its_own_words():
    for accelerator in ACCELERATORS:
        assert find_accelerator(" ".join(accelerator.words)) is accelerator


def test_scaling_fits_reproduce_deepseeks_choices():
    # Bi et al. 2024, table 2: 7B trained on 2T tokens used lr 4.2e-4 and 2,304 sequences of 4,096.
    arch = Arch(
        vocab_size=102_400, d_model=4096, num_layers=30, num_heads=32, num_kv_heads=32, head_dim=128, d_ffn=11_008,
        max_seq_len=4096, tied_embeddings=False,
    )  # fmt: skip
    assert suggested_learning_rate(arch, 4096, 2 * 10**12) == pytest.approx(4.2e-4, rel=0.1)
    assert suggested_batch_tokens(arch, 4096, 2 * 10**12) == pytest.approx(2304 * 4096, rel=0.15)
