"""Read blocks of tensors and random states from the files of a checkpoint, however the checkpoint was divided.

The files are in its folder, on disks of nodes, or in the memory of nodes. What is read was verified by the caller.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import safetensors
import torch

from ingot.schema.checkpoint import CheckpointManifest, StoredBlock, file_of
from ingot.trainer.checkpoint.part import overlap, slices
from ingot.trainer.checkpoint.places import Places
from ingot.trainer.checkpoint.rules import damaged, elsewhere
from ingot.trainer.checkpoint.state import GENERATORS, StateBlock, restore_random_state, restore_random_text

SmallBlocks = Mapping[str, Mapping[str, torch.Tensor]]  # file -> key -> block
OnBytes = Callable[[int], object]  # called with the bytes of each block that was read
Find = Callable[[str, Sequence[str]], Path]  # the name of a checkpoint's file, and keys in it -> where to read them


def restore_random(path: Path, manifest: CheckpointManifest, rank: int, find: Find | None = None) -> None:
    """Restore the random states of `rank` from the verified checkpoint `path`. Raises CheckpointError if what is there
    is not the state of a generator. find: as in `read_blocks`."""
    try:
        if manifest.rng:
            restore_random_text(manifest.rng[rank])
        else:
            file = file_of(rank)
            restore_random_state(find(file, GENERATORS) if find else found_file(path, manifest, file))
    except (RuntimeError, TypeError, ValueError, OSError, safetensors.SafetensorError) as error:
        problem = f"the random state of rank {rank} cannot be restored ({error})"
        raise damaged(path, problem, "E-CKPT-RANDOM", rank=rank) from None


def read_blocks(
    path: Path,
    manifest: CheckpointManifest,
    blocks: Iterable[StateBlock],
    small: SmallBlocks = MappingProxyType({}),
    find: Find | None = None,
    on_bytes: OnBytes | None = None,
) -> None:
    """Fill the tensor of each block from checkpoint `path`, however the checkpoint was divided into blocks.

    manifest: the verified manifest of `path`, which must list the tensor of every block. Only the bytes that a block
    needs are read, one file at a time; on_bytes is called with the size of each part. The tensors keep their device and
    dtype. small: file -> key -> block, of files that may be on another node (nodes.py). find: where the files are; by
    default in the folder `path`, or on disks. Raises CheckpointError if a file cannot be read.
    """
    wanted = chunks_by_file(manifest, blocks)
    for name in sorted(wanted):
        if all(chunk.key in small.get(name, {}) for _, chunk in wanted[name]):
            for block, chunk in wanted[name]:
                _copy(small[name], chunk, block)
            continue
        place = find(name, [c.key for _, c in wanted[name]]) if find else found_file(path, manifest, name)
        try:
            with safetensors.safe_open(place, framework="pt", device="cpu") as file:
                for block, chunk in wanted[name]:
                    read = _copy(file, chunk, block)
                    if on_bytes is not None:
                        on_bytes(read)
        except (OSError, safetensors.SafetensorError) as error:
            raise damaged(path, f"{name} cannot be read ({error})", code="E-CKPT-READ", file=name) from None


def chunks_by_file(
    manifest: CheckpointManifest, blocks: Iterable[StateBlock]
) -> dict[str, list[tuple[StateBlock, StoredBlock]]]:
    """Return file -> (block, stored block in it that overlaps with the block), for all of `blocks`."""
    wanted: dict[str, list[tuple[StateBlock, StoredBlock]]] = defaultdict(list)
    shared: dict[tuple, list[int]] = {}  # weights, moments and layers share cuts, so each cut is searched only once
    for block in blocks:
        entry = manifest.tensors[block.name]
        place = (entry.cut, block.offsets, block.sizes)
        if place not in shared:
            stored = zip(manifest.cuts[entry.cut].offsets, manifest.cuts[entry.cut].sizes, strict=True)
            shared[place] = [i for i, other in enumerate(stored) if overlap(place[1:], other)]
        for number in shared[place]:
            chunk = manifest.chunk(block.name, number)
            wanted[chunk.file].append((block, chunk))
    return wanted


def found_file(path: Path, manifest: CheckpointManifest, name: str) -> Path:
    """Return where the file `name` of checkpoint `path` is on this node. Raises CheckpointError if it is nowhere."""
    if (found := Places(path).find(name, manifest.files[name].sha256)) is None:
        raise elsewhere(path, name)
    return found


@torch.no_grad()
def _copy(file, chunk: StoredBlock, block: StateBlock) -> int:
    """Fill the part of `block` that `chunk` holds. Returns the bytes read."""
    shared = overlap((block.offsets, block.sizes), (chunk.offsets, chunk.sizes))
    if shared is None:
        return 0
    if tuple(shared[1]) == chunk.sizes:
        source = file[chunk.key] if isinstance(file, dict) else file.get_tensor(chunk.key)
    else:
        whole = file[chunk.key] if isinstance(file, dict) else file.get_slice(chunk.key)
        source = whole[slices(shared, chunk.offsets)]
    block.tensor[slices(shared, block.offsets)].copy_(source)
    return source.nbytes
