"""Checkpoints of a run in progress: write one, and load the newest one and open the data at the next step.

Before a save, the samples consumed since the last checkpoint go to the ledger. A run loads when it starts and when it
rolls back.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from ingot.errors import RunFailed
from ingot.schema import events
from ingot.schema.accepted import read_accepted
from ingot.schema.checkpoint import CheckpointManifest, LedgerSegment
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.accepted import record_resumed
from ingot.trainer.checkpoint.agree import from_rank_zero
from ingot.trainer.checkpoint.load import resume
from ingot.trainer.checkpoint.save import CheckpointFacts, save_checkpoint
from ingot.trainer.heldout import data_path
from ingot.trainer.loader.ledger import Ledger, write_segment
from ingot.trainer.loader.loader import Loader
from ingot.trainer.loader.order import earlier_weights
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parts import RunParts, StepParts
from ingot.units import format_bytes, format_seconds


def save(trainer: RunParts, step: int) -> None:
    """Save and verify the checkpoint of `step`, and report it. Collective."""
    began = time.monotonic()
    trainer.segments.append(next_segment(trainer, step))
    tokens = step * trainer.config.tokens_per_step
    facts = replace(
        trainer.checkpoint_facts,
        step=step,
        tokens=tokens,
        health=trainer.policy.health(),
        callbacks=trainer.callbacks.records(),
    )
    keep = trainer.config.checkpoint.keep
    saved = save_checkpoint(trainer.folder, facts, trainer.state, tuple(trainer.segments), keep=keep)
    trainer.ledger.forget(step)
    path, stall_seconds = saved.path.relative_to(trainer.folder.root), time.monotonic() - began
    trainer.log(events.CHECKPOINT, step=step, bytes=saved.bytes, stall_seconds=stall_seconds, path=str(path))
    trainer.say(f"saved     step {step}  {format_bytes(saved.bytes)}  stall {format_seconds(stall_seconds)}  verified")


def next_segment(trainer: RunParts, step: int) -> LedgerSegment:
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


def load_newest(
    parts: StepParts, folder: RunFolder, facts: CheckpointFacts, log: Callable[..., None]
) -> CheckpointManifest | None:
    """Load the newest undamaged checkpoint of `folder` into `parts`. Returns None for a new run. Collective.

    A checkpoint that cannot be used is logged, and the next older one is tried. Settings that differ from those of the
    loaded checkpoint are recorded.
    """
    restored = resume(
        folder,
        parts.state,
        settings=facts.settings,
        data_fingerprint=facts.data_fingerprint,
        on_refused=lambda step, path, reason: log(
            events.CHECKPOINT_REFUSED, step=step, path=str(path.relative_to(folder.root)), reason=reason
        ),
    )
    if restored:
        parts.model.publish()
        parts.callbacks.restore(restored.callbacks)
        # The order of samples depends on this record: no rank may open the data before it is written.
        from_rank_zero(lambda: record_resumed(folder, restored, facts.settings, facts.data_fingerprint, log))
    return restored


def open_loader(config: RunConfig, folder: RunFolder, mesh: Mesh, device: torch.device, first_step: int) -> Loader:
    """Open the batches of this rank, from `first_step` to the run's last step."""
    return Loader(
        data_path(folder, config.data.tokens),
        seq_len=config.train.seq_len,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        seed=config.seed,
        weights=config.data.weights,
        earlier=earlier_weights(read_accepted(folder.accepted), config.data.weights),
        rank=mesh.data_rank,
        ranks=mesh.data_ranks,
        first_step=first_step,
        last_step=config.train.steps,
        device=device,
        mask_documents=config.data.mask_documents,
        prefetch=config.data.prefetch,
    )


def reload(trainer: RunParts) -> int:
    """Load the newest undamaged checkpoint into the running `trainer`. Returns its step. Collective.

    Raises RunFailed if there is no checkpoint yet, CheckpointError if no checkpoint can be used.
    """
    restored = load_newest(trainer, trainer.folder, trainer.checkpoint_facts, trainer.log)
    if restored is None:
        raise RunFailed(
            "E-ROLLBACK-NO-CHECKPOINT",
            "the policy asked to roll back, but there is no checkpoint yet",
            rule="a run rolls back to its newest checkpoint",
            fix="lower checkpoint.every_steps, so that the first checkpoint is saved earlier",
            run=str(trainer.folder.root),
        )
    trainer.loader.close()
    trainer.loader = open_loader(trainer.config, trainer.folder, trainer.mesh, trainer.place.device, restored.step + 1)
    trainer.ledger, trainer.segments = Ledger(), list(restored.ledger)
    return restored.step
