"""Convert an `Arch` to Hugging Face's config.json and back. Import refuses settings that ingot computes differently.

The conversion was checked against the configuration classes of transformers 5 that hub/kinds.py lists. Keys of
transformers 4 (top-level `rope_theta`, `torch_dtype`) are read and written too.
"""

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any, TypeGuard

from ingot.config import from_dict
from ingot.errors import ConfigError
from ingot.hub.kinds import CLASSES, DIFFERENT, TITLES, class_problems, kind_of
from ingot.plugins.family import FAMILIES, FamilyPart
from ingot.schema.arch import Arch

# ingot's name -> Hugging Face's name, for both directions. For a part that the model lacks, ingot's 0 is their null.
_COMMON = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_ffn": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_LATENT = {
    "mla.q_rank": "q_lora_rank",
    "mla.kv_rank": "kv_lora_rank",
    "mla.nope_dim": "qk_nope_head_dim",
    "mla.rope_dim": "qk_rope_head_dim",
    "mla.v_dim": "v_head_dim",
}
_MOE = {
    "mixtral": {
        "moe.num_experts": "num_local_experts",
        "moe.top_k": "num_experts_per_tok",
        "moe.d_expert": "intermediate_size",
    },
    "qwen3_moe": {
        "moe.num_experts": "num_experts",
        "moe.top_k": "num_experts_per_tok",
        "moe.d_expert": "moe_intermediate_size",
        "moe.normalize": "norm_topk_prob",
    },
    "deepseek_v3": {
        "moe.num_experts": "n_routed_experts",
        "moe.top_k": "num_experts_per_tok",
        "moe.d_expert": "moe_intermediate_size",
        "moe.shared_experts": "n_shared_experts",
        "moe.first_dense": "first_k_dense_replace",
        "moe.normalize": "norm_topk_prob",
        "moe.scale": "routed_scaling_factor",
        "moe.groups": "n_group",
        "moe.top_groups": "topk_group",
    },
}
_ALIASES = {"qwen3_moe": {"num_local_experts": "num_experts"}}  # another name, which transformers 5 writes
# The values that transformers assumes for keys that config.json leaves out. All other keys above must be there.
_DEFAULTS = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    "mixtral": {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "qwen3_moe": {"max_position_embeddings": 32768, "norm_topk_prob": False, "sliding_window": 4096},
    "deepseek_v3": {"max_position_embeddings": 4096, "norm_topk_prob": True, "q_lora_rank": 1536},
}
_DEFAULTS_OF_ALL = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0}
# Key -> the only value that ingot supports. Transformers assumes this value if the key is absent.
_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "auto_map": None,
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
# The bias rate with which DeepSeek-V3 was trained (DeepSeek-AI 2024, V3, section 4.2). Their config.json does not have
# the rate, but an `Arch` with biases needs one.
_PUBLISHED_BIAS_RATE = 0.001


def _keys(kind: str, *, experts: bool = True) -> dict[str, str]:
    keys = _COMMON | (_MOE.get(kind, {}) if experts else {})
    if kind != "deepseek_v3":
        return keys
    # Their head_dim is the width of the rotary part alone, which follows from the other keys.
    return {ours: theirs for ours, theirs in (keys | _LATENT).items() if ours != "head_dim"}


