"""Find the documents of all inputs that repeat earlier ones: the same URL, the same text, or a similar text.

A chain of tasks, done for all inputs at once, per input, per band, or per slice of pairs. No task holds more than a
bounded part of the corpus in memory (dedup/). Which of two documents stays is decided by the order of the inputs, never
by the order in which workers finish.

    find_same_urls    all inputs    pages whose canonical URL an earlier page has -> decisions
    find_same_texts   all inputs    documents left whose text an earlier document has -> decisions
    make_band_keys    per input     signatures of the documents left, and their key in every band
    find_candidates   per band      pairs of documents that share a key, and whose signatures agree enough
    merge_bands       all bands     the candidates of all bands, each once
    verify_candidates per slice     pairs whose texts are at least as similar as the recipe requires
    unite_similar     all slices    clusters of verified pairs -> decisions
"""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from ingot.config import from_dict
from ingot.data.build.corpus import load_corpus, read_part
from ingot.data.build.duplicate_decisions import (
    DECISION_DTYPE,
    SAME_TEXT,
    SAME_URL,
    SIMILAR,
    DroppedRows,
    DuplicateDecisions,
    ProcessedInputs,
    TextsByNumber,
)
from ingot.data.build.process_input import InputResult
from ingot.data.build.stages import DUPLICATES, NEAR_DUPLICATES, URL
from ingot.data.dedup.arrays import ArrayWriter
from ingot.data.dedup.bands import SignatureFolders, band_candidates, join_folders, merge_candidates, write_bands
from ingot.data.dedup.clusters import Verification, clusters, slices, verify_pairs
from ingot.data.dedup.equal import firsts
from ingot.data.dedup.index import INDEX, Index, add_to_index
from ingot.data.dedup.minhash import DedupRules, shingle_set
from ingot.data.tasks.run import RunTasks
from ingot.data.tasks.store import Store
from ingot.data.tasks.task import PLACE, Attempt, Task, TaskGroup, TaskRef, task_function
from ingot.storage import sha256_file

_DECISIONS_AT_ONCE = 1 << 22  # about 0.4 GiB
_SIGNATURES_AT_ONCE = 1 << 18  # with 128 permutations: two arrays of 128 MiB
_PAIRS_PER_SLICE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FindSameUrls:
    inputs: TaskGroup[InputResult]


@task_function("find_same_urls")
def find_same_urls(specification: FindSameUrls, attempt: Attempt) -> DuplicateDecisions:
    """Drop every page whose canonical URL an earlier page has, even if a later stage drops that earlier page."""
    inputs = ProcessedInputs(specification.inputs)
    with attempt.beating():
        paths = [one.folder / "urls.npy" for one in specification.inputs]
        found = firsts(paths, attempt.out / "found.npy")
        decided = _decisions(inputs, found, SAME_URL, inputs.reached_url)
        return _save(attempt, (_without_dropped(inputs, rows) for rows in decided))


def _without_dropped(inputs: ProcessedInputs, rows: np.ndarray) -> np.ndarray:
    """Return the decisions `rows` without those about documents that `process_input` has already dropped."""
    new = [~inputs.index(number)["same_url"][mine["row"]] for number, mine in _by(rows, "input")]
    return rows[np.concatenate([*new, np.empty(0, bool)])]


@dataclass(frozen=True, kw_only=True)
class FindSameTexts:
    inputs: TaskGroup[InputResult]
    same_urls: TaskRef[DuplicateDecisions]


@task_function("find_same_texts")
def find_same_texts(specification: FindSameTexts, attempt: Attempt) -> DuplicateDecisions:
    """Drop every document whose text an earlier document has."""
    inputs = ProcessedInputs(specification.inputs, DroppedRows([specification.same_urls]))
    paths = [attempt.out / f"texts-{number}.npy" for number in range(len(specification.inputs))]
    with attempt.beating():
        for number, path in enumerate(paths):
            np.save(path, np.load(inputs.folder(number) / "texts.npy", mmap_mode="r")[inputs.left(number)])
        found = firsts(paths, attempt.out / "found.npy")
        decided = _save(attempt, _decisions(inputs, found, SAME_TEXT, inputs.rows_left))
    for path in paths:
        path.unlink()
    return decided


