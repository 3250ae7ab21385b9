"""The part of all ranks in keeping tensor files on disks of their nodes (places.py): files that no checkpoint lists are
removed, and those that a node needs and lacks are fetched from the store. Every function is collective, and does
nothing about disks in a run without `checkpoint.disks`.
"""

import contextlib
import itertools
import math
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from ingot.errors import CheckpointError
from ingot.schema.checkpoint import FULL, CheckpointManifest
from ingot.schema.run_folder import RunFolder
from ingot.stores.store import NotStored
from ingot.trainer.checkpoint.agree import from_all_ranks, from_rank_zero, on_all_ranks, rank
from ingot.trainer.checkpoint.files import CheckpointFiles
from ingot.trainer.checkpoint.manifest import candidate_folders, late_folders, listed_names, verify_files
from ingot.trainer.checkpoint.places import (
    Places,
    disks_of,
    keep_names,
    local_rank,
    name_run,
    node,
    recorded_names,
    require_disks,
    sweep,
)
from ingot.trainer.checkpoint.rules import damaged

FILE_LOST = "E-CKPT-FILE-LOST"
SMALL_BYTES = 1 << 10
_FILES_AT_ONCE = 4  # that a rank reads from the store
FetchFile = Callable[[CheckpointManifest, str], int]


@dataclass(frozen=True)
class NeededFiles:
    """The files that a rank reads. large: for blocks of more than SMALL_BYTES. small: for smaller blocks alone, such as
    the step of the optimizer, which one rank writes for all: another node sends those blocks."""

    large: set[str]
    small: set[str]


