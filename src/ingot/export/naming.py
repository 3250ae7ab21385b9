"""One table of parameter names, read both ways: ingot <-> Hugging Face (Llama, and Qwen3 when the model has QK-norm).

Both sides keep matrices as [out_features, in_features] and rotate halves in RoPE, so a rename is all there is to it.
No torch here: names and shapes only.
"""

from ingot.schema.arch import Arch

# `{i}` is the layer. `q_norm` and `k_norm` exist with QK-norm, `head` exists with untied embeddings.
_MODEL = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def huggingface_names(arch: Arch) -> dict[str, str]:
    """ingot's name of every parameter of `arch` -> its Hugging Face name, in the order of the layers."""
    layer = {k: v for k, v in _LAYER.items() if arch.qk_norm or not k.endswith(("q_norm", "k_norm"))}
    names = {"embed.weight": _MODEL["embed.weight"]}
    for i in range(arch.num_layers):
        names |= {f"blocks.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight" for ours, theirs in layer.items()}
    names["norm.weight"] = _MODEL["norm.weight"]
    if not arch.tied_embeddings:
        names["head.weight"] = _MODEL["head.weight"]
    return names


def parameter_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    """ingot's name of every parameter of `arch` -> its shape (letters as in schema/arch.py)."""
    D, F, H, V = arch.d_model, arch.d_ffn, arch.head_dim, arch.vocab_size
    NH, GH = arch.num_heads * H, arch.num_kv_heads * H
    by_kind = {
        "embed": (V, D),
        "head": (V, D),
        "norm": (D,),
        "attention_norm": (D,),
        "mlp_norm": (D,),
        "q_norm": (H,),
        "k_norm": (H,),
        "q": (NH, D),
        "k": (GH, D),
        "v": (GH, D),
        "o": (D, NH),
        "gate": (F, D),
        "up": (F, D),
        "down": (D, F),
    }
    return {name: by_kind[name.split(".")[-2]] for name in huggingface_names(arch)}
