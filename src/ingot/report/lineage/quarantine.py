"""The entries of a quarantine list for the suspects of a run."""

import time
from pathlib import Path

from ingot.data.lineage.records import rows_of
from ingot.errors import DataError
from ingot.report.diagnose.spike import SpikeReport
from ingot.report.lineage.exposure import data_of
from ingot.schema.quarantine import QuarantineEntry


def entries_for(report: SpikeReport) -> list[QuarantineEntry]:
    """Return an entry for each document with an unusual sign, of the worst step in which it is."""
    suspects = [(batch.step.step, document) for batch in report.batches for document in batch.suspects]
    texts = _texts(report.root, {document.id for _, document in suspects})
    entries: dict[str, QuarantineEntry] = {}
    for step, document in suspects:
        sign = document.reasons[0]
        entry = QuarantineEntry(
            document=document.id,
            url=document.url,
            text=texts.get(document.id, ""),
            reason=sign.kind.name,
            evidence=sign.words,
            run=report.name,
            step=step,
            date=time.strftime("%Y-%m-%d", time.gmtime()),
        )
        entries.setdefault(document.id, entry)
    return list(entries.values())


def _texts(root: Path, ids: set[str]) -> dict[str, str]:
    """Return the hashes of the texts as they were extracted, by document; none without lineage."""
    try:
        return {row["id"]: row["before"] for row in rows_of(data_of(root), ids)} if ids else {}
    except DataError:
        return {}