@dataclass(frozen=True)
class Brought:
    """fetched: the nodes that fetched files. small: file -> key -> block, of files that some node lacks."""

    fetched: list["NodeFetch"]
    small: dict[str, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class NodeFetch:
    """The files that one node fetched from the store. bytes: received. seconds: of its slowest rank."""

    node: int
    files: int
    bytes: int
    seconds: float


def open_disks(folder: RunFolder) -> str:
    """Check the disks of every node, and give the run a name on them, which every rank keeps. Returns what is wrong
    with the record of its names, "" if nothing is. Raises ConfigError for a disk that is missing."""
    disks = disks_of(folder.root)
    if not disks:
        return ""
    on_all_ranks(lambda: require_disks(disks))

    def found_here() -> list[str]:
        names, damage = recorded_names(folder.root) if local_rank() == 0 else ([], "")
        return names if damage else []

    def name(found: list[list[str]]) -> list:
        damage = name_run(folder, itertools.chain(*found))
        return [damage, recorded_names(folder.root)[0]]

    damage, names = from_all_ranks(found_here, name)
    keep_names(folder.root, names)
    return damage


def sweep_disks(folder: RunFolder, group: dist.ProcessGroup | None = None, *, at_start: bool = False) -> None:
    """Remove the files of checkpoints that are gone from the disks of every node. No save may be in progress.

    Which checkpoints exist is what rank 0 sees: the view that another node has of a shared file system can be older
    than the newest checkpoint. at_start: also remove single files that a killed save left in the folder of a
    checkpoint; the manifests are then old enough to be seen by all nodes.
    """
    if not disks_of(folder.root):
        return
    full = folder.of(FULL)
    found = from_rank_zero(
        lambda: [path.name for path in (*candidate_folders(full.checkpoints), *late_folders(full.checkpoints))],
        group=group,
    )
    if local_rank() == 0:
        sweep(folder, {name: listed_names(full.checkpoints / name) if at_start else None for name in found})


def discard_files(files: CheckpointFiles, group: dist.ProcessGroup | None = None) -> None:
    """Remove what a failed save has left, in the run folder and on the disks: the next save needs the room.

    A save that failed after it was published keeps its files.
    """
    if rank() == 0:
        files.discard()
    if files.is_striped:
        with contextlib.suppress(Exception):  # a rank is gone: the next start removes the files
            if not from_rank_zero(files.path.exists, group=group):
                files.discard_own(rank())


def bring_files(
    path: Path, manifest: CheckpointManifest, needed: Callable[[], NeededFiles], fetch_file: FetchFile | None
) -> Brought:
    """Verify the files of checkpoint `path` that the ranks of each node need, and fetch those that the node lacks, or
    has damaged. Each node reads each file once, and its ranks share the work.

    needed: returns the files that this rank will read. fetch_file: fetches a file to a disk of this node, verified on
    the way, and returns its bytes; None: the run has no store. Raises CheckpointError on every rank if a file cannot be
    had, and StoreUnreachable: the file may be in the store.
    """
    here = node() or 0

    def own_needs() -> list:
        files = needed()
        return [here, sorted(files.large), sorted(files.small)]

    nodes, readers = from_all_ranks(own_needs, _share_out)
    ranks, names = nodes[str(here)]
    own, places = names[ranks.index(rank()) :: len(ranks)], Places(path)

    def bring_all() -> list[float]:
        began = time.perf_counter()
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            sizes = [size for size in pool.map(lambda name: _bring(path, manifest, name, fetch_file), own) if size]
        return [here, len(sizes), sum(sizes), time.perf_counter() - began]

    def small_blocks() -> bytes:
        return save(
            {
                f"{name}/{key}": tensor
                for name in (name for name, reader in readers.items() if reader == rank())
                for key, tensor in _small_in(places.find(name, manifest.files[name].sha256)).items()
            }
        )

    fetched = [NodeFetch(**one) if isinstance(one, dict) else one for one in from_all_ranks(bring_all, _by_node)]
    small: dict[str, dict[str, Tensor]] = {}
    if readers:
        packed = from_all_ranks(small_blocks, lambda parts: [b64encode(one).decode() for one in parts], bytes, bytes)
        for block, tensor in (pair for one in packed for pair in load(b64decode(one)).items()):
            name, _, key = block.partition("/")
            small.setdefault(name, {})[key] = tensor
    return Brought(fetched, small)


def _bring(path: Path, manifest: CheckpointManifest, name: str, fetch_file: FetchFile | None) -> int:
    """Verify one file on this node, or fetch it if it is damaged or missing. Returns the bytes fetched."""
    failure = None
    if Places(path).find(name, manifest.files[name].sha256) is not None:
        try:
            verify_files(path, manifest, [name])
            return 0
        except CheckpointError as error:
            failure = error
    try:
        if fetch_file is None:
            raise failure or _lost(path, name, node() or 0, "the run has no store")
        size = fetch_file(manifest, name)
    except NotStored as error:
        raise failure or _lost(path, name, node() or 0, error.found) from None
    verify_files(path, manifest, [name])  # what readers will find, not only what arrived
    return size


def _by_node(parts: list[list]) -> list[NodeFetch]:
    """Return the fetches of each node. parts: its number, files, bytes and seconds, of every rank."""
    found: dict[int, list] = {}
    for number, files, size, seconds in parts:
        before = found.get(number, [0, 0, 0.0])
        found[number] = [before[0] + files, before[1] + size, max(before[2], seconds)]
    return [
        NodeFetch(node=number, files=files, bytes=size, seconds=seconds)
        for number, (files, size, seconds) in sorted(found.items())
        if files
    ]


def _share_out(by_rank: list[list]) -> list[dict]:
    """Return node -> [its ranks, the files that it reads], and file -> the rank that sends its small blocks.

    by_rank: node, files of large blocks and files of small blocks alone, of every rank. A file that nobody needs for a
    large block is read by the node of rank 0.
    """
    nodes: dict[str, list] = {}
    for one, (number, large, _) in enumerate(by_rank):
        ranks, names = nodes.setdefault(str(number), [[], set()])
        ranks.append(one)
        names.update(large)
    read = {name: ranks[0] for ranks, names in reversed(nodes.values()) for name in names}
    readers = {}
    for number, _, small in by_rank:
        for name in set(small) - nodes[str(number)][1]:
            readers[name] = read.get(name, 0)
    nodes[str(by_rank[0][0])][1].update(name for name in readers if name not in read)
    return [{number: [ranks, sorted(names)] for number, (ranks, names) in nodes.items()}, readers]


def _small_in(file: Path | None) -> dict[str, Tensor]:
    """Return the blocks of at most SMALL_BYTES in a verified file."""
    assert file is not None
    with safetensors.safe_open(file, framework="pt", device="cpu") as tensors:
        elements = {key: math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        found = {key: tensors.get_tensor(key) for key, number in elements.items() if number <= SMALL_BYTES}
    return {key: tensor for key, tensor in found.items() if tensor.nbytes <= SMALL_BYTES}


def _lost(path: Path, name: str, number: int, why: str) -> CheckpointError:
    what = f"{name} is on no disk of node {number}, which needs it, and cannot be fetched: {why}"
    return damaged(path, what, FILE_LOST, file=name, node=number)
