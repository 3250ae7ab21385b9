"""One crawl file through all stages that look at one document at a time.

What a document's fate is besides that, whether its URL or its text came before, is decided in build.py, in input
order, once all files are done. So the result of a file depends on the file and the recipe alone: it can be computed
by any worker, kept, and used again.

The folder of a curated file:
    rows.jsonl      one line per record, in crawl order: the document if it passed, else what `dropped-*` will say
    index.npy       one INDEX_DTYPE row per line
    urls.txt        the canonical URL of each line that reached stage `url`, in order
    signatures.npy  MinHash [passed documents, permutations]
    curated.json    rule names and CPU seconds per stage; written last, so without it the file was not finished
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.config import to_dict
from ingot.data.corpus import EXCERPT_CHARACTERS, json_line
from ingot.data.dedup.minhash import shingles, signature
from ingot.data.extract.html import Extract
from ingot.data.filters.c4 import C4
from ingot.data.filters.fineweb import FineWeb
from ingot.data.filters.gopher import Gopher
from ingot.data.language import Language
from ingot.data.pii import Pii
from ingot.data.recipe import DataRecipe
from ingot.data.sources.warc import read_warc
from ingot.data.stage import Stage
from ingot.data.toxicity import Toxicity
from ingot.data.url import UrlDuplicates, canonical_url
from ingot.data.workers import Report
from ingot.schema.document import Document, Drop
from ingot.storage import write_json

# The rows of the funnel, in order. Indices into this tuple stand in INDEX_DTYPE["stage"].
STAGES = (
    "read",
    "extract",
    "url",
    "language",
    "gopher",
    "c4",
    "fineweb",
    "pii",
    "near_duplicates",
    "toxicity",
)
URL, NEAR_DUPLICATES, TOXICITY = STAGES.index("url"), STAGES.index("near_duplicates"), STAGES.index("toxicity")
KEPT = len(STAGES)

# start, bytes: of the line; stage: where the document was dropped, KEPT if nowhere; rule: number of the rule's name;
# text_bytes: of a passed document
INDEX_DTYPE = [("start", "<u8"), ("bytes", "<u4"), ("text_bytes", "<u4"), ("stage", "u1"), ("rule", "<u2")]
DONE = "curated.json"
Classifier = Callable[[str], float]


@dataclass(frozen=True)
class CurateTask:
    path: Path
    source: str
    folder: Path
    recipe: DataRecipe
    classifier: Classifier | None = None

    @property
    def label(self) -> str:
        return str(self.path)


def document_stages(recipe: DataRecipe, classifier: Classifier | None = None) -> dict[str, Stage | None]:
    """The stages between `url` and `near_duplicates`, and `toxicity`, by name; None for one that is switched off."""
    quality = recipe.quality
    gopher = quality.gopher.enabled or quality.gopher_repetition.enabled
    return {
        "language": Language(recipe.language.keep, recipe.language.threshold) if recipe.language.enabled else None,
        "gopher": Gopher(quality.gopher, quality.gopher_repetition) if gopher else None,
        "c4": C4(quality.c4) if quality.c4.enabled else None,
        "fineweb": FineWeb(quality.fineweb) if quality.fineweb.enabled else None,
        "pii": Pii(recipe.pii) if recipe.pii.enabled else None,
        "toxicity": Toxicity(recipe.toxicity, classifier=classifier) if recipe.toxicity.enabled else None,
    }


def dropped_row(row: dict, drop: Drop) -> dict:
    """The line in `dropped-*` for a document, given as its own line."""
    return {
        "id": row["id"],
        "url": row["url"],
        "source": row["source"],
        "file": row["file"],
        "stage": drop.stage,
        "rule": drop.rule,
        "value": drop.value,
        "text": row["text"][:EXCERPT_CHARACTERS],
    }


def _row(document: Document) -> dict:
    names = ("id", "url", "source", "file", "record_id", "language", "text")
    return {name: getattr(document, name) for name in names}


class _Output:
    """The open files of one folder, and the index in memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.rows, self.urls = (folder / "rows.jsonl").open("wb"), (folder / "urls.txt").open("wb")
        self.index, self.signatures, self.rules = [], [], {}
        self.start = 0

    def write(self, row: dict, drop: Drop | None, text_bytes: int = 0) -> None:
        line = json_line(row)
        self.rows.write(line)
        stage, rule = KEPT, 0
        if drop is not None:
            stage = STAGES.index(drop.stage)
            rule = self.rules.setdefault(drop.rule, len(self.rules))
        self.index.append((self.start, len(line), text_bytes, stage, rule))
        self.start += len(line)

    def write_url(self, canonical: str) -> None:
        self.urls.write(canonical.replace("\n", "%0A").encode("utf-8", "surrogatepass") + b"\n")

    def close(self, permutations: int, seconds: dict[str, float]) -> None:
        self.rows.close()
        self.urls.close()
        np.save(self.folder / "index.npy", np.array(self.index, INDEX_DTYPE))
        np.save(self.folder / "signatures.npy", np.array(self.signatures, np.uint32).reshape(-1, permutations))
        write_json(self.folder / DONE, {"rules": list(self.rules), "seconds": seconds})


