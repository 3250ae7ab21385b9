"""Conversion of tensors to the Hugging Face format and back: new names, stacks of experts cut, rotary rows in pairs.

Shape letters: N heads, P and R the parts of a head without and with rotary positions, D inputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ingot.hub.kinds import huggingface_names
from ingot.schema.arch import Arch
from ingot.trainer.model.transformer import Transformer

# Suffixes of the names of tensors that only training needs: the loads of the previous step, for a balance loss, and the
# fallback expert, for tokens beyond an expert's capacity.
TRAINING_ONLY = (
    "moe.router.load",
    "moe.fallback.gate.weight",
    "moe.fallback.up.weight",
    "moe.fallback.down.weight",
)
# Always stored as float32: rounded biases could choose other experts.
WIDE = ".e_score_correction_bias"


def tensor_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    """Return ingot's name -> shape for all tensors that the logits of a model of `arch` depend on."""
    with torch.device("meta"):
        state = Transformer(arch).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if not name.endswith(TRAINING_ONLY)}


def huggingface_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    """Return Hugging Face name -> shape on disk for the same tensors."""
    shapes = tensor_shapes(arch)
    return {
        theirs: (shapes[ours][0] // len(names), *shapes[ours][1:])
        for ours, names in huggingface_names(arch, shapes).items()
        for theirs in names
    }


def to_huggingface(arch: Arch, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `state` (ingot's names, as in `tensor_shapes`) under Hugging Face names; as views if no element moves."""
    found = {}
    for ours, names in huggingface_names(arch, state).items():
        parts = _turned(arch, ours, state[ours], _pairs).chunk(len(names))
        found |= dict(zip(names, parts, strict=True))
        if arch.is_mla and ours.endswith("moe.router.weight") and not arch.moe.bias_rate:
            # The Hugging Face class always has a bias; zeros change nothing.
            bias = names[0].removesuffix(".weight") + WIDE
            found[bias] = torch.zeros(arch.moe.num_experts)
    return found


def from_huggingface(arch: Arch, ours: str, parts: Sequence[Tensor], *, pairs: bool) -> Tensor:
    """Return ingot's tensor `ours`, joined from its Hugging Face `parts` in order (of a stack, any consecutive parts).

    pairs: whether rotary rows of latent attention are stored in pairs (config.json: rope_interleave).
    """
    whole = torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]
    return _turned(arch, ours, whole, _halves) if pairs else whole


def _turned(arch: Arch, ours: str, tensor: Tensor, order) -> Tensor:
    """Apply `order` to the rows of latent attention with rotary positions, the last R rows of each head."""
    if not arch.is_mla or not ours.endswith(
        ("attention.q.weight", "attention.q_up.weight", "attention.kv_down.weight")
    ):
        return tensor
    heads = 1 if ours.endswith("kv_down.weight") else arch.num_heads
    grouped = tensor.unflatten(0, (heads, -1))
    rest, rotary_NRD = grouped.split((grouped.shape[1] - arch.mla.rope_dim, arch.mla.rope_dim), dim=1)
    return torch.cat((rest, order(rotary_NRD)), dim=1).flatten(0, 1)


def _pairs(rows_NRD: Tensor) -> Tensor:
    """Move rows i and i + R/2, which ingot rotates together, to 2i and 2i + 1, as in published checkpoints."""
    return rows_NRD.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _halves(rows_NRD: Tensor) -> Tensor:
    """Invert `_pairs`."""
    return rows_NRD.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
