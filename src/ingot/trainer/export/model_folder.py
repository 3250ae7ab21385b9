"""The model part of a Hugging Face folder: config.json, generation_config.json and safetensors, written and read."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ingot.errors import CheckpointError, UsageError
from ingot.hub.arch_config import arch_of, huggingface_config
from ingot.hub.config_file import CONFIG, read_config
from ingot.hub.kinds import huggingface_names
from ingot.schema.arch import Arch
from ingot.storage import write_json
from ingot.trainer.export.tensors import (
    TRAINING_ONLY,
    WIDE,
    from_huggingface,
    huggingface_shapes,
    tensor_shapes,
    to_huggingface,
)
from ingot.trainer.export.weights import StoredWeights, write_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def write_model(
    folder: Path,
    arch: Arch,
    state: dict[str, Tensor],
    *,
    eot_id: int,
    dtype: str = "float32",
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write `state` (ingot's names; what serves training only is left out) as `dtype` into the existing `folder`.

    Raises CheckpointError when `state` is not what `arch` says, ConfigError for a shape Hugging Face has no class for.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} cannot be exported", rule=f"one of {', '.join(DTYPES)}")
    config = huggingface_config(arch, eot_id=eot_id, dtype=dtype)
    expected = tensor_shapes(arch)
    state = {name: tensor for name, tensor in state.items() if not name.endswith(TRAINING_ONLY)}
    if expected.keys() != state.keys():
        odd = sorted(expected.keys() ^ state.keys())
        raise CheckpointError(
            f"{len(odd)} parameters differ from the architecture: {', '.join(odd[:5])}",
            rule="a checkpoint holds exactly the parameters of the run's [model]",
        )
    write_json(folder / CONFIG, config)
    write_json(folder / "generation_config.json", {"bos_token_id": eot_id, "eos_token_id": eot_id, "do_sample": False})
    write_weights(folder, to_huggingface(arch, state), DTYPES[dtype], max_file_bytes, wide=WIDE)


class ModelFolder:
    """A Hugging Face folder of one of the classes in huggingface/kinds.py: its shape, and its parameters by our names.

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
        """Name -> shape of everything that logits depend on."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """The whole tensor, in the dtype on disk."""
        shape = self._shapes[name]
        return self.read_block(name, (0,) * len(shape), shape)

    def read_block(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The block of `sizes` from `offsets` on. Of a stack of experts only those in the block are read."""
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
    """The shape and all parameters of a folder (ingot's names, dtypes as stored). Raises as ModelFolder does."""
    there = ModelFolder(folder)
    return there.arch, {name: there.read(name) for name in there.shapes}