class _Clock:
    """CPU seconds by stage: `lap(name)` gives everything since the last lap to `name`. Writing counts as reading."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._last = time.process_time_ns()

    def lap(self, name: str) -> None:
        now = time.process_time_ns()
        self.seconds[name] += (now - self._last) / 1e9
        self._last = now


def curate(task: CurateTask, report: Report) -> None:
    """Write task.folder. Raises DataError for a file that is no crawl file."""
    shutil.rmtree(task.folder, ignore_errors=True)  # of an attempt that was killed
    task.folder.mkdir(parents=True)
    output, clock = _Output(task.folder), _Clock()
    extract, seen = Extract(), UrlDuplicates()
    stages = document_stages(task.recipe, task.classifier)
    toxicity = stages.pop("toxicity")
    dedup = task.recipe.dedup
    for count, (document, drop) in enumerate(read_warc(task.path, task.source), 1):
        clock.lap("read")
        if drop is None:
            drop = extract(document)
            clock.lap("extract")
        if drop is None:
            canonical = canonical_url(document.url)
            output.write_url(canonical)
            if seen.seen(canonical):
                drop = Drop("url", "url.duplicate", canonical[:EXCERPT_CHARACTERS])
            clock.lap("url")
        if drop is None:
            drop = _first_drop(document, stages, clock)
        if drop is not None:
            output.write(dropped_row(_row(document), drop), drop)
        else:
            if dedup.enabled:
                output.signatures.append(signature(shingles(document.text, dedup.ngram), dedup.permutations))
                clock.lap("near_duplicates")
            drop = toxicity(document) if toxicity else None
            clock.lap("toxicity")
            # Near-duplicates come first in the funnel and need the whole text, so that one carries its drop along.
            row = _row(document) | (to_dict(drop) if drop else {})
            output.write(row, drop, len(document.text.encode("utf-8", "surrogatepass")))
        report(count)
    output.close(dedup.permutations, clock.seconds)


def _first_drop(document: Document, stages: dict[str, Stage | None], clock: _Clock) -> Drop | None:
    for name, stage in stages.items():
        if stage is None:
            continue
        drop = stage(document)
        clock.lap(name)
        if drop is not None:
            return drop
    return None


class Curated:
    """A finished folder, for reading."""

    def __init__(self, folder: Path):
        self.folder = folder
        facts = json.loads((folder / DONE).read_text(encoding="utf-8"))
        self.rules: list[str] = facts["rules"]
        self.seconds: dict[str, float] = facts["seconds"]
        self.index = np.load(folder / "index.npy")

    @property
    def passed(self) -> np.ndarray:
        """Numbers of the documents that passed all stages before near_duplicates: those with a signature."""
        return np.flatnonzero(self.index["stage"] >= TOXICITY)

    def signatures(self) -> np.ndarray:
        return np.load(self.folder / "signatures.npy")

    def urls(self) -> list[str]:
        text = (self.folder / "urls.txt").read_bytes().decode("utf-8", "surrogatepass")
        return text.split("\n")[:-1]

    def row(self, number: int) -> dict:
        """Line `number`, parsed."""
        entry = self.index[number]
        with (self.folder / "rows.jsonl").open("rb") as file:
            file.seek(int(entry["start"]))
            return json.loads(file.read(int(entry["bytes"])))
