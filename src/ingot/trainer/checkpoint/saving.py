"""Save a checkpoint: collective, and nothing is called saved before it was read back from the disk."""

import time
from dataclasses import dataclass
from pathlib import Path

from ingot.schema.checkpoint import LedgerSegment
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.agree import from_all_ranks
from ingot.trainer.checkpoint.state import TrainingState
from ingot.trainer.checkpoint.writer import CheckpointFacts, Writer

__all__ = ["CheckpointFacts", "SavedCheckpoint", "save_checkpoint"]


@dataclass(frozen=True)
class SavedCheckpoint:
    """bytes: of all tensor files. stall_seconds: how long this rank did not train."""

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
    """Write, verify and publish the checkpoint of step `facts.step`, then remove all but the newest `keep`.

    All ranks call it together and return together. Without a process group it saves one process. Raises ResourceError
    (no space) or CheckpointError (a value is not finite, the disk lies, the owned blocks are not the whole) on every
    rank; older checkpoints stay as they were, and what was written of this one does not count.
    """
    started = time.perf_counter()
    writer = Writer(folder, facts, ledger, keep)
    from_all_ranks(lambda: writer.open(state), writer.make_folder)
    saved_bytes = from_all_ranks(writer.write, writer.finish)
    return SavedCheckpoint(writer.path, saved_bytes, time.perf_counter() - started)
