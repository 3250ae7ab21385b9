"""One checkpoint of a run: the samples consumed since the last one go to the ledger, then everything is saved."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from ingot.schema import events
from ingot.schema.checkpoint import LedgerSegment
from ingot.trainer.build import Training
from ingot.trainer.checkpoint.saving import save_checkpoint
from ingot.trainer.loader.ledger import write_segment
from ingot.units import format_bytes, format_seconds


def save(run: Training, step: int) -> None:
    """Save and verify the checkpoint of `step`, and say so. Collective."""
    began = time.monotonic()
    run.segments.append(next_segment(run, step))
    facts = replace(run.checkpoint_facts, step=step, tokens=step * run.config.tokens_per_step)
    saved = save_checkpoint(run.folder, facts, run.state, tuple(run.segments), keep=run.config.checkpoint.keep)
    run.ledger.forget(step)
    path, stall_seconds = saved.path.relative_to(run.folder.root), time.monotonic() - began
    run.log(events.CHECKPOINT, step=step, bytes=saved.bytes, stall_seconds=stall_seconds, path=str(path))
    run.say(f"saved     step {step}  {format_bytes(saved.bytes)}  stall {format_seconds(stall_seconds)}  verified")


def next_segment(run: Training, step: int) -> LedgerSegment:
    """The samples of all ranks since the last segment, as one file. Collective."""
    first = run.segments[-1].last_step + 1 if run.segments else 1
    mine = run.ledger.segment(first, step)
    if not run.place.is_first:
        if run.place.rank in run.readers:
            dist.send(torch.from_numpy(np.ascontiguousarray(mine)), dst=0)
        return LedgerSegment(file="", first_step=first, last_step=step, sha256="")
    # Data rank r read the r-th part of each global batch, so their parts side by side are the batch.
    return write_segment(run.folder.ledger, first, step, np.concatenate(_of_readers(mine, run.readers), axis=1))


def _of_readers(mine: np.ndarray, readers: Sequence[int]) -> list[np.ndarray]:
    """On rank 0: what each of `readers` sends, all of the shape of `mine`. The others have nothing that is new."""
    parts = [torch.from_numpy(mine) if rank == 0 else torch.empty(mine.shape, dtype=torch.int64) for rank in readers]
    arriving = [dist.irecv(part, src=rank) for rank, part in zip(readers, parts, strict=True) if rank != 0]
    for work in arriving:
        if work is not None:
            work.wait()
    return [part.numpy() for part in parts]
