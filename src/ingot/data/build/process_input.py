"""Take one input through all stages that look at one document at a time.

A later step compares the URLs and texts of all inputs, in the order of the inputs (duplicates.py). So the result of an
input depends only on the input and the recipe: any worker can compute it, and a later call of the build uses it again.

The folder of a processed input:
    rows.jsonl      one line per record, in crawl order: the document if it passed, an excerpt of it if it was dropped
    index.npy       one INDEX_DTYPE row per line
    urls.npy        uint64 [documents that reached the stage `url`]: hash of the canonical URL
    texts.npy       uint64 [passed documents, 2]: hash of the text
    signatures.npy  uint32 [passed documents, permutations]: MinHash; no rows where deduplication is off
    seconds_by_stage.json  stage -> CPU seconds
"""

import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xxhash

from ingot.config import LEFT_OUT_AT_DEFAULT
from ingot.data.build.corpus import EXCERPT_CHARACTERS, json_line
from ingot.data.build.recipe import DataRecipe
from ingot.data.build.stages import (
    NEAR_DUPLICATES,
    PURGED,
    READ,
    URL,
    DocumentStages,
    StageSettings,
    document_stages,
)
from ingot.data.decontaminate import DecontaminationRules, build_index
from ingot.data.dedup.arrays import ArrayWriter
from ingot.data.dedup.equal import text_hash
from ingot.data.dedup.minhash import signature_of
from ingot.data.filters.quarantine import QuarantineRules, quarantined_names
from ingot.data.sources.input import BadInput, Input, forget, read
from ingot.data.sources.remote import RemoteRules, without_secrets
from ingot.data.sources.url import UrlDuplicates, canonical_url
from ingot.data.tasks.task import PLACE, Attempt, TaskRef, task_function
from ingot.errors import DataError
from ingot.plugins.filters import DocumentStage
from ingot.plugins.load import load_plugins
from ingot.schema.corpus import Document, Drop, document_id
from ingot.schema.plugins import Plugins
from ingot.storage import write_json

# start, bytes: position and length of the line in rows.jsonl; reached_url: the document reached the stage `url`;
# same_url: that stage dropped it, because an earlier page of this input has its URL; passed: no stage dropped it
INDEX_DTYPE = [
    ("start", "<u8"),
    ("bytes", "<u4"),
    ("reached_url", "?"),
    ("same_url", "?"),
    ("passed", "?"),
    ("id", "V16"),
]
Stamp = list[list[int | str]]
_ROWS_IN_MEMORY = 4096
_URLS_IN_MEMORY = 1 << 20  # at 80 bytes each


@dataclass(frozen=True, kw_only=True)
class IndexEvaluationSets:
    """Settings of `index_evaluation_sets`. files: names and hashes of the evaluation sets."""

    rules: DecontaminationRules
    files: Any


@dataclass(frozen=True)
class EvaluationSetsIndex:
    """The counts of an index of evaluation sets. The task's folder is the index (decontaminate/index.py)."""

    items: int
    ngrams: int
    skipped: int


@task_function("index_evaluation_sets")
def index_evaluation_sets(specification: IndexEvaluationSets, attempt: Attempt) -> EvaluationSetsIndex:
    """Write the index of the n-grams of the evaluation sets."""
    return EvaluationSetsIndex(**build_index(specification.rules, attempt.out))


@dataclass(frozen=True, kw_only=True)
class ProcessInput:
    """Settings of `process_input`.

    name: the input's name. identity: the hash of its content, or the version of a remote input. input: the input
    without its location. recipe: the recipe without rules for remote inputs, which do not affect the result.
    recipe_files: the hashes of the files that the recipe names. libraries: name -> version of the libraries that read
    pages, and the code of the plug-ins that can change this input's documents. purged_sha256: hash of the purge list,
    or "". evaluation_sets: the index of evaluation sets, None if the recipe names none. location: path or URL of the
    input. stamp: see `stamp`. cache: the folder of fetched inputs. remote: rules for fetching. purged: the data folder
    with the purge list, None if there is no list. plugins: the plug-ins to import first, with an absolute folder.
    quarantine: the paths of the lists; the hash of what they leave out is in recipe_files.
    filters: the filters of plug-ins that are switched on for the input's source, in their order.
    """

    name: str
    identity: str
    input: Input
    recipe: DataRecipe
    recipe_files: dict[str, Any]
    libraries: dict[str, str]
    purged_sha256: str
    evaluation_sets: TaskRef[EvaluationSetsIndex] | None
    location: Annotated[str, PLACE]
    stamp: Annotated[Stamp, PLACE]
    cache: Annotated[Path, PLACE]
    remote: Annotated[RemoteRules, PLACE]
    purged: Annotated[Path | None, PLACE]
    plugins: Annotated[Plugins, PLACE]
    quarantine: Annotated[QuarantineRules, PLACE]
    filters: tuple[str, ...] = field(default_factory=tuple, metadata=LEFT_OUT_AT_DEFAULT)


