"""Who does what in a save: every rank writes the blocks it owns into its own file, rank 0 the manifest that names all.

In this order: every rank `open`s, rank 0 makes room (`make_folder`), every rank `write`s and verifies its file, and
rank 0 `finish`es. saving.py takes care that an error on any rank is raised on all of them.
"""

import shutil
from dataclasses import dataclass
from typing import Any

from ingot.errors import ResourceError
from ingot.schema.checkpoint import CheckpointManifest, LedgerSegment, file_of, key_of
from ingot.schema.run_folder import RunFolder
from ingot.storage import fsync_dir, require_free
from ingot.trainer.checkpoint.agree import rank
from ingot.trainer.checkpoint.manifest import write_manifest
from ingot.trainer.checkpoint.part import Part, assemble
from ingot.trainer.checkpoint.random_state import random_state
from ingot.trainer.checkpoint.retention import SAVING, prune, publish
from ingot.trainer.checkpoint.state import Block, TrainingState
from ingot.trainer.checkpoint.tensor_file import dtype_name, write_tensors

_ROOM_BYTES = 16 << 20  # for the ledger
_ROOM_BYTES_PER_RANK = 64 << 10  # for header, random state and its lines of the manifest


@dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint says about itself besides its tensors. See schema/checkpoint.py."""

    step: int
    tokens: int
    settings: dict[str, Any]
    config_sha256: str
    data_fingerprint: str
    layout: dict[str, int]


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
        needed = sum(bytes_by_rank) + _ROOM_BYTES + _ROOM_BYTES_PER_RANK * len(bytes_by_rank)
        require_free(self.folder.checkpoints, needed, f"the checkpoint of step {self.facts.step}")
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)

    def write(self) -> Part:
        blocks = [block for block in self.blocks if block.written and block.tensor.numel()]
        # Large elements first keeps every tensor of the file aligned.
        blocks.sort(key=lambda block: (-block.tensor.itemsize, block.name, block.offsets))
        file = file_of(rank())
        tensors = [(key_of(b.name, b.offsets), b.tensor) for b in blocks] + random_state()
        try:
            entry, checksums = write_tensors(self.temporary / file, tensors)
        except OSError as error:
            raise ResourceError(
                f"{self.temporary / file} cannot be written ({error.strerror})",
                rule="a checkpoint is saved whole or not at all; the last one is untouched",
                fix="free space on that disk or mend it, then run the same command: it continues",
            ) from None
        kinds = {b.name: (dtype_name(b.tensor.dtype), b.shape) for b in self.blocks}
        written = [(b.name, b.offsets, b.sizes) for b in blocks]
        return Part.pack(entry, kinds, written, checksums[: len(blocks)])

    def finish(self, parts: list[Part]) -> int:
        """On rank 0, when every rank has written and verified its file: manifest, rename, then prune. Bytes saved."""
        cuts, tensors = assemble(parts)
        manifest = CheckpointManifest(
            **{name: getattr(self.facts, name) for name in self.facts.__dataclass_fields__},
            world=len(parts),
            files={file_of(rank_number): part.file for rank_number, part in enumerate(parts)},
            cuts=cuts,
            tensors=tensors,
            ledger=self.ledger,
        )
        write_manifest(self.temporary, manifest)
        fsync_dir(self.temporary)
        publish(self.folder, self.facts.step)
        prune(self.folder, self.facts.step, self.keep)
        return sum(file.bytes for file in manifest.files.values())
