"""The Hugging Face class that computes the model of an `Arch`, and its tensor names. This module does not import
torch.
"""

from collections.abc import Iterable, Iterator
from operator import attrgetter

from ingot.errors import ConfigError
from ingot.plugins.family import FAMILIES
from ingot.plugins.registry import INGOT
from ingot.schema.arch import Arch

# `model_type` of config.json -> the class of transformers.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
# `model_type` -> the name of the class in a model card.
TITLES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen3": "Qwen3 (Llama with QK-norm)",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE (with QK-norm)",
    "deepseek_v3": "DeepSeek-V3",
}
# Setting -> the only value that a class supports. Settings of experts are not checked in dense models. Any capacity is
# allowed, because it has an effect only in training.
_GROUPED_ATTENTION_MOE = {
    "moe.scores": "softmax",
    "moe.scale": 1.0,
    "moe.groups": 1,
    "moe.shared_experts": 0,
    "moe.bias_rate": 0.0,
}
_ONLY_OF_ALL = {
    "logit_softcap": 0.0,  # classes with a cap on logits differ elsewhere (norms after blocks, GELU, ...)
    "feed_forward": "swiglu",
    "norm": "rms",
    "attention": "grouped_query",
    "block": "pre_norm",
}
_ONLY = {
    "llama": {},
    "mistral": {},
    "qwen3": {},
    "mixtral": _GROUPED_ATTENTION_MOE | {"moe.normalize": True, "moe.first_dense": 0},
    "qwen3_moe": _GROUPED_ATTENTION_MOE,
    "deepseek_v3": {
        "qk_norm": False,
        "sliding_window": 0,
        "norm_eps": 1e-6,  # DeepseekV3Attention uses this eps for latents and ignores rms_norm_eps there
        "moe.scores": "sigmoid",
    },
}


def kind_of(arch: Arch) -> str:
    """Return the `model_type` for `arch`: of a class of Hugging Face, else of the first family of a plug-in that
    computes it. Raises a ConfigError that lists all settings that no class supports.
    """
    if arch.is_mla:
        kind = "deepseek_v3"
    elif arch.is_moe:
        kind = "qwen3_moe" if arch.qk_norm else "mixtral"
    elif arch.qk_norm:
        kind = "qwen3"
    else:
        # LlamaConfig has no window, and refuses a width that is not a multiple of the heads.
        kind = "mistral" if arch.sliding_window or arch.d_model % arch.num_heads else "llama"
    problems = list(class_problems(arch, kind))
    if problems:
        own = [entry.part for entry in FAMILIES.entries() if entry.module != INGOT]
        for family in own:
            if not list(family.problems(arch)):
                return family.name
        for family in own:
            problems += [f"{text} ({family.class_name})" for text in family.problems(arch)]
        raise ConfigError(
            "E-HF-EXPORT",
            "\n".join(problems),
            rule=f"a model is exported only if Hugging Face's {CLASSES[kind]} computes exactly what was trained",
            fix=_export_fix(arch, kind),
            model_type=kind,
            problems=problems,
        )
    return kind


def class_problems(arch: Arch, kind: str) -> Iterator[str]:
    """Yield the settings of `arch` that the class of `kind` computes differently."""
    for key, only in (_ONLY_OF_ALL | _ONLY[kind]).items():
        value = attrgetter(key)(arch)
        if value != only and (arch.is_moe or not key.startswith("moe.")):
            yield f"model.{key} = {value!r}; {CLASSES[kind]} computes only {only!r}"
    if kind == "deepseek_v3" and arch.is_moe:
        moe = arch.moe
        if not moe.shared_experts:
            yield f"model.moe.shared_experts = 0; {CLASSES[kind]} has at least one"
        if moe.groups > 1 and moe.top_k // moe.top_groups != 2:
            yield (
                f"model.moe.top_k = {moe.top_k} with top_groups = {moe.top_groups}: {CLASSES[kind]} compares groups by "
                f"their two best scores; ingot does so only with a top_k of {2 * moe.top_groups} to "
                f"{3 * moe.top_groups - 1}"
            )
        if moe.num_experts // moe.groups < 2:
            yield f"model.moe.num_experts = {moe.num_experts}; {CLASSES[kind]} has at least two in each group"


def _export_fix(arch: Arch, kind: str) -> str:
    ways = ["train with the values that the class computes"]
    if kind == "mixtral" and not list(class_problems(arch, "qwen3_moe")):
        ways.append("with qk_norm = true (exported as Qwen3-MoE)")
    if kind != "deepseek_v3" and arch.moe.scores == "sigmoid":
        ways.append("with latent attention (model.mla, exported as DeepSeek-V3)")
    return ", or ".join(ways)


# The tensor names of ingot -> those of Hugging Face, used for both directions.
# A tensor of ingot is one tensor of Hugging Face, or several stacked along the rows: published checkpoints have one
# matrix per expert (`{e}`), ingot has one matrix for all experts. Both keep matrices as [out_features, in_features].
_OUTSIDE = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
# Names inside a block, which Hugging Face calls `model.layers.{i}`. All names end in `.weight`, except a router's bias.
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_latent_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "moe.router": "mlp.gate",
    "moe.router.bias": "mlp.gate.e_score_correction_bias",
    "moe.experts.gate": "mlp.experts.{e}.gate_proj",
    "moe.experts.up": "mlp.experts.{e}.up_proj",
    "moe.experts.down": "mlp.experts.{e}.down_proj",
    "moe.shared.gate": "mlp.shared_experts.gate_proj",
    "moe.shared.up": "mlp.shared_experts.up_proj",
    "moe.shared.down": "mlp.shared_experts.down_proj",
}
# `model_type` -> names that differ from _BLOCK.
DIFFERENT = {
    "mixtral": {
        "moe.router": "block_sparse_moe.gate",
        "moe.experts.gate": "block_sparse_moe.experts.{e}.w1",
        "moe.experts.up": "block_sparse_moe.experts.{e}.w3",
        "moe.experts.down": "block_sparse_moe.experts.{e}.w2",
    }
}


def huggingface_names(arch: Arch, tensors: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return ingot's name -> Hugging Face's names for `tensors`, which are names of ingot in a model of `arch`.

    If a tensor has several Hugging Face names, they are in the order in which ingot stacks their rows. Raises
    ConfigError if Hugging Face has no class for `arch`.
    """
    family = FAMILIES[kind_of(arch)]
    block, outside = _BLOCK | dict(family.names), _OUTSIDE | dict(family.outside)

    def theirs(ours: str) -> tuple[str, ...]:
        place, stem, ending = "", ours.removesuffix(".weight"), ".weight" if ours.endswith(".weight") else ""
        if stem.startswith("blocks."):
            _, layer, stem = stem.split(".", 2)
            place = f"model.layers.{layer}."
        names = block if place else outside
        if stem not in names:
            raise ConfigError(
                "E-HF-NAME",
                f"{family.class_name} has no name for {ours}",
                rule="a family names every tensor of its models (plugins/family.py)",
                fix="add the tensor to `names` of the family",
                tensor=ours,
            )
        name = f"{place}{names[stem]}{ending}"
        return tuple(name.format(e=e) for e in range(arch.moe.num_experts)) if "{e}" in name else (name,)

    return {ours: theirs(ours) for ours in tensors}
