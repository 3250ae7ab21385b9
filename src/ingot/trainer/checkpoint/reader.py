"""Fills blocks from a checkpoint's files, however those were cut: only the bytes that a block needs are read."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import safetensors
import torch

from ingot.errors import CheckpointError
from ingot.schema.checkpoint import CheckpointManifest, StoredBlock
from ingot.trainer.checkpoint.blocks import overlap, slices
from ingot.trainer.checkpoint.state import Block


def read_blocks(path: Path, manifest: CheckpointManifest, blocks: Iterable[Block]) -> None:
    """Fill the tensor of each block from checkpoint `path`, whose `manifest` was verified and holds the block's name.

    The tensors keep their device and dtype. One file is open at a time. Raises CheckpointError.
    """
    wanted: dict[str, list[tuple[Block, StoredBlock]]] = defaultdict(list)
    meeting: dict[tuple, list[int]] = {}  # weights, moments and layers are cut alike: each cut is searched once
    for block in blocks:
        entry = manifest.tensors[block.name]
        place = (entry.cut, block.offsets, block.sizes)
        if place not in meeting:
            stored = zip(manifest.cuts[entry.cut].offsets, manifest.cuts[entry.cut].sizes, strict=True)
            meeting[place] = [i for i, other in enumerate(stored) if overlap(place[1:], other)]
        for number in meeting[place]:
            chunk = manifest.chunk(block.name, number)
            wanted[chunk.file].append((block, chunk))
    for name in sorted(wanted):
        try:
            with safetensors.safe_open(path / name, framework="pt", device="cpu") as file:
                for block, chunk in wanted[name]:
                    _copy(file, chunk, block)
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"checkpoint {path}: {name} cannot be read ({error})") from None


@torch.no_grad()
def _copy(file, chunk: StoredBlock, block: Block) -> None:
    shared = overlap((block.offsets, block.sizes), (chunk.offsets, chunk.sizes))
    if shared is None:
        return
    if tuple(shared[1]) == chunk.sizes:
        source = file.get_tensor(chunk.key)
    else:
        source = file.get_slice(chunk.key)[slices(shared, chunk.offsets)]
    block.tensor[slices(shared, block.offsets)].copy_(source)
