"""Save a checkpoint: collective, and nothing is called saved before it was read back from the disk."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import Module
from torch.optim import Optimizer

from ingot.checkpoint.agree import planned_together
from ingot.checkpoint.state import training_state
from ingot.checkpoint.writer import CheckpointFacts, IngotWriter
from ingot.schema.checkpoint import LedgerSegment
from ingot.schema.layout import RunFolder

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
    model: Module,
    optimizer: Optimizer,
    ledger: tuple[LedgerSegment, ...],
    *,
    keep: int,
) -> SavedCheckpoint:
    """Write, verify and publish the checkpoint of step `facts.step`, then remove all but the newest `keep`.

    All ranks call it together and return together. Without a process group it saves one process. Raises ResourceError
    (no space) or CheckpointError (a value is not finite, the disk lies) on every rank; older checkpoints stay as they
    were, and what was written of this one does not count.
    """
    started = time.perf_counter()
    writer = IngotWriter(folder, facts, ledger, keep)
    # Flat already: the planner must not rename anything.
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with planned_together():
        metadata = save(
            training_state(model, optimizer),
            storage_writer=writer,
            planner=planner,
            no_dist=not dist.is_initialized(),
        )
    return SavedCheckpoint(writer.path, metadata.storage_data, time.perf_counter() - started)
