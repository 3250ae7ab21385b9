"""The shapes of a model that are refused: each problem names what was found, and the way out."""

from dataclasses import asdict, replace

import pytest

from ingot.config import from_dict
from ingot.errors import ConfigError
from ingot.schema.arch import Arch, Mla, Moe

ARCH = Arch(vocab_size=64, d_model=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, d_ffn=48)
MOE = Moe(num_experts=8, top_k=2, d_expert=16)
MLA = Mla(kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8)
LATENT = replace(ARCH, num_kv_heads=4, head_dim=12, mla=MLA)


def problems(arch: Arch) -> dict[str, str]:
    """Return the problems that the reader of a run file finds, by key."""
    try:
        from_dict(Arch, asdict(arch))
    except ConfigError as error:
        return dict(zip(error.facts["keys"], error.facts["problems"], strict=True))
    return {}


SOUND_MOE = [
    {},
    {"top_k": 1, "normalize": False},
    {"top_k": 8},
    {"scores": "sigmoid", "scale": 2.5, "bias_rate": 0.001, "sequence_loss": 1e-4, "z_loss": 1e-3, "global_loss": 0.01},
    {"groups": 4, "top_groups": 2},
    {"groups": 4, "top_groups": 1},
    {"groups": 2, "top_groups": 1, "top_k": 4},
    {"capacity_factor": 1.25, "overflow": "fallback", "shared_experts": 1, "first_dense": 3, "noise": 0.1},
    {"capacity_factor": 3.9},
    {"bias_rate": 0.001, "bias_steps": 100},
]


@pytest.mark.parametrize("settings", SOUND_MOE, ids=str)
def test_sound_experts(settings):
    assert problems(replace(ARCH, moe=replace(MOE, **settings))) == {}


@pytest.mark.parametrize(
    "settings, key, found, fix",
    [
        ({"num_experts": 1}, "num_experts", "is 1", "at least 2, or 0"),
        ({"num_experts": -2}, "num_experts", "is -2", "from 0"),
        ({"top_k": 0}, "top_k", "is 0", "from 1"),
        ({"top_k": 9}, "top_k", "9 experts per token are more than the 8 there are", "use 1 to 8"),
        ({"top_k": 1}, "normalize", "the weight is always 1", "set it to false, or top_k to 2"),
        ({"d_expert": 0}, "d_expert", "is 0: the width of one expert", "for example d_ffn / top_k = 24, which"),
        ({"d_expert": -1}, "d_expert", "is -1", "from 0"),
        ({"groups": 0}, "groups", "is 0", "from 1"),
        ({"groups": 3}, "groups", "3 equal groups", "use one of [1, 2, 4]"),
        ({"groups": 8, "top_groups": 4}, "groups", "8 equal groups", "use one of [1, 2, 4]"),
        ({"top_groups": 2}, "top_groups", "2 has no effect without groups", "remove it"),
        ({"groups": 4, "top_groups": 4}, "top_groups", "is 4", "use 1 to 3"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "top_groups", "is 1", "use 2 to 3"),
        ({"groups": 2, "top_groups": 1, "top_k": 5}, "top_groups", "is 1", "use fewer groups"),
        ({"first_dense": -1}, "first_dense", "is -1", "from 0"),
        ({"first_dense": 4}, "first_dense", "4 of 4 blocks are dense", "use 0 to 3"),
        ({"shared_experts": -1}, "shared_experts", "is -1", "from 0"),
        ({"scale": 0.0}, "scale", "is 0.0", "from 1e-30"),
        ({"noise": -0.1}, "noise", "is -0.1", "from 0"),
        ({"bias_rate": -0.1}, "bias_rate", "is -0.1", "from 0"),
        ({"bias_rate": 0.1, "bias_steps": -1}, "bias_steps", "is -1", "from 0"),
        ({"bias_steps": 100}, "bias_steps", "100 has no effect without biases", "set bias_rate"),
        ({"top_k": 8, "bias_rate": 0.1}, "bias_rate", "every token goes to all 8 experts", "lower top_k"),
        ({"top_k": 8, "groups": 2}, "groups", "every token goes to all 8 experts", "lower top_k"),
        ({"overflow": "fallback"}, "overflow", "experts take all tokens", "set capacity_factor"),
        ({"capacity_factor": 4.0}, "capacity_factor", "none would ever overflow", "use less, or 0"),
    ],
    ids=str,
)
def test_refused_experts(settings, key, found, fix):
    assert found in (line := problems(replace(ARCH, moe=replace(MOE, **settings)))[f"moe.{key}"])
    assert fix in line


@pytest.mark.parametrize(
    "setting",
    [{"top_k": 1}, {"d_expert": 8}, {"noise": 0.1}, {"overflow": "fallback"}, {"normalize": False}, {"first_dense": 1}],
    ids=str,
)
def test_without_experts_their_settings_are_refused(setting):
    ((key, line),) = problems(replace(ARCH, moe=Moe(**setting))).items()
    assert key == f"moe.{next(iter(setting))}" and "without experts" in line and "remove it" in line


def test_capacity_is_exact():
    # 1.1 * 2 * 80 / 8 is 22.000000000000004 in binary fractions.
    assert replace(MOE, capacity_factor=1.1).capacity(80) == 22
    assert replace(MOE, capacity_factor=1.1).capacity(81) == 23
    assert replace(MOE, capacity_factor=1e-07).capacity(80) == 1


@pytest.mark.parametrize(
    "changes, key, found, fix",
    [
        ({"num_kv_heads": 2}, "num_kv_heads", "is 2", "use num_heads = 4"),
        ({"head_dim": 8}, "head_dim", "is 8", "nope_dim + rope_dim = 12"),
        ({"qk_norm": True}, "qk_norm", "is true", "set it to false"),
        ({"mla": replace(MLA, v_dim=0)}, "mla.v_dim", "is 0", "belong together"),
        ({"mla": replace(MLA, v_dim=13)}, "mla.v_dim", "13 is more than", "at most that"),
        ({"mla": replace(MLA, rope_dim=3, nope_dim=9)}, "mla.rope_dim", "is 3", "even"),
        ({"mla": replace(MLA, q_rank=-1)}, "mla.q_rank", "is -1", "from 0"),
        ({"mla": replace(MLA, kv_rank=0)}, "mla.nope_dim", "without latent attention", "set model.mla.kv_rank"),
    ],
    ids=str,
)
def test_refused_latent_attention(changes, key, found, fix):
    assert found in (line := problems(replace(LATENT, **changes))[key])
    assert fix in line


def test_sound_latent_attention_and_windows():
    assert problems(LATENT) == problems(replace(LATENT, mla=replace(MLA, q_rank=12))) == {}
    # Only what rotates needs pairs.
    assert problems(replace(LATENT, head_dim=11, mla=replace(MLA, nope_dim=7))) == {}
    assert problems(replace(ARCH, sliding_window=4)) == {}
    assert "from 0" in problems(replace(ARCH, sliding_window=-1))["sliding_window"]


@pytest.mark.parametrize("cap", [-1.0, float("inf"), float("nan")])
def test_a_cap_on_logits_is_a_finite_number(cap):
    assert problems(replace(ARCH, logit_softcap=30.0)) == {}
    assert problems(replace(ARCH, logit_softcap=cap)).keys() == {"logit_softcap"}
