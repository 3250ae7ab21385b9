"""Parameters, FLOPs and peaks against what others published."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.planner.request.presets import load_model, model_names
from ingot.planner.run.scaling import suggested_batch_tokens, suggested_learning_rate
from ingot.schema.alerting import Alerts
from ingot.schema.arch import Arch, Mla, Moe
from ingot.theory.devices import devices, find_device, peak_flops
from ingot.theory.flops import (
    forward_attention_flops_per_token,
    forward_flops_per_token,
    mean_keys,
    mfu_words,
    model_flops_utilization,
    train_flops_per_token,
)
from ingot.theory.params import (
    count_active_parameters,
    count_matrix_parameters,
    count_parameters,
    parameters_by_part,
)

LLAMA3_8B = load_model("llama3-8b").arch
H100 = "NVIDIA H100 80GB HBM3"
# Shapes of the published config.json files.
DEEPSEEK_V3 = Arch(
    vocab_size=129_280, d_model=7168, num_layers=61, num_heads=128, num_kv_heads=128, head_dim=192, d_ffn=18_432,
    tied_embeddings=False, mla=Mla(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
    moe=Moe(num_experts=256, top_k=8, d_expert=2048, shared_experts=1, first_dense=3),
)  # fmt: skip
MIXTRAL_8X7B = Arch(
    vocab_size=32_000, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, d_ffn=14_336,
    tied_embeddings=False, moe=Moe(num_experts=8, top_k=2, d_expert=14_336),
)  # fmt: skip
QWEN3_30B_A3B = Arch(
    vocab_size=151_936, d_model=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128, d_ffn=6144,
    qk_norm=True, tied_embeddings=False, moe=Moe(num_experts=128, top_k=8, d_expert=768),
)  # fmt: skip
SMALL = Arch(vocab_size=96, d_model=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=80)
EVERYTHING = Moe(
    num_experts=8, top_k=2, d_expert=12, shared_experts=2, first_dense=1, capacity_factor=1.0, overflow="fallback"
)


@pytest.mark.parametrize("name", [n for n in model_names() if load_model(n).parameters])
def test_published_parameter_counts(name):
    preset = load_model(name)
    assert count_parameters(preset.arch) == preset.parameters


@pytest.mark.parametrize(("arch", "total", "active"), [(MIXTRAL_8X7B, 46.7e9, 12.9e9), (QWEN3_30B_A3B, 30.5e9, 3.35e9)])
def test_published_counts_of_experts(arch, total, active):
    """Jiang et al. 2024, table 1 of Mixtral; Qwen's model card says 3.3B. Both count the embedding's matrix."""
    assert count_parameters(arch) == pytest.approx(total, rel=2e-3)
    assert count_active_parameters(arch) == pytest.approx(active, rel=2e-3)


def test_deepseek_v3_has_671b_parameters_of_which_a_token_meets_37b():
    """DeepSeek-AI 2024, V3, section 4.2, without the module that predicts a second token. The active ones are those
    without the embedding, of which a token takes a row: 36.6B; with it they would be 37.6B."""
    assert count_parameters(DEEPSEEK_V3) == pytest.approx(671.0e9, rel=1e-3)
    assert count_active_parameters(DEEPSEEK_V3, embedding=False) == pytest.approx(36.63e9, rel=1e-3)
    assert count_active_parameters(DEEPSEEK_V3) == pytest.approx(37.55e9, rel=1e-3)


def test_active_parameters_leave_out_idle_experts_and_the_one_for_overflow():
    dense = SMALL
    assert count_active_parameters(dense) == count_parameters(dense)
    mixed = replace(SMALL, moe=EVERYTHING)
    idle = (8 - 2 + 1) * 3 * 32 * 12  # 2 of 3 blocks have experts
    assert count_parameters(mixed) - count_active_parameters(mixed) == 2 * idle
    # The matrices of a token: all of that but norms and the embedding, which is the head's matrix here.
    norms = 3 * 2 * 32 + 32
    assert count_matrix_parameters(mixed) == count_active_parameters(mixed) - norms


def test_parts_sum_to_all_and_tying_counts_once():
    untied = replace(LLAMA3_8B, tied_embeddings=False)
    tied = replace(LLAMA3_8B, tied_embeddings=True)
    assert sum(parameters_by_part(untied).values()) == count_parameters(untied)
    assert count_parameters(untied) - count_parameters(tied) == LLAMA3_8B.vocab_size * LLAMA3_8B.d_model
    assert count_matrix_parameters(untied) == count_matrix_parameters(tied)


@pytest.mark.parametrize(
    "arch",
    [
        replace(SMALL, tied_embeddings=False),
        replace(SMALL, qk_norm=True),
        replace(SMALL, moe=EVERYTHING),
        replace(SMALL, moe=Moe(num_experts=4, d_expert=20)),
    ],
    ids=["dense", "qk-norm", "everything of experts", "experts alone"],
)
def test_parameters_are_those_of_the_model(arch):
    torch = pytest.importorskip("torch")
    from ingot.trainer.model.transformer import Transformer

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
        assert model_flops_utilization(tokens_per_second, flops, peak) == pytest.approx(expected, abs=6e-4)


@given(st.integers(1, 65_536))
def test_training_is_three_forwards_and_causal_attention_half(seq_len):
    assert train_flops_per_token(LLAMA3_8B, seq_len) == pytest.approx(3 * forward_flops_per_token(LLAMA3_8B, seq_len))
    matmul = 6 * count_matrix_parameters(LLAMA3_8B)
    causal, full = (train_flops_per_token(LLAMA3_8B, seq_len, c) - matmul for c in (True, False))
    assert full == pytest.approx(2 * causal)


@given(st.integers(1, 300), st.integers(0, 400))
def test_a_window_hides_keys_that_are_counted(seq_len, window):
    seen = sum(min(t + 1, window or seq_len) for t in range(seq_len)) / seq_len
    # The convention halves the square of the first tokens, and so leaves out half of its diagonal.
    diagonal = min(window or seq_len, seq_len) / seq_len
    assert mean_keys(seq_len, window) == pytest.approx(seen - diagonal / 2)
    assert mean_keys(seq_len, window, causal=False) == min(window or seq_len, seq_len)


def test_latent_attention_counts_the_width_of_scores_and_of_values():
    """192 wide scores and 128 wide values of 128 heads, half of T each: no padding counts."""
    expected = 61 * 2 * 128 * (192 + 128) * 4096 / 2
    assert forward_attention_flops_per_token(DEEPSEEK_V3, 4096) == pytest.approx(expected)


def test_deepseek_v3_trains_with_six_operations_for_each_active_parameter():
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    matrices = count_active_parameters(DEEPSEEK_V3, embedding=False) - norms
    attention = 3 * forward_attention_flops_per_token(DEEPSEEK_V3, 4096)
    assert train_flops_per_token(DEEPSEEK_V3, 4096) == pytest.approx(6 * matrices + attention)


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
    for device in devices().values():
        assert find_device(" ".join(device.words)) is device
        assert find_device(device.device_name) is device


def test_scaling_fits_reproduce_deepseeks_choices():
    # Bi et al. 2024, table 2: 7B trained on 2T tokens used lr 4.2e-4 and 2,304 sequences of 4,096.
    arch = Arch(
        vocab_size=102_400, d_model=4096, num_layers=30, num_heads=32, num_kv_heads=32, head_dim=128, d_ffn=11_008,
        max_seq_len=4096, tied_embeddings=False,
    )  # fmt: skip
    assert suggested_learning_rate(arch, 4096, 2 * 10**12) == pytest.approx(4.2e-4, rel=0.1)
    assert suggested_batch_tokens(arch, 4096, 2 * 10**12) == pytest.approx(2304 * 4096, rel=0.15)


def test_an_mfu_in_words():
    """The bands: a good run of large ones has 38% to 43% (Llama 3), and people are alerted below 35%."""
    found = {mfu: mfu_words(mfu).split()[0] for mfu in (0.0, 0.149, 0.15, 0.3, 0.35, 0.43, 0.45, 0.499, 0.5, 0.9)}
    assert list(found.values()) == ["a", "a", "poor", "poor", "good", "good", "as", "as", "excellent", "excellent"]
    assert mfu_words(Alerts().mfu_least - 0.001) != mfu_words(Alerts().mfu_least)
