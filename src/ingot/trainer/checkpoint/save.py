"""Save a checkpoint while training waits: every rank writes the blocks that it owns to its own file, and rank 0 writes
the manifest.

A checkpoint counts as saved only after its files have been read back from the disk and compared. `background.py` saves
the same bytes while training goes on.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ingot.schema.checkpoint import FULL, LedgerSegment, SaveKind, key_of
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.agree import from_all_ranks, rank
from ingot.trainer.checkpoint.files import CheckpointFacts, CheckpointFiles, FileContents
from ingot.trainer.checkpoint.nodes import sweep_disks
from ingot.trainer.checkpoint.part import RankBlocks
from ingot.trainer.checkpoint.state import TrainingState, random_state
from ingot.trainer.checkpoint.tensors import bytes_of, dtype_name, part_of


@dataclass(frozen=True)
class SavedCheckpoint:
    """A saved checkpoint. bytes, verify_seconds: see PublishedSave. stall_seconds: how long training paused on this
    rank."""

    path: Path
    bytes: int
    stall_seconds: float
    verify_seconds: float


def save_checkpoint(
    folder: RunFolder,
    facts: CheckpointFacts,
    state: TrainingState,
    ledger: tuple[LedgerSegment, ...],
    *,
    keep: int,
    keep_every: int = 0,
    segment: bytes | None = None,
    require_unchanged: Callable[[], None] | None = None,
) -> SavedCheckpoint:
    """Write, verify and publish the checkpoint of step `facts.step`, then remove those that `keep` and
    `keep_every` do not keep. Collective.

    facts.kind: with "weights" the weights alone are saved, `ledger` is empty, and `keep` counts saves of weights.
    require_unchanged: called when this rank's state was read; what it raises, ends the save on every rank.
    segment: on rank 0, the content of the last file of `ledger`, or None if that file exists. Without a process group,
    saves the state of this process. Raises ResourceError (no space) or CheckpointError (a value is not finite, the data
    read back differs from the data written, the owned blocks do not make up the tensors) on every rank. After an error,
    older checkpoints are unchanged, and the unfinished one is ignored.
    """
    started = time.perf_counter()
    files = CheckpointFiles(folder.of(facts.kind), facts.step, facts.epoch)
    collected: list[tuple[FileContents, list[Tensor]]] = []

    def collect() -> int:
        collected.append(file_contents(state, facts.kind))
        return sum(part.bytes for part in collected[0][0].parts)

    def write() -> RankBlocks:
        contents, tensors = collected[0]
        written = files.write(rank(), contents, bytes_of(tensors))
        if require_unchanged is not None:
            require_unchanged()
        return written

    from_all_ranks(collect, files.make_folder)
    saved = from_all_ranks(
        write,
        lambda parts: vars(files.finish(facts, parts, ledger, segment, keep, keep_every)),
        RankBlocks.to_bytes,
        RankBlocks.from_bytes,
    )
    sweep_disks(folder)
    return SavedCheckpoint(files.path, stall_seconds=time.perf_counter() - started, **saved)


def file_contents(state: TrainingState, kind: SaveKind = FULL) -> tuple[FileContents, list[Tensor]]:
    """Return what this rank's file holds, and the tensors of its parts in the same order."""
    full = kind == FULL
    blocks = state.blocks(state.optimizer.moments(), first_rank=rank() == 0) if full else state.weights()
    written = [block for block in blocks if block.written and block.tensor.numel()]
    # Tensors with larger elements go first, so that every tensor in the file is aligned.
    written.sort(key=lambda block: (-block.tensor.itemsize, block.name, block.offsets))
    tensors = [(key_of(b.name, b.offsets), b.tensor) for b in written] + (random_state() if full else [])
    contents = FileContents(
        tuple(part_of(key, tensor) for key, tensor in tensors),
        tuple((block.name, block.offsets, block.sizes) for block in written),
        {block.name: (dtype_name(block.tensor.dtype), block.shape) for block in blocks},
    )
    return contents, [tensor for _, tensor in tensors]