@dataclass(frozen=True)
class InputResult:
    """The result of a processed input: the number of its records."""

    records: int


@task_function("process_input")
def process_input(specification: ProcessInput, attempt: Attempt) -> InputResult:
    """Read one input and drop, change or keep each of its documents.

    Raises DataError for an input that cannot be fetched or opened, or that changed during the build. An input with the
    wrong content gives one dropped record instead. Raises ConfigError for plug-ins that cannot be used.
    """
    _import_plugins(specification)
    index = specification.evaluation_sets
    recipe = replace(specification.recipe, plugins=specification.plugins, quarantine=specification.quarantine)
    settings = StageSettings(recipe, index.folder if index else None, specification.purged)
    settings = settings.of_source(specification.input.source)
    recipe, stages = settings.recipe, document_stages(settings)
    _check_lists(specification)
    clock, seen, counts = _StageClock(), UrlDuplicates(), Counter()
    with _OutputFiles(attempt.out, recipe.dedup.permutations) as output:
        for document, drop in _InputReader(specification, recipe, attempt).records(counts):
            clock.lap(READ.name)
            if output.records % _URLS_IN_MEMORY == 0:
                seen = UrlDuplicates()  # bounds memory; duplicates.py finds the repeated URLs that are missed here
            outcome = _outcome(document, drop, stages, seen, clock)
            if outcome.drop is None:
                signature = None
                if recipe.dedup.enabled:
                    signature = signature_of(document.text, recipe.dedup)
                    clock.lap(NEAR_DUPLICATES.name)
                output.passed(text_hash(document.text), signature)
            output.write(outcome)
            counts[outcome.drop.rule if outcome.drop else "kept"] += 1
    write_json(attempt.out / "seconds_by_stage.json", clock.seconds)
    return InputResult(output.records)


def _import_plugins(specification: ProcessInput) -> None:
    """Import the plug-ins. Raises DataError if the code of one that matters is not the code that the key names."""
    plugins = specification.plugins
    for name, code in load_plugins(plugins.modules, Path(plugins.folder)).items():
        if specification.libraries.get(name, code) != code:
            raise DataError(
                "E-DATA-PLUGIN-CHANGED",
                f"plug-in {name!r} in {plugins.folder} is not the one with which the build began",
                rule="plug-ins must not change during a build, and are the same on every machine",
                fix="run the same command again: the inputs that the plug-in can change are read again",
                module=name,
                found=code,
                expected=specification.libraries[name],
            )


def _check_lists(specification: ProcessInput) -> None:
    """Raise DataError if the quarantine lists leave out something else than when the build began."""
    files, expected = specification.quarantine.files, specification.recipe_files[""].get("quarantine", "")
    found = quarantined_names(specification.quarantine).sha256 if files else ""
    if found != expected:
        raise DataError(
            "E-QUARANTINE-CHANGED",
            f"a quarantine list has changed since the build began ({', '.join(files)})",
            rule="quarantine lists must not change during a build, and are the same on every machine",
            fix="run the same command again: the inputs are read again with the lists as they are now",
            files=list(files),
            found=found,
            expected=expected,
        )


@dataclass
class _Outcome:
    """The row of a document, its drop (None if it passed), and the hash of its URL (None if it was not compared)."""

    row: dict[str, Any]
    drop: Drop | None
    url_hash: int | None = None


def _outcome(
    document: Document, drop: Drop | None, stages: DocumentStages, seen: UrlDuplicates, clock: "_StageClock"
) -> _Outcome:
    """Take `document` through the stages and return the outcome. drop: the Drop from reading the record, or None."""
    row = {name: getattr(document, name) for name in ("id", "url", "source", "file", "record_id")}
    if drop is None:
        drop = _first_drop(document, stages.before_purged, clock)
    text = document.text.encode("utf-8", "surrogatepass")
    row["before"], row["before_bytes"] = (xxhash.xxh3_128_hexdigest(text), len(text)) if text else ("", 0)
    if stages.purged is not None and (purged := stages.purged(document)) is not None:
        # Even if another stage dropped a purged document, the only trace of it is that the purge list dropped it.
        drop, row = purged, row | {"url": "", "before": "", "before_bytes": 0}
        clock.lap(PURGED.name)
    if drop is None:
        drop = _first_drop(document, stages.before_url, clock)
    url_hash = None
    if drop is None:
        canonical = canonical_url(document.url)
        url_hash = xxhash.xxh3_64_intdigest(canonical.encode("utf-8", "surrogatepass"))
        if seen.seen(canonical):
            drop = URL.drop("duplicate", canonical[:EXCERPT_CHARACTERS])
        clock.lap(URL.name)
    if drop is None:
        drop = _first_drop(document, stages.after_url, clock)
    row |= {"language": document.language, "text": document.text, "notes": document.notes}
    if drop is not None:
        return _Outcome(dropped_row(row, drop), drop, url_hash)
    text = document.text.encode("utf-8", "surrogatepass")
    return _Outcome(row | {"after": xxhash.xxh3_128_hexdigest(text), "after_bytes": len(text)}, None, url_hash)


