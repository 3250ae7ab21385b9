"""One crawl file through all stages that look at one document at a time.

What a document's fate is besides that, whether its URL or its text came before, is decided in duplicates.py, in input
order, once all files are done. So the result of a file depends on the file and the recipe alone: it can be computed
by any worker, kept, and used again.

The folder of a curated file:
    rows.jsonl      one line per record, in crawl order: the document if it passed, an excerpt of it if not
    index.npy       one INDEX_DTYPE row per line
    urls.npy        uint64: hash of the canonical URL of every document that reached stage `url`
    texts.npy       uint64 [passed documents, 2]: hash of the text
    signatures.npy  MinHash [passed documents, permutations]
    seconds_by_stage.json  CPU seconds
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from ingot.config import from_dict
from ingot.data.corpus import EXCERPT_CHARACTERS, json_line
from ingot.data.dedup.equal import text_hash
from ingot.data.dedup.minhash import signature_of
from ingot.data.execute.task import Context
from ingot.data.recipe import DataRecipe, recipe_of
from ingot.data.sources.input import Input, forget, read
from ingot.data.sources.remote import RemoteRules
from ingot.data.stage import Stage
from ingot.data.stages import KEPT, STAGES, document_stages
from ingot.data.url import UrlDuplicates, canonical_url
from ingot.errors import DataError
from ingot.schema.document import Document, Drop
from ingot.storage import write_json

# start, bytes: of the line; after_bytes: of the text of a passed document; stage: where the document was dropped, KEPT
# if nowhere
INDEX_DTYPE = [
    ("start", "<u8"),
    ("bytes", "<u4"),
    ("after_bytes", "<u4"),
    ("stage", "u1"),
    ("id", "V16"),
]


def curate(context: Context) -> int:
    """Task. arguments: name, identity, input (without its location), decides, purged.

    places: location, stamp, cache, remote, purged.
    inputs: the task of the decontamination index, if the recipe has one. Returns how many records there were.
    Raises DataError for a file that is no crawl file, and for one that changed under our hands.
    """
    whole = from_dict(DataRecipe, context.task.arguments["decides"]["recipe"])
    recipe = recipe_of(whole, context.task.arguments["input"]["source"])
    source = _Source(context, recipe)
    stages = document_stages(
        recipe, index=context.folders[0] if context.folders else None, purged=context.task.places["purged"]
    )
    output, clock, dedup = _Output(context.out), _Clock(), recipe.dedup
    seen, counts = UrlDuplicates(), Counter()
    for document, drop in source.records(counts):
        clock.lap("read")
        row = _row(document)
        if drop is None:
            drop = _first_drop(document, stages.before_url, clock)
        text = document.text.encode("utf-8", "surrogatepass")
        row["before"], row["before_bytes"] = (xxhash.xxh3_128_hexdigest(text), len(text)) if text else ("", 0)
        if drop is None:
            canonical = canonical_url(document.url)
            output.urls.append(xxhash.xxh3_64_intdigest(canonical.encode("utf-8", "surrogatepass")))
            if seen.seen(canonical):
                drop = Drop("url", "url.duplicate", canonical[:EXCERPT_CHARACTERS])
            clock.lap("url")
        if drop is None:
            drop = _first_drop(document, stages.behind_url, clock)
        row |= {"language": document.language, "text": document.text, "notes": document.notes}
        if drop is None:
            if dedup.enabled:
                output.signatures.append(signature_of(document.text, dedup))
                clock.lap("near_duplicates")
            text = document.text.encode("utf-8", "surrogatepass")
            row |= {"after": xxhash.xxh3_128_hexdigest(text), "after_bytes": len(text)}
            output.texts.append(text_hash(document.text))
            output.write(row, None, len(text))
            counts["kept"] += 1
        else:
            output.write(dropped_row(row, drop), drop)
            counts[drop.rule] += 1
    output.close(dedup.permutations)
    write_json(context.out / "seconds_by_stage.json", clock.seconds)
    return len(output.index)


def stamp(one: Input) -> list[list[int | str]]:
    """Size and time of change of a local input: while they stay it is taken for unchanged in one build."""
    if one.is_remote:
        return []
    path = Path(one.location)
    if not path.is_dir():
        found = path.stat()
        return [["", found.st_size, found.st_mtime_ns]]
    inside = ((file, file.lstat()) for file in sorted(path.rglob("*")))  # as it is read: links are not followed
    return [[str(file.relative_to(path)), found.st_size, found.st_mtime_ns] for file, found in inside]


class _Source:
    """The input of a task."""

    def __init__(self, context: Context, recipe: DataRecipe):
        arguments, places = context.task.arguments, context.task.places
        self._context, self._cache = context, Path(places["cache"])
        self._input = from_dict(Input, arguments["input"] | {"location": places["location"]})
        identity = arguments["identity"]
        known = json.loads(identity) if identity.startswith("{") else None
        rules = from_dict(RemoteRules, places["remote"])
        self._records = read(self._input, self._cache, recipe.limits, rules, known=known)

    def records(self, counts: Counter) -> Iterator[tuple[Document, Drop | None]]:
        """What `read` yields; before each record is touched, its number is said to the task's board."""
        context, number = self._context, 0
        while True:
            context.at(number, lambda: counts)
            pair = next(self._records, None)
            if pair is None:
                context.at(-1)
                self._check_unchanged()
                forget(self._input, self._cache)
                return
            if number in context.skip:
                pair[0].raw = b""
                pair = (pair[0], Drop("read", "read.killed_worker", "worker after worker died on it"))
            yield pair
            number += 1

    def _check_unchanged(self) -> None:
        """A remote input was checked when it was fetched, and the copy is ours."""
        if stamp(self._input) != self._context.task.places["stamp"]:
            raise DataError(
                f"{self._input.location} has changed since the build began",
                rule="inputs stay as they are during a build",
                fix="give the same command again: what changed is read again",
            )


