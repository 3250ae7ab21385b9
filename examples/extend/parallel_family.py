"""The Hugging Face form of a model with the parallel block (parallel_block.py), for `ingot export` and `init`.

The code of the class itself lives beside the weights or in a package of yours; this file names its config and tensors.
"""

from ingot.plugins.family import FAMILIES, FamilyPart

KEYS = {  # setting of [model] -> key of config.json
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
    "rope_theta": "rope_theta",
    "feed_forward": "hidden_act",
}
ONLY = {"block": "parallel", "norm": "rms", "attention": "grouped_query", "qk_norm": False, "sliding_window": 0}


def problems(arch):
    for key, only in ONLY.items():
        if getattr(arch, key) != only:
            yield f"model.{key} = {getattr(arch, key)!r}; the class computes only {only!r}"
    if arch.is_moe or arch.is_mla or arch.logit_softcap:
        yield "experts, latent attention or a softcap; the class has none"


def config(arch):
    return {theirs: getattr(arch, ours) for ours, theirs in KEYS.items()}


def model(config):
    missing = [f"{theirs} is missing" for theirs in KEYS.values() if theirs not in config]
    return {ours: config[theirs] for ours, theirs in KEYS.items() if theirs in config} | {"block": "parallel"}, missing


FAMILIES.register(
    FamilyPart(
        name="parallel_llama",
        class_name="ParallelLlamaForCausalLM",
        title="Llama with a parallel block",
        problems=problems,
        config=config,
        model=model,
    )
)
