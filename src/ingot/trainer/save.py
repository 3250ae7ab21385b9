"""A checkpoint of a run: the samples consumed since the last checkpoint go to the ledger, then the state is saved."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from ingot.schema import events
from ingot.schema.checkpoint import LedgerSegment
from ingot.trainer.checkpoint.save import save_checkpoint
from ingot.trainer.loader.ledger import write_segment
from ingot.trainer.parts import Trainer
from ingot.units import format_bytes, format_seconds


def save(trainer: Trainer, step: int) -> None:
    """Save and verify the checkpoint of `step`, and report it. Collective."""
    began = time.monotonic()
    trainer.segments.append(next_segment(trainer, step))
    facts = replace(trainer.checkpoint_facts, step=step, tokens=step * trainer.config.tokens_per_step)
    keep = trainer.config.checkpoint.keep
    saved = save_checkpoint(trainer.folder, facts, trainer.state, tuple(trainer.segments), keep=keep)
    trainer.ledger.forget(step)
    path, stall_seconds = saved.path.relative_to(trainer.folder.root), time.monotonic() - began
    trainer.log(events.CHECKPOINT, step=step, bytes=saved.bytes, stall_seconds=stall_seconds, path=str(path))
    trainer.say(f"saved     step {step}  {format_bytes(saved.bytes)}  stall {format_seconds(stall_seconds)}  verified")


def next_segment(trainer: Trainer, step: int) -> LedgerSegment:
    """Write the ids of the samples that all ranks consumed since the last segment to one file. Collective."""
    first = trainer.segments[-1].last_step + 1 if trainer.segments else 1
    own = trainer.ledger.segment(first, step)
    if not trainer.place.is_first:
        if trainer.place.rank in trainer.readers:
            dist.send(torch.from_numpy(np.ascontiguousarray(own)), dst=0)
        return LedgerSegment(file="", first_step=first, last_step=step, sha256="")
    # Data rank r read the r-th part of each global batch, so the concatenated parts are the batch.
    ids = np.concatenate(_of_readers(own, trainer.readers), axis=1)
    return write_segment(trainer.folder.ledger, first, step, ids)


def _of_readers(own: np.ndarray, readers: Sequence[int]) -> list[np.ndarray]:
    """Receive, on rank 0, the sample ids of each rank in `readers`, each with the shape of `own`."""
    parts = [torch.from_numpy(own) if rank == 0 else torch.empty(own.shape, dtype=torch.int64) for rank in readers]
    arriving = [dist.irecv(part, src=rank) for rank, part in zip(readers, parts, strict=True) if rank != 0]
    for work in arriving:
        if work is not None:
            work.wait()
    return [part.numpy() for part in parts]
