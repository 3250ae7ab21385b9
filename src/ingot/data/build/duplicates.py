"""What can only be decided once every input is curated: which documents came before, by URL, text, or nearly.

A chain of tasks over files; each but the first and the last is done per input, per band, or per slice of pairs, and
none holds more than a bounded part of the corpus in memory (dedup/). The order of the inputs decides which of two
documents stays, never who worked when.

    same_urls     all inputs    pages whose canonical URL came before -> fates
    same_texts    all inputs    texts that came before, among what is left -> fates
    band_keys     per input     signatures of what is left, and its key in every band
    candidates    per band      pairs of documents that share a key, and whose signatures agree enough
    merged        all           the candidates of all bands, each once
    verified      per slice     pairs whose texts are as similar as the recipe asks
    united        all           clusters of verified pairs -> fates
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ingot.config import from_dict, to_dict
from ingot.data.build.corpus import load_corpus, read_part
from ingot.data.build.fates import FATE, SAME_TEXT, SAME_URL, SIMILAR, Fates, Inputs, beating
from ingot.data.build.stages import URL
from ingot.data.dedup.arrays import ArrayWriter
from ingot.data.dedup.bands import SignatureFolders, band_candidates, join_folders, merge_candidates, write_bands
from ingot.data.dedup.clusters import clusters
from ingot.data.dedup.equal import firsts
from ingot.data.dedup.index import INDEX, Index, add_to_index
from ingot.data.dedup.minhash import DedupRules, shingle_set
from ingot.data.dedup.verify import slices, verify_pairs
from ingot.data.tasks.task import Context, Store, Task
from ingot.storage import sha256_file

_FATES_AT_ONCE = 1 << 22  # about 0.4 GiB
_SIGNATURES_AT_ONCE = 1 << 18  # of 128 permutations: 128 MiB, twice
_PAIRS_PER_SLICE = 1 << 20
_OPEN_FILES = 64


def same_urls(context: Context) -> int:
    """Task. inputs: every curated file, in order. Of pages with one canonical URL the first stays, whatever later
    stages make of it."""
    inputs = Inputs(context.folders)
    with beating(context):
        found = firsts([folder / "urls.npy" for folder in context.folders], context.out / "found.npy")
        return _save(context, (_new(inputs, fates) for fates in _fates(inputs, found, SAME_URL, inputs.reached_url)))


def _new(inputs: Inputs, fates: np.ndarray) -> np.ndarray:
    """Without what the worker had seen earlier in the same file, which is dropped already."""
    new = [inputs.index(part)["stage"][rows["row"]] != URL for part, rows in _by_part(fates)]
    return fates[np.concatenate([*new, np.empty(0, bool)])]


def same_texts(context: Context) -> int:
    """Task. inputs: every curated file, in order, and same_urls. Of equal texts the first stays."""
    *folders, earlier = context.folders
    inputs = Inputs(folders, Fates(earlier))
    paths = [context.out / f"texts-{part}.npy" for part in range(len(folders))]
    with beating(context):
        for part, (folder, path) in enumerate(zip(folders, paths, strict=True)):
            np.save(path, np.load(folder / "texts.npy", mmap_mode="r")[inputs.left(part)])
        found = firsts(paths, context.out / "found.npy")
        count = _save(context, _fates(inputs, found, SAME_TEXT, inputs.rows_left))
    for path in paths:
        path.unlink()
    return count


def _fates(
    inputs: Inputs, found: np.ndarray, kind: int, rows_of_part: Callable[[int], np.ndarray]
) -> Iterator[np.ndarray]:
    """What `firsts` found among rows_of_part(part) as FATE rows, some at a time."""
    for first in range(0, len(found), _FATES_AT_ONCE):
        some = np.array(found[first : first + _FATES_AT_ONCE])
        fates = np.zeros(len(some), FATE)
        fates["part"], fates["kind"], fates["similarity"] = some["part"], kind, 1.0
        for part, own in _by_part(some):
            fates["row"][_span(some["part"], part)] = rows_of_part(part)[own["row"]]
        order = np.argsort(some["first_part"], kind="stable")
        firsts_of = some["first_part"][order]
        for part in np.unique(firsts_of).tolist():
            mine = order[_span(firsts_of, part)]
            fates["like"][mine] = inputs.index(part)["id"][rows_of_part(part)[some["first_row"][mine]]]
        yield fates


def _span(ascending: np.ndarray, value: int) -> slice:
    return slice(int(np.searchsorted(ascending, value)), int(np.searchsorted(ascending, value, side="right")))


def _by_part(rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for part in np.unique(rows["part"]).tolist():
        yield part, rows[_span(rows["part"], part)]


def _save(context: Context, fates: Iterable[np.ndarray]) -> int:
    """The fates of this task, ascending by part and row."""
    with ArrayWriter(context.out / "fates.npy", FATE) as writer:
        for some in fates:
            writer.append(some)
    (context.out / "found.npy").unlink(missing_ok=True)
    return writer.rows


def band_keys(context: Context) -> int:
    """Task. arguments: part (its number), rules. inputs: the curated file, and the fates so far."""
    curated, *earlier = context.folders
    part = context.task.arguments["part"]
    inputs = Inputs({part: curated}, Fates(*earlier))
    left = inputs.left(part)
    signatures, rules, pieces = np.load(curated / "signatures.npy", mmap_mode="r"), _rules(context), []
    for first in range(0, max(len(left), 1), _SIGNATURES_AT_ONCE):
        context.at(-1)
        pieces.append(context.out / f"piece-{len(pieces)}")
        pieces[-1].mkdir()
        write_bands(signatures[left[first : first + _SIGNATURES_AT_ONCE]], rules, pieces[-1])
    join_folders(pieces, rules, context.out)
    for piece in pieces:
        shutil.rmtree(piece)
    np.save(context.out / "rows.npy", inputs.passed(part)[left])
    return len(left)


def candidates(context: Context) -> int:
    """Task. arguments: band, rules, index. inputs: band_keys of every input. places: index."""
    index = _index(context)
    folders = [*(index.folders if index else ()), *context.folders]
    fixed = index.documents if index else 0
    band = context.task.arguments["band"]
    with beating(context):
        return band_candidates(band, folders, _rules(context), context.out / "pairs.npy", fixed=fixed)


def merged(context: Context) -> int:
    """Task. inputs: the candidates of every band. Returns how many pairs there are."""
    with beating(context):
        return merge_candidates([folder / "pairs.npy" for folder in context.folders], context.out / "pairs.npy")


def verified(context: Context) -> dict:
    """Task. arguments: slice (start, stop), rules, index. inputs: merged, then band_keys of all, then curated files."""
    pairs, *both = context.folders
    index, rules = _index(context), _rules(context)
    texts = _Texts(both[: len(both) // 2], both[len(both) // 2 :], rules, index.documents if index else 0)

    def set_of(number: int) -> np.ndarray:
        context.at(number)
        return index.set_of(number) if index and number < index.documents else shingle_set(texts[number], rules)

    start, stop = context.task.arguments["slice"]
    done = verify_pairs(pairs / "pairs.npy", set_of, rules, context.out / "verified.npy", start=start, stop=stop)
    return vars(done)


class _Texts:
    """Texts of what is left in all inputs, by number; behind the `fixed` documents of an index."""

    def __init__(self, keys: Sequence[Path], curated: Sequence[Path], rules: DedupRules, fixed: int):
        self._starts = fixed + SignatureFolders(keys, rules).starts
        self._keys, self._curated = keys, curated
        self._open = lru_cache(_OPEN_FILES)(self._files)

    def _files(self, part: int):
        index = np.load(self._curated[part] / "index.npy", mmap_mode="r")
        return (
            np.load(self._keys[part] / "rows.npy", mmap_mode="r"),
            index,
            (self._curated[part] / "rows.jsonl").open("rb"),
        )

    def __getitem__(self, number: int) -> str:
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        rows, index, file = self._open(part)
        entry = index[rows[number - int(self._starts[part])]]
        file.seek(int(entry["start"]))
        return json.loads(file.read(int(entry["bytes"])))["text"]


def united(context: Context) -> int:
    """Task. arguments: inputs (how many folders), rules, index. inputs: curated files, their band_keys, verified
    slices. Of documents that are alike, directly or through others, the first stays."""
    count, folders = context.task.arguments["inputs"], list(context.folders)
    inputs, keys, slices = Inputs(folders[:count]), folders[count : 2 * count], folders[2 * count :]
    index = _index(context)
    fixed = index.documents if index else 0
    with beating(context):
        starts = fixed + SignatureFolders(keys, _rules(context)).starts
        found = clusters(int(starts[-1]), [folder / "verified.npy" for folder in slices]).duplicates(fixed)
        return _save(context, _similar(inputs, keys, found, starts, index))


def _similar(
    inputs: Inputs, keys: Sequence[Path], found: np.ndarray, starts: np.ndarray, index: Index | None
) -> Iterator[np.ndarray]:
    """`found` (clusters.DUPLICATE) as FATE rows, some at a time. starts: the first document of each input."""
    for first in range(0, len(found), _FATES_AT_ONCE):
        some = found[first : first + _FATES_AT_ONCE]
        fates = np.zeros(len(some), FATE)
        fates["part"] = np.searchsorted(starts, some["document"], side="right") - 1
        fates["kind"], fates["similarity"] = SIMILAR, some["jaccard"]
        for part in np.unique(fates["part"]).tolist():
            mine = _span(fates["part"], part)
            rows = np.load(keys[part] / "rows.npy", mmap_mode="r")
            fates["row"][mine] = rows[some["document"][mine] - starts[part]]
        order = np.argsort(some["like"], kind="stable")
        likes = some["like"][order]
        old = int(np.searchsorted(likes, starts[0]))  # of the index
        for part in np.unique(np.searchsorted(starts, likes[old:], side="right") - 1).tolist():
            mine = slice(*np.searchsorted(likes, [starts[part], starts[part + 1]]).tolist())
            rows = np.load(keys[part] / "rows.npy", mmap_mode="r")
            fates["like"][order[mine]] = inputs.index(part)["id"][rows[likes[mine] - starts[part]]]
        for place in order[:old].tolist():
            assert index is not None
            fates["like"][place] = np.void(bytes.fromhex(index.id_of(int(some["like"][place]))))
        yield fates


def _rules(context: Context) -> DedupRules:
    return from_dict(DedupRules, context.task.arguments["rules"])


def _index(context: Context) -> Index | None:
    """The kept documents of earlier builds, if the recipe compares with them."""
    place = context.task.places.get("index")
    return Index(Path(place), _rules(context)) if place else None


def decide(
    curated: Sequence[Task],
    rules: DedupRules,
    against: Path | None,
    store: Store,
    run: Callable[[Sequence[Task], str], list[Any]],
) -> tuple[list[Task], dict[str, float]]:
    """Run all of it. curated: finished tasks of every input, in order. run(tasks, doing): their results.
    against: the index of what earlier builds kept (dedup/index.py).

    Returns the tasks whose folders have the fates, and CPU seconds by stage of the funnel.
    """
    everything = store.group(task.key for task in curated)
    seconds: dict[str, float] = defaultdict(float)

    def do(stage: str, tasks: Sequence[Task]) -> list[Any]:
        results = run(tasks, "comparing" if stage != "url" else "URLs")
        seconds[stage] += sum(json.loads((store.folder(task.key) / "seconds.json").read_text()) for task in tasks)
        return results

    urls = Task(function=f"{__name__}:same_urls", arguments={}, inputs=(everything,), label="URLs")
    do("url", [urls])
    if not rules.enabled:
        return [urls], seconds
    deciding = [urls]
    if rules.exact:
        texts = Task(function=f"{__name__}:same_texts", arguments={}, inputs=(everything, urls.key), label="texts")
        do("duplicates", [texts])
        deciding.append(texts)
    gone = tuple(task.key for task in deciding)
    deciding.append(_near(curated, everything, gone, rules, against, store, partial(do, "near_duplicates")))
    return deciding, seconds


def _near(
    curated: Sequence[Task],
    everything: str,
    gone: tuple[str, ...],
    rules: DedupRules,
    against: Path | None,
    store: Store,
    do: Callable[[Sequence[Task]], list[Any]],
) -> Task:
    """Run the tasks that look for near-duplicates among what is not `gone`; returns the one with their fates."""
    common = {"rules": to_dict(rules), "index": sha256_file(against / INDEX) if against else ""}
    places = {"index": str(against.absolute())} if against else {}
    keys = [
        Task(
            function=f"{__name__}:band_keys",
            arguments={"part": part, "rules": to_dict(rules)},
            inputs=(task.key, *gone),
            label=task.label,
        )
        for part, task in enumerate(curated)
    ]
    left = sum(do(keys))
    signed = store.group(task.key for task in keys)
    bands = [
        Task(
            function=f"{__name__}:candidates",
            arguments={"band": band} | common,
            inputs=(signed,),
            places=places,
            label=f"band {band} of {left:,} documents",
        )
        for band in range(rules.bands + 1)
    ]
    do(bands)
    pairs = Task(function=f"{__name__}:merged", arguments={}, inputs=tuple(task.key for task in bands), label="pairs")
    do([pairs])
    checks = [
        Task(
            function=f"{__name__}:verified",
            arguments={"slice": [start, stop]} | common,
            inputs=(pairs.key, signed, everything),
            places=places,
            label=f"pairs {start:,} to {stop:,}",
        )
        for start, stop in slices(store.folder(pairs.key) / "pairs.npy", _PAIRS_PER_SLICE)
    ]
    do(checks)
    last = Task(
        function=f"{__name__}:united",
        arguments={"inputs": len(curated)} | common,
        inputs=(everything, signed, *(task.key for task in checks)),
        places=places,
        label="clusters",
    )
    do([last])
    return last


def index_corpus(corpus: Path, index: Path, progress: Callable[[int, int], None]) -> int:
    """Add the documents of a corpus to `index`, for builds `against` it; returns how many.

    progress(parts done, documents). Raises DataError for a corpus that is damaged, was built without near-duplicates,
    or by other rules than the index.
    """
    manifest = load_corpus(corpus)
    rules = from_dict(DedupRules, manifest.recipe.get("dedup", {}))
    documents = 0
    for done, part in enumerate(manifest.parts, 1):
        rows = read_part(corpus / part.name, part.sha256)
        documents += add_to_index(index, rules, ((row["id"], shingle_set(row["text"], rules)) for row in rows))
        progress(done, documents)
    return documents
