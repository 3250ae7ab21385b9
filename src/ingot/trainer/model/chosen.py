"""The layers that a model chooses by name, and the check that they are what they declare."""

from torch import nn

from ingot.errors import ConfigError
from ingot.plugins.layers import ATTENTIONS, FEED_FORWARDS, LAYERS, NORMS, layer_options
from ingot.plugins.registry import INGOT, resolve
from ingot.schema.arch import Arch
from ingot.theory.params import (
    block_attention_parameters,
    block_mlp_parameters,
    block_norm_parameters,
    last_norm_parameters,
    stream_norm_parameters,
)
from ingot.trainer.model.attention import Attend


def stream_norm(arch: Arch) -> nn.Module:
    """Return a norm of the residual stream."""
    part = NORMS[arch.norm]
    return resolve(part.make)(arch.d_model, arch.norm_eps, layer_options(part, arch))


def feed_forward(arch: Arch) -> nn.Module:
    """Return the feed-forward of a block without experts."""
    part = FEED_FORWARDS[arch.feed_forward]
    return resolve(part.make)(arch.d_model, arch.d_ffn, layer_options(part, arch))


def attention_of(arch: Arch, attend: Attend) -> nn.Module:
    """Return the attention of a block."""
    part = ATTENTIONS[arch.attention]
    return resolve(part.make)(arch, attend, layer_options(part, arch))


def require_declared(model: nn.Module, arch: Arch) -> None:
    """Raise ConfigError if a layer of a plug-in has another number of parameters than it declares.

    The planner counts on it. model: a whole Transformer.
    """
    chosen = {key: getattr(arch, key) for key in LAYERS}
    if all(
        entry.module == INGOT
        for key, registry in LAYERS.items()
        for entry in registry.entries()
        if entry.part.name == chosen[key]
    ):
        return
    block = model.get_submodule("blocks.0")
    of_attention = _count(block.get_submodule("attention"))
    vectors = block_norm_parameters(arch) - stream_norm_parameters(arch)  # inside attention
    between = sum(_count(child) for name, child in block.named_children() if name not in ("attention", "mlp", "moe"))
    counts = {
        "norm": (_count(model.get_submodule("norm")), last_norm_parameters(arch)),
        "attention": (of_attention, block_attention_parameters(arch) + vectors),
        "block": (between, stream_norm_parameters(arch)),
    }
    if (mlp := getattr(block, "mlp", None)) is not None:
        counts["feed_forward"] = (_count(mlp), block_mlp_parameters(arch))
    for key, (found, declared) in counts.items():
        if found != declared:
            raise ConfigError(
                "E-LAYER-COUNTS",
                f"model.{key} = {chosen[key]!r} has {found:,} parameters where it declares {declared:,}",
                rule="a layer has exactly the parameters that its part declares, because the planner counts those",
                fix="correct the numbers of the plug-in's part (plugins/layers.py), or its module",
                key=f"model.{key}",
                found=found,
                declared=declared,
            )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
