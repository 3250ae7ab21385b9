"""The model part of a Hugging Face folder: config.json, generation_config.json and safetensors, written and read.

Tensors are converted to the format and back: new names, stacks of experts cut, rotary rows in pairs. Shape letters: N
heads, P and R the parts of a head without and with rotary positions, D inputs.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ingot.errors import CheckpointError, UsageError
from ingot.hub.arch_config import arch_of, huggingface_config
from ingot.hub.config_file import CONFIG, read_config, require_fit
from ingot.hub.kinds import huggingface_names
from ingot.schema.arch import Arch
from ingot.storage import write_json
from ingot.trainer.checkpoint.meter import SILENT, Meter
from ingot.trainer.checkpoint.state import BIAS as ROUTER_BIAS
from ingot.trainer.export.weights import StoredWeights, write_weights
from ingot.trainer.model.transformer import Transformer

# -- folders --


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def write_model(
    folder: Path,
    arch: Arch,
    state: dict[str, Tensor],
    *,
    eot_id: int,
    dtype: str = "float32",
    max_file_bytes: int = 5 * 10**9,
    meter: Meter = SILENT,
) -> None:
    """Write `state` (under ingot's names) as `dtype` into the existing `folder`, without tensors only training needs.

    meter: counts the bytes. Raises CheckpointError if `state` does not fit `arch`, ConfigError for a shape without a
    Hugging Face class.
    """
    if dtype not in DTYPES:
        raise UsageError(
            "E-EXPORT-DTYPE",
            f"dtype {dtype!r} cannot be exported",
            rule=f"the dtype is one of {', '.join(DTYPES)}",
            fix="choose one of these with --dtype",
            dtype=dtype,
        )
    config = huggingface_config(arch, eot_id=eot_id, dtype=dtype)
    expected = tensor_shapes(arch)
    state = {name: tensor for name, tensor in state.items() if not name.endswith(TRAINING_ONLY)}
    if expected.keys() != state.keys():
        odd = sorted(expected.keys() ^ state.keys())
        raise CheckpointError(
            "E-CKPT-OTHER-MODEL",
            f"{len(odd)} parameters are only in the checkpoint or only in the architecture: {', '.join(odd[:5])}",
            rule="a checkpoint holds exactly the parameters of the run's [model]",
            fix="use the run file that the checkpoint was trained with",
            tensor=odd[0],
        )
    write_json(folder / CONFIG, config)
    write_json(folder / "generation_config.json", {"bos_token_id": eot_id, "eos_token_id": eot_id, "do_sample": False})
    write_weights(folder, to_huggingface(arch, state), DTYPES[dtype], max_file_bytes, wide=WIDE, meter=meter)


class ModelFolder:
    """A Hugging Face folder of one of the classes in hub/kinds.py: its shape, and its parameters under ingot's names.

    Raises ConfigError for a model that ingot does not compute exactly, CheckpointError for damaged files.
    """

    def __init__(self, folder: Path):
        config = read_config(folder)
        self.arch = arch_of(config, str(folder / CONFIG))
        self._pairs: bool = config.get("rope_interleave", True)
        self._shapes = tensor_shapes(self.arch)
        self._names = huggingface_names(self.arch, self._shapes)
        tied_copy = {"lm_head.weight": "model.embed_tokens.weight"} if self.arch.tied_embeddings else {}
        self._stored = StoredWeights(folder, huggingface_shapes(self.arch), copies=tied_copy)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors that the logits depend on, by ingot's names."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Read a whole tensor in the dtype on disk."""
        shape = self._shapes[name]
        return self.read_block(name, (0,) * len(shape), shape)

    def read_block(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read the block of shape `sizes` that begins at `offsets`. Experts outside the block are not read."""
        if 0 in sizes:
            return torch.empty(tuple(sizes))
        names = self._names[name]
        rows = self._shapes[name][0] // len(names)
        first, stop = offsets[0] // rows, -(-(offsets[0] + sizes[0]) // rows)
        parts = [self._stored.read(theirs) for theirs in names[first:stop]]
        read = from_huggingface(self.arch, name, parts, pairs=self._pairs)
        starts = (offsets[0] - first * rows, *offsets[1:])
        return read[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]


def import_huggingface(folder: Path) -> tuple[Arch, dict[str, Tensor]]:
    """Read the shape and all parameters of a folder (ingot's names, dtypes on disk). Raises as ModelFolder does."""
    there = ModelFolder(folder)
    return there.arch, {name: there.read(name) for name in there.shapes}


# (name, whole shape, offsets, sizes) -> that block of a parameter or buffer
FirstValue = Callable[[str, Sequence[int], Sequence[int], Sequence[int]], Tensor]


def first_weights(folder: Path, arch: Arch, drawn: FirstValue) -> FirstValue:
    """Return a function that reads a run's first weights from the Hugging Face folder `folder`, in the dtypes on disk.

    A call reads only the requested block. drawn: the function for tensors that the folder lacks: router biases, and
    tensors that only training needs (loads, the fallback expert). Raises ConfigError unless the folder fits a model of
    `arch`, CheckpointError for damaged files.
    """
    require_fit(folder, arch)
    there = ModelFolder(folder)

    def value(name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if name.endswith(TRAINING_ONLY) or (name.endswith(ROUTER_BIAS) and name not in there.shapes):
            return drawn(name, shape, offsets, sizes)
        return there.read_block(name, offsets, sizes)

    return value


# -- tensors --


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
_ROUTER = "moe.router.weight"


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
    """Return `state` (ingot's names, as in `tensor_shapes`) under Hugging Face names, as views where possible."""
    found = {}
    for ours, names in huggingface_names(arch, state).items():
        parts = huggingface_rows(arch, ours, state[ours]).chunk(len(names))
        found |= dict(zip(names, parts, strict=True))
    return found | {name: torch.zeros(arch.moe.num_experts) for name in unused_biases(arch, state)}


def huggingface_rows(arch: Arch, ours: str, tensor: Tensor) -> Tensor:
    """Return the whole tensor `ours` with its rows in Hugging Face's order."""
    return _turned(arch, ours, tensor, in_pairs)


def unused_biases(arch: Arch, tensors: Iterable[str]) -> list[str]:
    """Return Hugging Face's names of biases that its class always has, and a model of `arch` does not: zeros, of shape
    (num_experts,), change nothing. tensors: ingot's names."""
    if not arch.is_mla or arch.moe.bias_rate:
        return []
    routers = [names[0] for ours, names in huggingface_names(arch, tensors).items() if ours.endswith(_ROUTER)]
    return [name.removesuffix(".weight") + WIDE for name in routers]


def from_huggingface(arch: Arch, ours: str, parts: Sequence[Tensor], *, pairs: bool) -> Tensor:
    """Return ingot's tensor `ours`, joined from its Hugging Face `parts`.

    parts: all parts in order, or some consecutive ones if the tensor is a stack of experts.
    pairs: whether rotary rows of latent attention are stored in pairs (config.json: rope_interleave).
    """
    whole = torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]
    return _turned(arch, ours, whole, in_halves) if pairs else whole


def _turned(arch: Arch, ours: str, tensor: Tensor, order) -> Tensor:
    """Apply `order`, `in_pairs` or `in_halves`, to the rotary rows of latent attention: the last R rows of a head."""
    if not arch.is_mla or not ours.endswith(
        ("attention.q.weight", "attention.q_up.weight", "attention.kv_down.weight")
    ):
        return tensor
    heads = 1 if ours.endswith("kv_down.weight") else arch.num_heads
    grouped = tensor.unflatten(0, (heads, -1))
    rest, rotary_NRD = grouped.split((grouped.shape[1] - arch.mla.rope_dim, arch.mla.rope_dim), dim=1)
    return torch.cat((rest, order(rotary_NRD)), dim=1).flatten(0, 1)


def in_pairs(rows_NRD: Tensor) -> Tensor:
    """Move rows i and i + R/2, which ingot rotates together, to 2i and 2i + 1, as in published checkpoints."""
    return rows_NRD.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def in_halves(rows_NRD: Tensor) -> Tensor:
    """Invert `in_pairs`: rows 2i and 2i + 1, which other systems rotate together, go to i and i + R/2."""
    return rows_NRD.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
