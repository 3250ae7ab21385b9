"""One table of tensor names, read both ways: ingot <-> Hugging Face.

A tensor of ours is one of theirs, or several of theirs stacked along the rows: published checkpoints have one matrix
for each expert (`{e}`), we have one for all. Both sides keep matrices as [out_features, in_features].
No torch here: names only.
"""

from collections.abc import Iterable

from ingot.hub.kinds import kind_of
from ingot.schema.arch import Arch

_OUTSIDE = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
# Within a block, which is `model.layers.{i}` there. `.weight` ends every name but that of a router's bias.
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
# Where a class differs from that.
_DIFFERENT = {
    "mixtral": {
        "moe.router": "block_sparse_moe.gate",
        "moe.experts.gate": "block_sparse_moe.experts.{e}.w1",
        "moe.experts.up": "block_sparse_moe.experts.{e}.w3",
        "moe.experts.down": "block_sparse_moe.experts.{e}.w2",
    }
}


def huggingface_names(arch: Arch, tensors: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Each name of ours among `tensors` of a model of `arch` -> theirs, in the order in which their rows are stacked.

    Raises ConfigError for an `arch` that Hugging Face has no class for.
    """
    block = _BLOCK | _DIFFERENT.get(kind_of(arch), {})

    def theirs(ours: str) -> tuple[str, ...]:
        place, stem, ending = "", ours.removesuffix(".weight"), ".weight" if ours.endswith(".weight") else ""
        if stem.startswith("blocks."):
            _, layer, stem = stem.split(".", 2)
            place = f"model.layers.{layer}."
        name = f"{place}{(block if place else _OUTSIDE)[stem]}{ending}"
        return tuple(name.format(e=e) for e in range(arch.moe.num_experts)) if "{e}" in name else (name,)

    return {ours: theirs(ours) for ours in tensors}
