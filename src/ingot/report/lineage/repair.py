"""Write damaged segments of a ledger again: their samples follow from the order, and the checkpoint has their hash.

Every checkpoint lists all segments before it, so one damaged file makes all later checkpoints unusable, although their
weights are sound. A segment is written only if its computed samples have exactly the hash that the checkpoint holds:
the repaired file has the bits of the lost one.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ingot.errors import EXIT_OK, DataError
from ingot.report.lineage.exposure import RunTokens
from ingot.report.lineage.order_sections import OrderByStep
from ingot.schema.checkpoint import LedgerSegment
from ingot.storage import sha256_bytes, write_atomic
from ingot.trainer.checkpoint.folders import find_checkpoint
from ingot.trainer.checkpoint.manifest import list_checkpoints, read_manifest
from ingot.trainer.loader.ledger import read_segment
from ingot.trainer.resilience.lock import RunLock


@dataclass(frozen=True, kw_only=True)
class Repair:
    """The result of a repair. checkpoint: the step of the checkpoint whose segments were checked. intact: the number of
    segments that had their hash. written: the files that were written again."""

    run: str
    checkpoint: int
    intact: int
    written: tuple[str, ...]

    def as_dict(self) -> dict:
        return asdict(self) | {"exit_code": EXIT_OK}


def repair_ledger(path: Path) -> Repair:
    """Write every damaged or missing segment of the newest readable checkpoint of the run folder `path` again.

    Raises DataError if the computed samples of a segment do not have its hash, RunBusyError if the run is training,
    CheckpointError if no manifest can be read. Segments before the one in the error are repaired.
    """
    folder, named = find_checkpoint(path)
    with RunLock(folder.lock):
        listed = (c.manifest for c in list_checkpoints(folder.checkpoints) if c.manifest)
        manifest = next(listed, None) or read_manifest(named)
        orders = OrderByStep(RunTokens(folder.root), manifest.step)
        written = []
        for segment in manifest.ledger:
            if _is_intact(folder.ledger, segment):
                continue
            write_atomic(folder.ledger / segment.file, _computed(segment, orders, folder.ledger))
            written.append(segment.file)
    return Repair(
        run=str(path), checkpoint=manifest.step, intact=len(manifest.ledger) - len(written), written=tuple(written)
    )


def _is_intact(ledger: Path, segment: LedgerSegment) -> bool:
    try:
        return read_segment(ledger, segment)[1]
    except DataError:
        return False


def _computed(segment: LedgerSegment, orders: OrderByStep, ledger: Path) -> bytes:
    """Return the content of a segment as the trainer wrote it. Raises DataError if it has another hash."""
    rows = []
    for step in range(segment.first_step, segment.last_step + 1):
        section, order = orders.at(step)
        rows.append(order.step(step, section.global_batch).astype("<i8"))
    data = np.concatenate(rows).tobytes()
    if sha256_bytes(data) != segment.sha256:
        raise DataError(
            "E-LEDGER-REPAIR",
            f"the samples of steps {segment.first_step} to {segment.last_step} by the order do not have the hash that "
            f"the checkpoint holds for {segment.file}",
            rule="a segment is written again only with the bits that were saved; nothing was written for it",
            fix="restore the settings and tokens that these steps were trained with, or the file from a copy",
            path=str(ledger / segment.file),
            step=segment.first_step,
            last_step=segment.last_step,
        )
    return data