def _decisions(
    inputs: ProcessedInputs, found: np.ndarray, kind: int, rows_of: Callable[[int], np.ndarray]
) -> Iterator[np.ndarray]:
    """Yield the result `found` of `firsts` (dedup/equal.py) as DECISION_DTYPE rows, in batches.

    kind: the kind of duplicate. rows_of(number): returns the rows of input `number` whose hashes were compared.
    """
    for first in range(0, len(found), _DECISIONS_AT_ONCE):
        some = np.array(found[first : first + _DECISIONS_AT_ONCE])
        decided = np.zeros(len(some), DECISION_DTYPE)
        decided["input"], decided["kind"], decided["similarity"] = some["part"], kind, 1.0
        for number, own in _by(some, "part"):
            decided["row"][_span(some["part"], number)] = rows_of(number)[own["row"]]
        order = np.argsort(some["first_part"], kind="stable")
        firsts_of = some["first_part"][order]
        for number in np.unique(firsts_of).tolist():
            mine = order[_span(firsts_of, number)]
            decided["like"][mine] = inputs.index(number)["id"][rows_of(number)[some["first_row"][mine]]]
        yield decided


def _span(ascending: np.ndarray, value: int) -> slice:
    return slice(int(np.searchsorted(ascending, value)), int(np.searchsorted(ascending, value, side="right")))


def _by(rows: np.ndarray, column: str) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (value, the rows that have this value) for every value of an ascending column."""
    for value in np.unique(rows[column]).tolist():
        yield value, rows[_span(rows[column], value)]


def _save(attempt: Attempt, decided: Iterable[np.ndarray]) -> DuplicateDecisions:
    """Write the decisions of a task, ascending by input and row."""
    with ArrayWriter(attempt.out / "decisions.npy", DECISION_DTYPE) as writer:
        for some in decided:
            writer.append(some)
    (attempt.out / "found.npy").unlink(missing_ok=True)
    return DuplicateDecisions(writer.rows)


@dataclass(frozen=True, kw_only=True)
class MakeBandKeys:
    """Settings of `make_band_keys`. number: the number of the input. dropped: the earlier decisions."""

    number: int
    input: TaskRef[InputResult]
    dropped: tuple[TaskRef[DuplicateDecisions], ...]
    rules: DedupRules


@dataclass(frozen=True)
class BandKeys:
    """The result for one input: the number of remaining documents. Their row numbers are in the task's rows.npy."""

    documents: int


@task_function("make_band_keys")
def make_band_keys(specification: MakeBandKeys, attempt: Attempt) -> BandKeys:
    """Write the signatures of the input's remaining documents, and their key in every band."""
    number, rules = specification.number, specification.rules
    inputs = ProcessedInputs({number: specification.input}, DroppedRows(specification.dropped))
    left, pieces = inputs.left(number), []
    signatures = np.load(inputs.folder(number) / "signatures.npy", mmap_mode="r")
    for first in range(0, max(len(left), 1), _SIGNATURES_AT_ONCE):
        attempt.at(-1)
        pieces.append(attempt.out / f"piece-{len(pieces)}")
        pieces[-1].mkdir()
        write_bands(signatures[left[first : first + _SIGNATURES_AT_ONCE]], rules, pieces[-1])
    join_folders(pieces, rules, attempt.out)
    for piece in pieces:
        shutil.rmtree(piece)
    np.save(attempt.out / "rows.npy", inputs.passed(number)[left])
    return BandKeys(len(left))


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """Settings of all tasks that compare documents.

    index: the folder of the index of documents that earlier builds kept, or None. index_sha256: its hash, or "".
    The documents of the index have the first numbers; the documents left in each input follow.
    """

    rules: DedupRules
    index_sha256: str
    index: Annotated[Path | None, PLACE]

    def opened(self) -> Index | None:
        return Index(self.index, self.rules) if self.index else None


@dataclass(frozen=True, kw_only=True)
class FindCandidates(_Comparison):
    band: int
    keys: TaskGroup[BandKeys]


@dataclass(frozen=True)
class CandidatePairs:
    """The result: the number of pairs in the file pairs.npy of the task's folder."""

    pairs: int


