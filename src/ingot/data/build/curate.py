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

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from ingot.config import from_dict
from ingot.data.build.corpus import EXCERPT_CHARACTERS, json_line
from ingot.data.build.recipe import DataRecipe, recipe_of
from ingot.data.build.stage import Stage
from ingot.data.build.stages import KEPT, STAGES, DocumentStages, document_stages
from ingot.data.dedup.arrays import ArrayWriter
from ingot.data.dedup.equal import text_hash
from ingot.data.dedup.minhash import signature_of
from ingot.data.sources.input import BadInput, Input, forget, read
from ingot.data.sources.remote import RemoteRules
from ingot.data.sources.url import UrlDuplicates, canonical_url
from ingot.data.tasks.task import Context
from ingot.errors import DataError
from ingot.schema.document import Document, Drop, document_id
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
_ROWS_IN_MEMORY = 4096
_URLS_IN_MEMORY = 1 << 20  # 80 bytes each


def curate(context: Context) -> int:
    """Task. arguments: name, identity, input (without its location), decides, libraries, purged.

    places: location, stamp, cache, remote, purged.
    inputs: the task of the decontamination index, if the recipe has one. Returns how many records there were.
    Raises DataError for a file that cannot be had, and for one that changed under our hands.
    """
    whole = from_dict(DataRecipe, context.task.arguments["decides"]["recipe"])
    recipe = recipe_of(whole, context.task.arguments["input"]["source"])
    source = _Source(context, recipe)
    stages = document_stages(
        recipe, index=context.folders[0] if context.folders else None, purged=context.task.places["purged"]
    )
    clock, seen, counts = _Clock(), UrlDuplicates(), Counter()
    with _Output(context.out, recipe.dedup.permutations) as output:
        for document, drop in source.records(counts):
            clock.lap("read")
            if output.records % _URLS_IN_MEMORY == 0:
                seen = UrlDuplicates()  # what it would have known is found in duplicates.py, at the price of some work
            row, drop = _fate(document, drop, stages, seen, output, clock)
            if drop is None:
                signature = None
                if recipe.dedup.enabled:
                    signature = signature_of(document.text, recipe.dedup)
                    clock.lap("near_duplicates")
                text = document.text.encode("utf-8", "surrogatepass")
                row |= {"after": xxhash.xxh3_128_hexdigest(text), "after_bytes": len(text)}
                output.passed(text_hash(document.text), signature)
                output.write(row, None, len(text))
            else:
                output.write(dropped_row(row, drop), drop)
            counts[drop.rule if drop else "kept"] += 1
    write_json(context.out / "seconds_by_stage.json", clock.seconds)
    return output.records


def _fate(
    document: Document,
    drop: Drop | None,
    stages: DocumentStages,
    seen: UrlDuplicates,
    output: "_Output",
    clock: "_Clock",
) -> tuple[dict, Drop | None]:
    """`document` through the stages, unless it was dropped when it was read: its row, and why it has to go."""
    row = {name: getattr(document, name) for name in ("id", "url", "source", "file", "record_id")}
    if drop is None:
        drop = _first_drop(document, stages.before_url, clock)
    text = document.text.encode("utf-8", "surrogatepass")
    row["before"], row["before_bytes"] = (xxhash.xxh3_128_hexdigest(text), len(text)) if text else ("", 0)
    if stages.purged is not None and (purged := stages.purged(document)) is not None:
        # Whatever else would be said of it: nothing of it may come back but that it was left out.
        drop, row = purged, row | {"url": "", "before": "", "before_bytes": 0}
        clock.lap("purged")
    if drop is None:
        canonical = canonical_url(document.url)
        output.reached_url(xxhash.xxh3_64_intdigest(canonical.encode("utf-8", "surrogatepass")))
        if seen.seen(canonical):
            drop = Drop("url", "url.duplicate", canonical[:EXCERPT_CHARACTERS])
        clock.lap("url")
    if drop is None:
        drop = _first_drop(document, stages.behind_url, clock)
    return row | {"language": document.language, "text": document.text, "notes": document.notes}, drop


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
            try:
                pair = next(self._records, None)
            except BadInput as error:  # one of a hundred thousand must not stop the others
                pair = self._bad(error)
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

    def _bad(self, error: BadInput) -> tuple[Document, Drop]:
        """The one record that stands for an input, or the rest of it, that cannot be read."""
        name = self._input.name
        document = Document(
            id=document_id(name, "input", ""), url="", source=self._input.source, file=name, record_id="input"
        )
        return document, Drop("read", "read.bad_input", error.found + (f"; {error.fix}" if error.fix else ""))

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
    """The open files of one folder; rows of arrays wait in memory only until there are some."""

    def __init__(self, folder: Path, permutations: int):
        self.records = self.start = 0
        with contextlib.ExitStack() as stack:
            self._rows = stack.enter_context((folder / "rows.jsonl").open("wb"))
            self._arrays = {
                name: stack.enter_context(ArrayWriter(folder / f"{name}.npy", dtype, shape))
                for name, dtype, shape in (
                    ("index", np.dtype(INDEX_DTYPE), (-1,)),
                    ("urls", "<u8", (-1,)),
                    ("texts", "<u8", (-1, 2)),
                    ("signatures", "<u4", (-1, permutations)),
                )
            }
            self._stack = stack.pop_all()
        self._index: list[tuple] = []
        self._urls: list[int] = []
        self._texts: list[bytes] = []
        self._signatures: list[np.ndarray] = []

    def __enter__(self) -> "_Output":
        return self

    def __exit__(self, *exc) -> None:
        if exc[0] is None:
            self._flush()
        self._stack.__exit__(*exc)

    def reached_url(self, url_hash: int) -> None:
        self._urls.append(url_hash)

    def passed(self, text: bytes, signature: np.ndarray | None) -> None:
        self._texts.append(text)
        if signature is not None:
            self._signatures.append(signature)

    def write(self, row: dict, drop: Drop | None, after_bytes: int = 0) -> None:
        line = json_line(row)
        self._rows.write(line)
        stage = STAGES.index(drop.stage) if drop else KEPT
        self._index.append((self.start, len(line), after_bytes, stage, bytes.fromhex(row["id"])))
        self.start += len(line)
        self.records += 1
        if len(self._index) >= _ROWS_IN_MEMORY:
            self._flush()

    def _flush(self) -> None:
        self._arrays["index"].append(np.array(self._index, INDEX_DTYPE))
        self._arrays["urls"].append(np.array(self._urls, np.uint64))
        self._arrays["texts"].append(np.frombuffer(b"".join(self._texts), "<u8"))
        if self._signatures:
            self._arrays["signatures"].append(np.array(self._signatures, np.uint32))
        for waiting in (self._index, self._urls, self._texts, self._signatures):
            waiting.clear()


class _Clock:
    """CPU seconds by stage: `lap(name)` gives everything since the last lap to `name`. Writing counts as reading."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._last = time.process_time_ns()

    def lap(self, name: str) -> None:
        now = time.process_time_ns()
        self.seconds[name] += (now - self._last) / 1e9
        self._last = now