def huggingface_config(arch: Arch, *, eot_id: int, dtype: str) -> dict:
    """Return the config.json of `arch` as a dict. Raises ConfigError if no Hugging Face class computes this model."""
    family = family_of(arch)
    return dict(family.config(arch)) | {
        "architectures": [family.class_name],
        "model_type": family.name,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "use_cache": True,
        # transformers 5 reads `rope_parameters` and `dtype`, transformers 4 the other two.
        "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_theta},
        "rope_theta": arch.rope_theta,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def family_of(arch: Arch) -> FamilyPart:
    """Return the family as which a model is exported. Raises ConfigError if no class computes this model."""
    return FAMILIES[kind_of(arch)]


def _shape_keys(arch: Arch, kind: str) -> dict:
    """Return the keys of config.json that describe the shape of `arch`, for a class of Hugging Face."""
    config = {theirs: attrgetter(ours)(arch) for ours, theirs in _keys(kind, experts=arch.is_moe).items()}
    return config | {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0} | _own_keys(arch, kind)


def _own_keys(arch: Arch, kind: str) -> dict:
    window = arch.sliding_window or None
    qwen = {"use_sliding_window": bool(window), "sliding_window": window}
    qwen["max_window_layers"] = 0 if window else arch.num_layers  # layers before this one have no window
    match kind:
        case "llama":
            return {"mlp_bias": False}
        case "mistral" | "mixtral":
            return {"sliding_window": window}
        case "qwen3":
            return qwen
        case "qwen3_moe":
            return qwen | {"decoder_sparse_step": 1, "mlp_only_layers": list(range(arch.moe.first_dense))}
        case _:
            own = {"q_lora_rank": arch.mla.q_rank or None, "rope_interleave": True, "num_nextn_predict_layers": 0}
            experts = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
            return own | (experts if arch.is_moe else {"first_k_dense_replace": arch.num_layers})


def arch_of(config: dict, where: str) -> Arch:
    """Return the `Arch` of a config.json. Raises a ConfigError that lists all settings that ingot does not support.

    where: the path of the file, for messages.
    """
    kind = config.get("model_type")
    family = FAMILIES[kind] if isinstance(kind, str) and kind in FAMILIES else None
    if family is None or config.get("architectures", [family.class_name]) != [family.class_name]:
        raise ConfigError(
            "E-HF-CLASS",
            f"{where}: model_type {kind!r}, architectures {config.get('architectures')!r}",
            rule="ingot reads " + ", ".join(f"{e.part.name!r} ({e.part.class_name})" for e in FAMILIES.entries()),
            fix="choose a model of one of these classes, or name the plug-in of its family in the run file",
            model_type=str(kind),
            architectures=config.get("architectures"),
            path=where,
        )
    values, problems = family.model(config)
    _require(where, list(problems))
    keys = _keys(family.name)
    arch = from_dict(Arch, dict(values), where=lambda key: f"{where} ({keys.get(key, key)})")
    _require(where, list(family.problems(arch)))
    return arch


def _settings_of(given: Mapping[str, Any], kind: str) -> tuple[dict, list[str]]:
    """Return (the settings of the model, the keys that ingot does not compute) of a class of Hugging Face."""
    config: dict = {_ALIASES.get(kind, {}).get(k, k): v for k, v in given.items()}
    config = _DEFAULTS_OF_ALL | _DEFAULTS[kind] | config
    experts = not (kind == "deepseek_v3" and _all_dense(config))
    keys = _keys(kind, experts=experts)
    problems = [
        f"{key} = {config[key]!r}; ingot computes only {only!r}"
        for key, only in _REQUIRED.items()
        if config.get(key) not in (None, only)
    ]
    problems += [
        f"{theirs} is missing"
        for ours, theirs in keys.items()
        if ours.startswith(("moe.", "mla.")) and theirs not in config
    ]
    window, window_problems = _window(config, kind)
    theta, rope_problems = _rope(config)
    problems += window_problems + rope_problems + _own_problems(config, kind)
    if problems:
        return {}, problems
    values = {ours: config[theirs] for ours, theirs in keys.items() if theirs in config}
    values |= {"qk_norm": kind in ("qwen3", "qwen3_moe"), "rope_theta": theta, "sliding_window": window}
    values |= _implied(config, kind, values)
    return _nested(values), []


def _require(where: str, problems: list[str]) -> None:
    if problems:
        raise ConfigError(
            "E-HF-IMPORT",
            "\n".join(f"{where}: {problem}" for problem in problems),
            rule="a model is imported only if ingot computes exactly the same as the model's authors",
            fix="choose a model without these settings",
            path=where,
            problems=problems,
        )


def _implied(config: dict, kind: str, values: dict) -> dict:
    """Return the settings of ingot that follow from other keys, or from keys that are null or missing."""
    implied = {}
    if config.get("num_key_value_heads") is None and "num_heads" in values:
        implied["num_kv_heads"] = values["num_heads"]
    if kind == "qwen3_moe":
        implied["moe.first_dense"] = len(config.get("mlp_only_layers") or [])
    if kind == "deepseek_v3":
        nope, rope = values.get("mla.nope_dim"), values.get("mla.rope_dim")
        if _is_size(nope) and _is_size(rope):
            implied["head_dim"] = nope + rope
        if values.get("mla.q_rank") is None:
            implied["mla.q_rank"] = 0
        if "moe.num_experts" in values:
            implied |= {"moe.scores": "sigmoid", "moe.bias_rate": _PUBLISHED_BIAS_RATE}
    elif config.get("head_dim") is None and _is_size(values.get("d_model")) and _is_size(values.get("num_heads")):
        implied["head_dim"] = values["d_model"] // values["num_heads"]
    return implied


def _nested(values: dict) -> dict:
    """Nest dotted keys: {"moe.top_k": 2} -> {"moe": {"top_k": 2}}."""
    nested = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return nested


def _is_size(value) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0


def _all_dense(config: dict) -> bool:
    dense, layers = config.get("first_k_dense_replace"), config.get("num_hidden_layers")
    return _is_size(dense) and _is_size(layers) and dense >= layers


def _own_problems(config: dict, kind: str) -> list[str]:
    problems = []
    if kind == "qwen3_moe":
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or dense != list(range(len(dense))):
            rule = "in ingot, dense layers come before all layers with experts"
            problems.append(f"mlp_only_layers = {dense!r}; {rule}")
    if kind == "deepseek_v3":
        if config.get("num_key_value_heads") not in (None, config.get("num_attention_heads")):
            problems.append(
                f"num_key_value_heads = {config['num_key_value_heads']!r}; with latent attention it must equal "
                "num_attention_heads"
            )
        if not isinstance(config.get("rope_interleave", True), bool):
            problems.append(f"rope_interleave = {config['rope_interleave']!r}; it must be true or false")
    return problems


def _window(config: dict, kind: str) -> tuple[object, list[str]]:
    """Return (sliding_window, problems). It is a problem if layers differ: ingot has the same window in all layers."""
    problems, qwen = [], kind in ("qwen3", "qwen3_moe")
    if config.get("use_sliding_window") and not qwen:
        problems.append(f"use_sliding_window = {config['use_sliding_window']!r}; {CLASSES[kind]} has no such key")
    has_one = config.get("use_sliding_window") if qwen else kind in ("mistral", "mixtral")
    window = config.get("sliding_window") if has_one else None
    window = 0 if window is None else window
    layers = config.get("layer_types")
    if layers is None:
        if kind == "qwen3" and window and config["max_window_layers"] != 0:
            problems.append(
                f"max_window_layers = {config['max_window_layers']!r}; ingot has a window in all layers or in none"
            )
    elif not isinstance(layers, list):
        problems.append(f"layer_types is of type {type(layers).__name__}; it must be a list")
    else:
        only = "sliding_attention" if window else "full_attention"
        other = sorted({str(layer) for layer in layers} - {only})
        problems += [f"layer_types has {layer!r}; ingot computes {only!r} in all layers" for layer in other]
    return window, problems


def _rope(config: dict) -> tuple[float, list[str]]:
    """Return (theta, problems) from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return 0.0, [f"the RoPE parameters are of type {type(rope).__name__}; they must be a JSON object"]
    problems = []
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        problems.append(f"rope_type = {kind!r}; ingot computes only unscaled RoPE ('default')")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor = {rope['partial_rotary_factor']!r}; ingot rotates whole heads")
    theta = rope.get("rope_theta", config["rope_theta"])
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        problems.append(f"rope_theta = {theta!r}; it must be a positive number")
        return 0.0, problems
    return float(theta), problems


for _kind in CLASSES:
    FAMILIES.add_built_in(
        FamilyPart(
            name=_kind,
            class_name=CLASSES[_kind],
            title=TITLES[_kind],
            problems=partial(class_problems, kind=_kind),
            config=partial(_shape_keys, kind=_kind),
            model=partial(_settings_of, kind=_kind),
            names=DIFFERENT.get(_kind, {}),
        )
    )
