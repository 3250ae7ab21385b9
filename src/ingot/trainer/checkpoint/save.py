"""Save a checkpoint: every rank writes the blocks that it owns to its own file, and rank 0 writes the manifest.

A checkpoint counts as saved only after its files have been read back from the disk and compared.
"""

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.errors import ResourceError
from ingot.schema.accepted import read_accepted
from ingot.schema.checkpoint import CheckpointManifest, Health, LedgerSegment, file_of, key_of
from ingot.schema.run_folder import RunFolder
from ingot.storage import fsync_dir, require_free
from ingot.trainer.checkpoint.agree import from_all_ranks, rank
from ingot.trainer.checkpoint.folders import SAVING, prune, publish
from ingot.trainer.checkpoint.manifest import write_manifest
from ingot.trainer.checkpoint.part import RankBlocks, assemble
from ingot.trainer.checkpoint.state import StateBlock, TrainingState, random_state
from ingot.trainer.checkpoint.tensor_file import dtype_name, write_tensors

_LEDGER_BYTES = 16 << 20  # free space for the ledger
_EXTRA_BYTES_PER_RANK = 64 << 10  # free space for a rank's file header, random state and part of the manifest


@dataclass(frozen=True)
class CheckpointFacts:
    """The fields of a checkpoint's manifest (schema/checkpoint.py) that do not depend on its tensors."""

    step: int
    tokens: int
    settings: dict[str, Any]
    config_sha256: str
    data_fingerprint: str
    layout: dict[str, int]
    health: Health = field(default_factory=Health)
    callbacks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A saved checkpoint. bytes: the size of all tensor files. stall_seconds: how long training paused on this rank."""

    path: Path
    bytes: int
    stall_seconds: float


def save_checkpoint(
    folder: RunFolder,
    facts: CheckpointFacts,
    state: TrainingState,
    ledger: tuple[LedgerSegment, ...],
    *,
    keep: int,
) -> SavedCheckpoint:
    """Write, verify and publish the checkpoint of step `facts.step`, then remove all but the newest `keep`. Collective.

    Without a process group, saves the state of this process. Raises ResourceError (no space) or CheckpointError (a
    value is not finite, the data read back differs from the data written, the owned blocks do not make up the tensors)
    on every rank. After an error, older checkpoints are unchanged, and the unfinished one is ignored.
    """
    started = time.perf_counter()
    writer = CheckpointWriter(folder, facts, ledger, keep)
    from_all_ranks(lambda: writer.open(state), writer.make_folder)
    saved_bytes = from_all_ranks(writer.write, writer.finish, RankBlocks.to_bytes, RankBlocks.from_bytes)
    return SavedCheckpoint(writer.path, saved_bytes, time.perf_counter() - started)


class CheckpointWriter:
    """A writer of one checkpoint into a temporary folder, which is renamed once it is complete.

    The order: every rank calls `open`, rank 0 `make_folder`, every rank `write`, rank 0 `finish`.
    """

    def __init__(self, folder: RunFolder, facts: CheckpointFacts, ledger: tuple[LedgerSegment, ...], keep: int):
        self.folder, self.facts, self.ledger, self.keep = folder, facts, ledger, keep
        self.path = folder.checkpoint(facts.step)
        self.temporary = self.path.with_name(SAVING + self.path.name)
        self.blocks: list[StateBlock] = []

    def open(self, state: TrainingState) -> int:
        """Collect the blocks of this rank. Returns the number of bytes that the rank will write."""
        self.blocks = state.blocks(state.optimizer.moments(), first_rank=rank() == 0)
        return sum(block.tensor.nbytes for block in self.blocks if block.written)

    def make_folder(self, bytes_by_rank: list[int]) -> None:
        """Check that the disk has room, and make the temporary folder. Called on rank 0."""
        needed = sum(bytes_by_rank) + _LEDGER_BYTES + _EXTRA_BYTES_PER_RANK * len(bytes_by_rank)
        require_free(self.folder.checkpoints, needed, f"the checkpoint of step {self.facts.step}")
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)

    def write(self) -> RankBlocks:
        """Write and verify this rank's file. Returns its part of the manifest."""
        blocks = [block for block in self.blocks if block.written and block.tensor.numel()]
        # Tensors with larger elements go first, so that every tensor in the file is aligned.
        blocks.sort(key=lambda block: (-block.tensor.itemsize, block.name, block.offsets))
        file = file_of(rank())
        tensors = [(key_of(b.name, b.offsets), b.tensor) for b in blocks] + random_state()
        try:
            entry, checksums = write_tensors(self.temporary / file, tensors)
        except OSError as error:
            raise ResourceError(
                "E-CKPT-WRITE",
                f"{self.temporary / file} cannot be written ({error.strerror})",
                rule="a checkpoint is saved completely or not at all; the last checkpoint is unchanged",
                fix="free space on that disk or repair the disk, then run the same command: the run continues",
                path=str(self.temporary / file),
                cause=error.strerror,
            ) from None
        kinds = {b.name: (dtype_name(b.tensor.dtype), b.shape) for b in self.blocks}
        written = [(b.name, b.offsets, b.sizes) for b in blocks]
        return RankBlocks.pack(entry, kinds, written, checksums[: len(blocks)])

    def finish(self, parts: list[RankBlocks]) -> int:
        """Write the manifest, rename the folder and prune old checkpoints. Returns the bytes of all files.

        Called on rank 0 after every rank has written and verified its file.
        """
        cuts, tensors = assemble(parts)
        manifest = CheckpointManifest(
            **{name: getattr(self.facts, name) for name in self.facts.__dataclass_fields__},
            world=len(parts),
            files={file_of(rank_number): part.file for rank_number, part in enumerate(parts)},
            cuts=cuts,
            tensors=tensors,
            ledger=self.ledger,
            accepted=tuple(read_accepted(self.folder.accepted)),
        )
        write_manifest(self.temporary, manifest)
        fsync_dir(self.temporary)
        publish(self.folder, self.facts.step)
        prune(self.folder, self.facts.step, self.keep)
        return sum(file.bytes for file in manifest.files.values())
