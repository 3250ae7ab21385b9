"""The files of a corpus: one of kept and one of dropped documents per crawl file."""

import json
from dataclasses import dataclass
from pathlib import Path

from ingot.data.corpus import json_line, jsonl_writer
from ingot.data.curate import KEPT, TOXICITY, Curated, dropped_row
from ingot.data.workers import Report
from ingot.schema.corpus import CorpusPart
from ingot.schema.document import Drop
from ingot.storage import sha256_file


@dataclass(frozen=True)
class WriteTask:
    """`curated`: folder of crawl file `number`. `overrides`: line number -> drop, decided after it was curated."""

    curated: Path
    number: int
    source: str
    overrides: dict[int, Drop]
    folder: Path

    @property
    def label(self) -> str:
        return str(self.folder / f"{self.source}-{self.number:05d}")


def write_parts(task: WriteTask, report: Report) -> tuple[CorpusPart | None, CorpusPart | None]:
    """Write the kept and the dropped documents of one crawl file; None for a part that would be empty."""
    curated = Curated(task.curated)
    kept = task.folder / f"{task.source}-{task.number:05d}.jsonl.gz"
    dropped = task.folder / f"dropped-{task.number:05d}.jsonl.gz"
    kept_sizes, dropped_sizes = [], []
    rows = (curated.folder / "rows.jsonl").open("rb")
    with rows, jsonl_writer(kept) as keep, jsonl_writer(dropped) as drop:
        for number, line in enumerate(rows):
            stage, override = int(curated.index["stage"][number]), task.overrides.get(number)
            if stage == KEPT and override is None:
                keep(line)
                kept_sizes.append(int(curated.index["text_bytes"][number]))
            else:
                row = _dropped(json.loads(line), stage, override)
                drop(json_line(row))
                dropped_sizes.append(len(row["text"].encode("utf-8", "surrogatepass")))
            report(number)
    return _part(kept, task.source, kept_sizes), _part(dropped, task.source, dropped_sizes)


def _dropped(row: dict, stage: int, override: Drop | None) -> dict:
    if override is not None:
        return dropped_row(row, override)
    if stage == TOXICITY:  # the whole document with its drop, see curate.py
        return dropped_row(row, Drop(row["stage"], row["rule"], row["value"]))
    return row


def _part(path: Path, source: str, sizes: list[int]) -> CorpusPart | None:
    if not sizes:
        path.unlink()
        return None
    return CorpusPart(
        name=path.name, source=source, documents=len(sizes), text_bytes=sum(sizes), sha256=sha256_file(path)
    )