@task_function("find_candidates")
def find_candidates(specification: FindCandidates, attempt: Attempt) -> CandidatePairs:
    """Write the pairs of documents that share the key of one band, and whose signatures agree enough."""
    index = specification.opened()
    folders = [*(index.folders if index else ()), *specification.keys.folders]
    fixed = index.documents if index else 0
    with attempt.beating():
        path = attempt.out / "pairs.npy"
        return CandidatePairs(band_candidates(specification.band, folders, specification.rules, path, fixed=fixed))


@dataclass(frozen=True, kw_only=True)
class MergeBands:
    bands: tuple[TaskRef[CandidatePairs], ...]


@task_function("merge_bands")
def merge_bands(specification: MergeBands, attempt: Attempt) -> CandidatePairs:
    """Write the candidate pairs of all bands, each pair once."""
    with attempt.beating():
        paths = [one.folder / "pairs.npy" for one in specification.bands]
        return CandidatePairs(merge_candidates(paths, attempt.out / "pairs.npy"))


@dataclass(frozen=True, kw_only=True)
class VerifyCandidates(_Comparison):
    """Settings of `verify_candidates`. start, stop: the range [start, stop) of candidate pairs to verify."""

    start: int
    stop: int
    candidates: TaskRef[CandidatePairs]
    keys: TaskGroup[BandKeys]
    inputs: TaskGroup[InputResult]


@task_function("verify_candidates")
def verify_candidates(specification: VerifyCandidates, attempt: Attempt) -> Verification:
    """Write the pairs whose texts are at least as similar as the rules require."""
    index, rules = specification.opened(), specification.rules
    fixed = index.documents if index else 0
    rows = [folder / "rows.npy" for folder in specification.keys.folders]
    starts = fixed + SignatureFolders(specification.keys.folders, rules).starts
    texts = TextsByNumber(ProcessedInputs(specification.inputs), rows, starts)

    def set_of(number: int) -> np.ndarray:
        attempt.at(number)
        return index.set_of(number) if index and number < fixed else shingle_set(texts[number], rules)

    pairs, out = specification.candidates.folder / "pairs.npy", attempt.out / "verified.npy"
    return verify_pairs(pairs, set_of, rules, out, start=specification.start, stop=specification.stop)


@dataclass(frozen=True, kw_only=True)
class UniteSimilar(_Comparison):
    inputs: TaskGroup[InputResult]
    keys: TaskGroup[BandKeys]
    verified: tuple[TaskRef[Verification], ...]


@task_function("unite_similar")
def unite_similar(specification: UniteSimilar, attempt: Attempt) -> DuplicateDecisions:
    """Drop all but the first document of every cluster. A cluster connects documents by a chain of similar pairs."""
    index = specification.opened()
    fixed = index.documents if index else 0
    with attempt.beating():
        starts = fixed + SignatureFolders(specification.keys.folders, specification.rules).starts
        paths = [one.folder / "verified.npy" for one in specification.verified]
        found = clusters(int(starts[-1]), paths).duplicates(fixed)
        inputs = ProcessedInputs(specification.inputs)
        return _save(attempt, _similar(inputs, specification.keys, found, starts, index))


def _similar(
    inputs: ProcessedInputs, keys: TaskGroup[BandKeys], found: np.ndarray, starts: np.ndarray, index: Index | None
) -> Iterator[np.ndarray]:
    """Yield `found` (clusters.DUPLICATE) as DECISION_DTYPE rows, in batches.

    starts: number of the first document of each input.
    """

    def rows_left(number: int) -> np.ndarray:
        return np.load(keys[number].folder / "rows.npy", mmap_mode="r")

    for first in range(0, len(found), _DECISIONS_AT_ONCE):
        some = found[first : first + _DECISIONS_AT_ONCE]
        decided = np.zeros(len(some), DECISION_DTYPE)
        decided["input"] = np.searchsorted(starts, some["document"], side="right") - 1
        decided["kind"], decided["similarity"] = SIMILAR, some["jaccard"]
        for number in np.unique(decided["input"]).tolist():
            mine = _span(decided["input"], number)
            decided["row"][mine] = rows_left(number)[some["document"][mine] - starts[number]]
        order = np.argsort(some["like"], kind="stable")
        likes = some["like"][order]
        old = int(np.searchsorted(likes, starts[0]))  # documents of the index
        for number in np.unique(np.searchsorted(starts, likes[old:], side="right") - 1).tolist():
            mine = slice(*np.searchsorted(likes, [starts[number], starts[number + 1]]).tolist())
            decided["like"][order[mine]] = inputs.index(number)["id"][rows_left(number)[likes[mine] - starts[number]]]
        for place in order[:old].tolist():
            assert index is not None
            decided["like"][place] = np.void(bytes.fromhex(index.id_of(int(some["like"][place]))))
        yield decided


