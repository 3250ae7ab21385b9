"""One checkpoint of a run: the samples consumed since the last one go to the ledger, then everything is saved."""

from dataclasses import replace

import numpy as np

from ingot.checkpoint.saving import save_checkpoint
from ingot.dist.collectives import gather_array
from ingot.loader.ledger import write_segment
from ingot.schema import events
from ingot.schema.checkpoint import LedgerSegment
from ingot.train.build import Training
from ingot.units import format_bytes, format_seconds


def save(run: Training, step: int) -> None:
    """Save and verify the checkpoint of `step`, and say so. Collective."""
    run.segments.append(next_segment(run, step))
    facts = replace(run.checkpoint_facts, step=step, tokens=step * run.config.tokens_per_step)
    saved = save_checkpoint(run.folder, facts, run.state, tuple(run.segments), keep=run.config.checkpoint.keep)
    run.ledger.forget(step)
    path = saved.path.relative_to(run.folder.root)
    run.log(events.CHECKPOINT, step=step, bytes=saved.bytes, stall_seconds=saved.stall_seconds, path=str(path))
    run.say(
        f"saved     step {step}  {format_bytes(saved.bytes)}  stall {format_seconds(saved.stall_seconds)}  verified"
    )


def next_segment(run: Training, step: int) -> LedgerSegment:
    """The samples of all ranks since the last segment, as one file. Collective."""
    first = run.segments[-1].last_step + 1 if run.segments else 1
    mine = run.ledger.segment(first, step)
    # Data rank r read the r-th part of each global batch, so their parts side by side are the batch.
    everyone = np.concatenate(list(gather_array(mine)[run.readers]), axis=1)
    if run.place.is_first:
        return write_segment(run.folder.ledger, first, step, everyone)
    return LedgerSegment(file="", first_step=first, last_step=step, sha256="")
