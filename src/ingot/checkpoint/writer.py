"""Who does what in a save: every rank writes the blocks it owns into its own file, rank 0 the manifest that names all.

In this order: every rank `open`s, rank 0 makes room (`make_folder`), every rank `write`s and verifies its file, and
rank 0 `finish`es. saving.py takes care that an error on any rank is raised on all of them.
"""

import shutil
from dataclasses import dataclass, field
from typing import Any

from ingot.checkpoint.agree import rank
from ingot.checkpoint.blocks import tiling_problem
from ingot.checkpoint.manifest import write_manifest
from ingot.checkpoint.random_state import random_state
from ingot.checkpoint.retention import SAVING, prune, publish
from ingot.checkpoint.state import Block, TrainingState
from ingot.checkpoint.tensor_file import dtype_name, write_tensors
from ingot.errors import CheckpointError, ResourceError
from ingot.schema.checkpoint import CheckpointManifest, Chunk, FileEntry, LedgerSegment, TensorEntry
from ingot.schema.layout import RunFolder
from ingot.storage import fsync_dir, require_free

_ROOM_BYTES = 16 << 20  # for headers, manifest and the ledger


@dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint says about itself besides its tensors. See schema/checkpoint.py."""

    step: int
    tokens: int
    settings: dict[str, Any]
    config_sha256: str
    data_fingerprint: str
    layout: dict[str, int]


@dataclass
class Part:
    """What one rank tells rank 0. tensors: dtype and whole shape of all that it holds. chunks: of what it wrote."""

    rng: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    chunks: list[tuple[str, Chunk]] = field(default_factory=list)
    files: dict[str, FileEntry] = field(default_factory=dict)


class Writer:
    """Writes one checkpoint into a temporary folder, which is renamed once all is there."""

    def __init__(self, folder: RunFolder, facts: CheckpointFacts, ledger: tuple[LedgerSegment, ...], keep: int):
        self.folder, self.facts, self.ledger, self.keep = folder, facts, ledger, keep
        self.path = folder.checkpoint(facts.step)
        self.temporary = self.path.with_name(SAVING + self.path.name)
        self.blocks: list[Block] = []

    def open(self, state: TrainingState) -> int:
        """The bytes that this rank will write."""
        self.blocks = state.blocks(state.optimizer.moments(), first_rank=rank() == 0)
        return sum(block.tensor.nbytes for block in self.blocks if block.written)

    def make_folder(self, bytes_by_rank: list[int]) -> None:
        """On rank 0, before anything is written."""
        needed = sum(bytes_by_rank) + _ROOM_BYTES
        require_free(self.folder.checkpoints, needed, f"the checkpoint of step {self.facts.step}")
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)

    def write(self) -> Part:
        part = Part(random_state(), {b.name: (dtype_name(b.tensor.dtype), b.shape) for b in self.blocks})
        blocks = [block for block in self.blocks if block.written and block.tensor.numel()]
        if not blocks:
            return part
        # Large elements first keeps every tensor of the file aligned.
        blocks.sort(key=lambda block: (-block.tensor.itemsize, block.name, block.offsets))
        file = f"rank-{rank():05d}.safetensors"
        try:
            entry, checksums = write_tensors(self.temporary / file, [(_key(b), b.tensor) for b in blocks])
        except OSError as error:
            raise ResourceError(
                f"{self.temporary / file} cannot be written ({error.strerror})",
                rule="a checkpoint is saved whole or not at all; the last one is untouched",
                fix="free space on that disk or mend it, then run the same command: it continues",
            ) from None
        part.files[file] = entry
        for block, crc32 in zip(blocks, checksums, strict=True):
            chunk = Chunk(file=file, key=_key(block), offsets=block.offsets, sizes=block.sizes, crc32=crc32)
            part.chunks.append((block.name, chunk))
        return part

    def finish(self, parts: list[Part]) -> int:
        """On rank 0, when every rank has written and verified its file: manifest, rename, then prune. Bytes saved."""
        manifest = CheckpointManifest(
            **{name: getattr(self.facts, name) for name in self.facts.__dataclass_fields__},
            files={name: entry for part in parts for name, entry in part.files.items()},
            tensors=_tensors(parts),
            rng=tuple(part.rng for part in parts),
            ledger=self.ledger,
        )
        write_manifest(self.temporary, manifest)
        fsync_dir(self.temporary)
        publish(self.folder, self.facts.step)
        prune(self.folder, self.facts.step, self.keep)
        return sum(file.bytes for file in manifest.files.values())


def _tensors(parts: list[Part]) -> dict[str, TensorEntry]:
    """The blocks of all ranks by tensor. Raises CheckpointError unless each element was written exactly once."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    chunks: dict[str, list[Chunk]] = {}
    for rank_number, part in enumerate(parts):
        for name, kind in part.tensors.items():
            if kinds.setdefault(name, kind) != kind:
                raise CheckpointError(
                    f"{name} is {kind[0]}{list(kind[1])} on rank {rank_number}, and another shape or type before",
                    rule="all ranks have blocks of the same tensors",
                )
        for name, chunk in part.chunks:
            chunks.setdefault(name, []).append(chunk)
    entries = {}
    for name, (dtype, shape) in kinds.items():
        written = sorted(chunks.get(name, []), key=lambda chunk: chunk.offsets)
        if problem := tiling_problem(shape, [(chunk.offsets, chunk.sizes) for chunk in written]):
            raise CheckpointError(
                f"the blocks of {name} that the ranks own {problem}",
                rule="every element is saved by exactly one rank",
            )
        entries[name] = TensorEntry(dtype=dtype, shape=shape, chunks=tuple(written))
    return entries


def _key(block: Block) -> str:
    """The name in the file: the tensor's, with the offset where it is a block of a larger one."""
    return f"{block.name}@{','.join(map(str, block.offsets))}" if any(block.offsets) else block.name
