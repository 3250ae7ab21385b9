"""The tensors of a checkpoint file as its parts and their bytes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ingot.schema.checkpoint import FileEntry
from ingot.trainer.checkpoint.tensor_file import FilePart, write_parts


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the module, like "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def part_of(key: str, tensor: Tensor) -> FilePart:
    """Return the part of a file that `tensor` is, under `key`."""
    return FilePart(key, dtype_name(tensor.dtype), tuple(tensor.shape))


def bytes_of(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of each tensor, on any device. A copy on the host is made only when its turn comes."""
    for tensor in tensors:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_tensors(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> tuple[FileEntry, list[int], float]:
    """Write `tensors` (key, tensor on any device) to the new file `path`, as `write_parts` does."""
    parts = [part_of(key, tensor) for key, tensor in tensors]
    return write_parts(path, parts, bytes_of([tensor for _, tensor in tensors]))
