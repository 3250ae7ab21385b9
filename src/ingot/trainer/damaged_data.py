"""Damaged token shards in a run with data.on_damage = "quarantine": all ranks leave out the same windows from the same
step on, before any of them uses the step's batch. So it is with windows that fail data.filter.

A rank that reads ahead knows some steps early up to which its batches are sound. The ranks agree on the last step that
all of them can read, and then need no further word up to it. If that is the step before the next one, the damage of all
ranks is recorded, and they read on without it (loader/quarantine.py).
"""

import socket
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from ingot.errors import DataError
from ingot.schema import events
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.quarantine_record import (
    Quarantined,
    continued,
    quarantined_of,
    read_quarantine,
    write_quarantine,
)
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.agree import from_all_ranks, from_rank_zero
from ingot.trainer.loader.loader import Batch, Loader
from ingot.trainer.loader.quarantine import require_few, touched
from ingot.trainer.loader.reader import DAMAGE, DamagedTokens
from ingot.trainer.mesh.collectives import largest_of_ranks
from ingot.trainer.parts import RunParts


def next_batch(trainer: RunParts) -> Batch | None:
    """Return the next batch of this rank; None after the last one. Collective if a part of the data may have to be left
    out.

    Raises DataError for damaged data if the run stops for them, or if too many windows would be in quarantine.
    """
    loader = trainer.loader
    while loader.leaves_out and not loader.is_at_end and loader.next_step > loader.agreed:
        loader.agreed = -int(largest_of_ranks(-loader.read_until())[0])
        if loader.next_step > loader.agreed:
            _quarantine(trainer)
    return next(loader, None)


def recorded_quarantine(folder: RunFolder, restored: CheckpointManifest | None) -> tuple[Quarantined, ...]:
    """Return what a run that continues from `restored` leaves out, and record it. Collective.

    One read for all ranks: the order of samples follows from it.
    """

    def record() -> list[dict[str, Any]]:
        recorded = read_quarantine(folder.quarantine)
        found = continued(recorded, restored.quarantine, restored.step) if restored else recorded
        if found != recorded:
            write_quarantine(folder.quarantine, found)
        return [asdict(one) for one in found]

    return tuple(map(quarantined_of, from_rank_zero(record)))


def _quarantine(trainer: RunParts) -> None:
    """Record the damage that ranks found for the next step, and leave it out. Collective."""
    loader, before = trainer.loader, trainer.quarantine
    own = [_report(trainer, one) for one in loader.damage()]
    reports: list[dict[str, Any]] = from_all_ranks(lambda: own, lambda ranks: _record(trainer, list(chain(*ranks))))
    trainer.quarantine = (*before, *_records(loader, reports))
    loader.leave_out(trainer.quarantine)
    for one in reports:
        _log(trainer, one)


def _report(trainer: RunParts, damage: DamagedTokens) -> dict[str, Any]:
    shard = trainer.loader.manifest.shards[damage.shard]
    return {
        "shard": shard.name,
        "begin": damage.begin,
        "end": damage.end,
        "code": damage.error.code,
        "found": damage.error.found,
        "rank": trainer.place.rank,
        "host": socket.gethostname(),
    }


def _records(loader: Loader, reports: Sequence[dict[str, Any]]) -> list[Quarantined]:
    hashes = {shard.name: shard.blocks_sha256 for shard in loader.manifest.shards}
    return [
        Quarantined(
            step=loader.next_step,
            shard=one["shard"],
            blocks_sha256=hashes[one["shard"]],
            begin=one["begin"],
            end=one["end"],
            code=one["code"],
        )
        for one in reports
    ]


def _record(trainer: RunParts, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the reports of all ranks without copies, after they are in the run folder. Raises DataError if they may
    not go into quarantine."""
    loader, reports, new = trainer.loader, [], []
    for one, record in zip(found, _records(loader, found), strict=True):
        if record not in (*trainer.quarantine, *new):
            reports.append(one)
            new.append(record)
    if not new:  # nothing that could be left out: the same would be found again and again
        raise DataError(
            "E-SHARD-UNSTEADY",
            f"damage was found before step {loader.next_step}, and was not there when its shard was read once more",
            rule="a file has the same content each time that it is read",
            fix="check the storage and the memory of the machine, then run the same command again: it continues",
            step=loader.next_step,
        )
    records = (*trainer.quarantine, *new)
    left_out = loader.order_with(records).quarantine
    fix = "copy the damaged shards again from their origin (ingot data verify DIR finds all damage)"
    require_few(left_out, trainer.config.data.max_quarantined, reports[0]["found"], fix)
    write_quarantine(trainer.folder.quarantine, records)
    return reports


def _log(trainer: RunParts, report: dict[str, Any]) -> None:
    loader = trainer.loader
    number = next(i for i, shard in enumerate(loader.manifest.shards) if shard.name == report["shard"])
    windows = len(touched(loader.order.windows, number, report["begin"], report["end"]))
    trainer.log(events.QUARANTINED, step=loader.next_step, windows=windows, **report)
    word = "damaged " if report["code"] in DAMAGE else "filtered"
    trainer.say(
        f"{word}  {report['found']} (rank {report['rank']} on {report['host']}); from step {loader.next_step} on, "
        f"{windows:,} of its windows are replaced by others of its source"
    )