def find_duplicates(
    processed: Sequence[Task[InputResult]], rules: DedupRules, against: Path | None, store: Store, run: RunTasks
) -> tuple[list[Task[DuplicateDecisions]], dict[str, float]]:
    """Run the tasks that find duplicates. Return the tasks with the decisions, and stage -> CPU seconds.

    processed: the finished task of every input, in order. run(tasks, doing): runs tasks and returns their results.
    against: the index of the documents that earlier builds kept (dedup/index.py), or None.
    """
    inputs = store.group(processed)
    seconds: dict[str, float] = defaultdict(float)
    urls = find_same_urls.task(FindSameUrls(inputs=inputs), "URLs")
    run([urls], "URLs")
    seconds[URL.name] += store.seconds([urls])
    decisions = [urls]
    if rules.enabled and rules.exact:
        texts = find_same_texts.task(FindSameTexts(inputs=inputs, same_urls=urls.ref), "texts")
        run([texts], "comparing")
        seconds[DUPLICATES.name] += store.seconds([texts])
        decisions.append(texts)
    if rules.enabled:
        tasks = _find_similar(processed, decisions, rules, against, store, run)
        seconds[NEAR_DUPLICATES.name] += store.seconds(tasks)
        decisions.append(tasks[-1])
    return decisions, seconds


def _find_similar(
    processed: Sequence[Task[InputResult]],
    decisions: Sequence[Task[DuplicateDecisions]],
    rules: DedupRules,
    against: Path | None,
    store: Store,
    run: RunTasks,
) -> list[Task]:
    """Run the tasks that find near-duplicates in the remaining documents. Return the tasks; the last decides."""
    dropped = tuple(task.ref for task in decisions)
    inputs = store.group(processed)
    index_sha256, index = (sha256_file(against / INDEX), against.absolute()) if against else ("", None)
    band_keys = [
        make_band_keys.task(MakeBandKeys(number=number, input=task.ref, dropped=dropped, rules=rules), task.label)
        for number, task in enumerate(processed)
    ]
    left = sum(result.documents for result in run(band_keys, "comparing"))
    keys = store.group(band_keys)
    bands = [
        find_candidates.task(
            FindCandidates(band=band, keys=keys, rules=rules, index_sha256=index_sha256, index=index),
            f"band {band} of {left:,} documents",
        )
        for band in range(rules.bands + 1)
    ]
    run(bands, "comparing")
    pairs = merge_bands.task(MergeBands(bands=tuple(task.ref for task in bands)), "pairs")
    run([pairs], "comparing")
    checks = [
        verify_candidates.task(
            VerifyCandidates(
                start=start,
                stop=stop,
                candidates=pairs.ref,
                keys=keys,
                inputs=inputs,
                rules=rules,
                index_sha256=index_sha256,
                index=index,
            ),
            f"pairs {start:,} to {stop:,}",
        )
        for start, stop in slices(store.folder(pairs) / "pairs.npy", _PAIRS_PER_SLICE)
    ]
    run(checks, "comparing")
    verified = tuple(task.ref for task in checks)
    last = unite_similar.task(
        UniteSimilar(inputs=inputs, keys=keys, verified=verified, rules=rules, index_sha256=index_sha256, index=index),
        "clusters",
    )
    run([last], "comparing")
    return [*band_keys, *bands, pairs, *checks, last]


def index_corpus(corpus: Path, index: Path, progress: Callable[[int, int], None]) -> int:
    """Add the documents of a corpus to `index`, for builds with --against. Return their number.

    progress(files done, documents) is called after each file. Raises DataError for a corpus that is damaged, or that
    was built with other deduplication rules than the index.
    """
    manifest = load_corpus(corpus)
    rules = from_dict(DedupRules, manifest.recipe.get("dedup", {}))
    documents = 0
    for done, part in enumerate(manifest.parts, 1):
        rows = read_part(corpus / part.name, part.sha256)
        documents += add_to_index(index, rules, ((row["id"], shingle_set(row["text"], rules)) for row in rows))
        progress(done, documents)
    return documents