def dropped_row(row: dict, drop: Drop) -> dict:
    """The line of a document that is dropped, given as its own line: an excerpt instead of the text."""
    more = {"stage": drop.stage, "rule": drop.rule, "value": drop.value, "text": row["text"][:EXCERPT_CHARACTERS]}
    return row | {"after": "", "after_bytes": 0} | more


def _row(document: Document) -> dict:
    return {name: getattr(document, name) for name in ("id", "url", "source", "file", "record_id")}


def _first_drop(document: Document, stages: dict[str, Stage | None], clock: "_Clock") -> Drop | None:
    for name, stage in stages.items():
        if stage is None:
            continue
        drop = stage(document)
        clock.lap(name)
        if drop is not None:
            return drop
    return None


class _Output:
    """The open files of one folder, and the index in memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.rows = (folder / "rows.jsonl").open("wb")
        self.index: list[tuple] = []
        self.urls: list[int] = []
        self.texts: list[bytes] = []
        self.signatures: list[np.ndarray] = []
        self.start = 0

    def write(self, row: dict, drop: Drop | None, after_bytes: int = 0) -> None:
        line = json_line(row)
        self.rows.write(line)
        stage = STAGES.index(drop.stage) if drop else KEPT
        self.index.append((self.start, len(line), after_bytes, stage, bytes.fromhex(row["id"])))
        self.start += len(line)

    def close(self, permutations: int) -> None:
        self.rows.close()
        np.save(self.folder / "index.npy", np.array(self.index, INDEX_DTYPE))
        np.save(self.folder / "urls.npy", np.array(self.urls, np.uint64))
        np.save(self.folder / "texts.npy", np.frombuffer(b"".join(self.texts), "<u8").reshape(-1, 2))
        np.save(self.folder / "signatures.npy", np.array(self.signatures, np.uint32).reshape(-1, permutations))


class _Clock:
    """CPU seconds by stage: `lap(name)` gives everything since the last lap to `name`. Writing counts as reading."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._last = time.process_time_ns()

    def lap(self, name: str) -> None:
        now = time.process_time_ns()
        self.seconds[name] += (now - self._last) / 1e9
        self._last = now
