"""The ledger of a checkpoint: the files of consumed samples, in the ledger folder of its run, that its manifest lists.

A run that continues without them could no longer prove what it consumed, so a checkpoint with a damaged segment is as
unusable as one with a damaged tensor. `loader/ledger.py` writes and reads the files. No torch.
"""

from collections.abc import Sequence
from pathlib import Path

from ingot.schema.checkpoint import CheckpointManifest, LedgerSegment
from ingot.schema.run_folder import RunFolder
from ingot.storage import sha256_file
from ingot.trainer.checkpoint.rules import damaged, global_batch, size_of, wrong_size

_ID_BYTES = 8


def ledger_beside(checkpoint: Path) -> Path | None:
    """Return the ledger folder of the run that `checkpoint` is in; None for a copy outside a run, which has no
    ledger."""
    run = RunFolder(checkpoint.absolute().parent.parent)
    return run.ledger if checkpoint.absolute().parent == run.checkpoints else None


def check_segment_sizes(checkpoint: Path, manifest: CheckpointManifest, segments: Sequence[LedgerSegment]) -> None:
    """Raise CheckpointError unless each file of `segments` holds one row of samples per step.

    The last segment has rows of the global batch of the settings. Earlier ones may have rows of another length, because
    the global batch may have been changed on the way. Without effect for a checkpoint outside a run.
    """
    if (ledger := ledger_beside(checkpoint)) is None:
        return
    for segment in segments:
        name, steps = f"ledger/{segment.file}", segment.last_step - segment.first_step + 1
        size = size_of(checkpoint, ledger / segment.file, name)
        batch = global_batch(manifest) if segment == manifest.ledger[-1] else 0
        if batch and size != steps * _ID_BYTES * batch:
            raise wrong_size(checkpoint, name, size, steps * _ID_BYTES * batch)
        if not size or size % (steps * _ID_BYTES):
            what = f"{name} has {size:,} bytes, not equally many samples of {_ID_BYTES} bytes for {steps} steps"
            raise damaged(checkpoint, what, "E-CKPT-SIZE", file=name, bytes=size)


def verify_segments(checkpoint: Path, manifest: CheckpointManifest, segments: Sequence[LedgerSegment]) -> None:
    """Read the files of `segments` and compare them with their hashes in the manifest. Raises CheckpointError.

    Without effect for a checkpoint outside a run.
    """
    check_segment_sizes(checkpoint, manifest, segments)
    if (ledger := ledger_beside(checkpoint)) is None:
        return
    for segment in segments:
        name = f"ledger/{segment.file}"
        try:
            same = sha256_file(ledger / segment.file) == segment.sha256
        except OSError as error:
            raise damaged(checkpoint, f"{name} cannot be read ({error.strerror})", "E-CKPT-READ", file=name) from None
        if not same:
            raise damaged(checkpoint, f"{name} differs from the samples that were saved", "E-CKPT-HASH", file=name)
