"""Our `Arch` as Hugging Face's config.json and back. Import refuses everything that would change what is computed.

Checked against the configuration classes of transformers 5 (LlamaConfig, Qwen3Config); files of transformers 4
(top-level `rope_theta`, `torch_dtype`) are read and written too.
"""

from ingot.config import from_dict
from ingot.errors import ConfigError
from ingot.schema.arch import Arch

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_ffn": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}
# What transformers assumes for a key that config.json leaves out.
_DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048},
    "qwen3": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 32768, "head_dim": 128},
}
# Key -> the only value that our model computes. An absent key has this value in transformers.
_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "auto_map": None,
}


def huggingface_config(arch: Arch, *, eot_id: int, dtype: str) -> dict:
    """config.json of `arch`. Raises ConfigError for a shape that the Hugging Face class refuses."""
    kind = "qwen3" if arch.qk_norm else "llama"
    if kind == "llama" and arch.d_model % arch.num_heads:
        raise ConfigError(
            f"d_model={arch.d_model} is not a multiple of num_heads={arch.num_heads}",
            rule="Hugging Face's LlamaConfig accepts only multiples",
            fix="train with qk_norm = true (exported as Qwen3, which has no such rule), or with other sizes",
        )
    config = {theirs: getattr(arch, ours) for ours, theirs in _SIZES.items()}
    config |= {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "rms_norm_eps": arch.norm_eps,
        "tie_word_embeddings": arch.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "use_cache": True,
        # transformers 5 reads `rope_parameters` and `dtype`, transformers 4 the other two.
        "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_theta},
        "rope_theta": arch.rope_theta,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    return config | ({"mlp_bias": False} if kind == "llama" else {"use_sliding_window": False})


def arch_of(config: dict, where: str) -> Arch:
    """The `Arch` of a config.json. Raises ConfigError that lists everything in it that we cannot honour."""
    kind = config.get("model_type")
    expected = _ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if not isinstance(kind, str) or expected is None or config.get("architectures", [expected]) != [expected]:
        raise ConfigError(
            f"{where}: model_type {kind!r}, architectures {config.get('architectures')!r}",
            rule="ingot reads " + " and ".join(f"{k!r} ({v})" for k, v in _ARCHITECTURES.items()),
        )
    config = _DEFAULTS[kind] | config
    problems = [
        f"{key} = {config[key]!r}, we compute {only!r}"
        for key, only in _REQUIRED.items()
        if config.get(key) not in (None, only)
    ]
    problems += _layer_problems(config)
    theta, rope_problems = _rope(config)
    if problems := problems + rope_problems:
        raise ConfigError(
            "\n".join(f"{where}: {problem}" for problem in problems),
            rule="a model is imported only when ingot computes exactly what its authors trained",
        )
    values = {ours: config[theirs] for ours, theirs in _SIZES.items() if config.get(theirs) is not None}
    if config.get("num_key_value_heads") is None and "num_heads" in values:
        values["num_kv_heads"] = values["num_heads"]
    if config.get("head_dim") is None and _is_size(values.get("d_model")) and _is_size(values.get("num_heads")):
        values["head_dim"] = values["d_model"] // values["num_heads"]
    values |= {
        "norm_eps": config["rms_norm_eps"],
        "tied_embeddings": config["tie_word_embeddings"],
        "qk_norm": kind == "qwen3",
        "rope_theta": theta,
    }
    return from_dict(Arch, values, where=lambda key: f"{where} ({_SIZES.get(key, key)})")


def _is_size(value) -> bool:
    return isinstance(value, int) and value > 0


def _layer_problems(config: dict) -> list[str]:
    kinds = config.get("layer_types") or []
    other = sorted({str(kind) for kind in kinds if kind != "full_attention"}) if isinstance(kinds, list) else [kinds]
    return [f"layer_types has {kind!r}, we compute full attention in every layer" for kind in other]


def _rope(config: dict) -> tuple[float, list[str]]:
    """(theta, problems) from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return 0.0, [f"rope parameters are {type(rope).__name__}, must be a table"]
    problems = []
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        problems.append(f"rope_type = {kind!r}, we compute unscaled RoPE ('default')")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor = {rope['partial_rotary_factor']!r}, we rotate whole heads")
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        problems.append(f"rope_theta = {theta!r}, must be a positive number")
        return 0.0, problems
    return float(theta), problems