def _first_drop(document: Document, stages: Sequence[DocumentStage], clock: "_StageClock") -> Drop | None:
    for stage in stages:
        drop = stage(document)
        clock.lap(stage.name)
        if drop is not None:
            return drop
    return None


def dropped_row(row: dict[str, Any], drop: Drop) -> dict[str, Any]:
    """Return `row` as the row of a dropped document: with the rule added, and an excerpt instead of the text."""
    more = {"stage": drop.stage, "rule": drop.rule, "value": drop.value, "text": row["text"][:EXCERPT_CHARACTERS]}
    return row | {"after": "", "after_bytes": 0} | more


def stamp(one: Input) -> Stamp:
    """Return [name, size, modification time] of each file of a local input; while these are equal, it is unchanged."""
    if one.is_remote:
        return []
    path = Path(one.location)
    if not path.is_dir():
        found = path.stat()
        return [["", found.st_size, found.st_mtime_ns]]
    inside = ((file, file.lstat()) for file in sorted(path.rglob("*")))  # links are not followed, as when it is read
    return [[str(file.relative_to(path)), found.st_size, found.st_mtime_ns] for file, found in inside]


class _InputReader:
    """A reader of the records of a task's input."""

    def __init__(self, specification: ProcessInput, recipe: DataRecipe, attempt: Attempt):
        self._specification, self._attempt = specification, attempt
        self._input = replace(specification.input, location=specification.location)
        known = json.loads(specification.identity) if specification.identity.startswith("{") else None
        self._records = read(
            self._input, specification.cache, recipe.limits, specification.remote, known=known, tables=recipe.format
        )

    def records(self, counts: Counter) -> Iterator[tuple[Document, Drop | None]]:
        """Yield the pairs that `read` yields. Each record is reported to the attempt before it is read."""
        attempt, number = self._attempt, 0
        while True:
            attempt.at(number, lambda: counts)
            try:
                pair = next(self._records, None)
            except BadInput as error:  # one bad input must not stop a build of a hundred thousand inputs
                pair = self._bad(error)
            if pair is None:
                attempt.at(-1)
                self._check_unchanged()
                forget(self._input, self._specification.cache)
                return
            if number in attempt.skip:
                pair[0].raw = b""
                pair = (pair[0], READ.drop("killed_worker", "worker after worker died on it"))
            yield pair
            number += 1

    def _bad(self, error: BadInput) -> tuple[Document, Drop]:
        """Return the one record that represents an input, or the rest of an input, that cannot be read."""
        name = self._input.name
        document = Document(
            id=document_id(name, "input", ""), url="", source=self._input.source, file=name, record_id="input"
        )
        return document, READ.drop("bad_input", error.found + (f"; {error.fix}" if error.fix else ""))

    def _check_unchanged(self) -> None:
        """Raise DataError if a local input changed. A remote input was checked when it was fetched into the cache."""
        if stamp(self._input) != self._specification.stamp:
            raise DataError(
                "E-INPUT-CHANGED",
                f"{without_secrets(self._input.location)} has changed since the build began",
                rule="inputs must not change during a build",
                fix="run the same command again: the changed input is read again",
                path=without_secrets(self._input.location),
            )


class _OutputFiles:
    """The open output files of a processed input. Rows of arrays are collected in memory and written in batches."""

    def __init__(self, folder: Path, permutations: int):
        self.records = self._start = 0
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

    def __enter__(self) -> "_OutputFiles":
        return self

    def __exit__(self, *exc) -> None:
        if exc[0] is None:
            self._flush()
        self._stack.__exit__(*exc)

    def passed(self, text: bytes, signature: np.ndarray | None) -> None:
        """Add the hash of the text and the signature of a document that passed."""
        self._texts.append(text)
        if signature is not None:
            self._signatures.append(signature)

    def write(self, outcome: _Outcome) -> None:
        line, drop = json_line(outcome.row), outcome.drop
        self._rows.write(line)
        if outcome.url_hash is not None:
            self._urls.append(outcome.url_hash)
        same_url = drop is not None and drop.stage == URL.name
        identity = bytes.fromhex(outcome.row["id"])
        self._index.append(
            (
                self._start,
                len(line),
                outcome.url_hash is not None,
                same_url,
                drop is None,
                identity,
            )
        )
        self._start += len(line)
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


class _StageClock:
    """CPU seconds by stage. `lap(name)` adds the time since the last lap to `name`. Writing is counted as reading."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._last = time.process_time_ns()

    def lap(self, name: str) -> None:
        now = time.process_time_ns()
        self.seconds[name] += (now - self._last) / 1e9
        self._last = now
