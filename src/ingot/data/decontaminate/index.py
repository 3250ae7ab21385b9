"""The index of the n-grams of evaluation sets: built once, then used to check documents.

The files of an index are memory-mapped, so that all workers of a machine share them.
"""

import gzip
import json
import re
import zlib
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ingot.data.decontaminate.words import Bitmap, Words, hash_words
from ingot.errors import ConfigError, DataError, DataMissing, require
from ingot.ranges import Count, PositiveQueue, Share
from ingot.schema.corpus import Document, Drop
from ingot.storage import sha256_file, write_json

FORMAT = 1
_DISTINCT = 5  # distinct words with a letter that an n-gram needs; excludes tables of numbers and "la la la"
_OWNERS = 10  # maximum number of items that are stored for one n-gram
_LETTER = re.compile(r"[^\W\d_]")
SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
_FEW = 20  # up to this number of n-grams, decoding their words one by one is cheaper than decoding the document
_PIECES = 10  # a document that cutting would split into more pieces is dropped, as for GPT-3


@dataclass(frozen=True, kw_only=True)
class DecontaminationRules:
    """The settings of decontamination.

    files: evaluation sets (JSONL, JSON, Parquet, text with blank lines between items; also .gz); without files the
    stage does not run. fields: keys of an item whose text counts; empty: every string. ngram: words per n-gram.
    min_words: an item's text with at least `min_words` and fewer than `ngram` words is searched for as a whole; a
    shorter text is ignored. share: a document must contain this share of an item's n-grams; 0: one n-gram is enough.
    action: "drop" the document, or "cut" the n-grams with `margin` characters on both sides.
    """

    enabled: bool = True
    files: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    ngram: PositiveQueue = 13
    min_words: PositiveQueue = 8
    share: Share = 0.0
    action: Literal["drop", "cut"] = "drop"
    margin: Count = 200

    def problems(self):
        if not 5 <= self.ngram <= 100:
            yield "ngram", f"is {self.ngram}, must be in [5, 100]: fewer words match by chance"
        if not 5 <= self.min_words <= self.ngram:
            yield "min_words", f"is {self.min_words}, must be in [5, ngram = {self.ngram}]"
        if not 0 <= self.share <= 1:
            yield "share", f"is {self.share}, must be in [0, 1]"
        if self.margin < 0:
            yield "margin", f"is {self.margin}, must be at least 0"
        for name in self.files:
            if Path(name.removesuffix(".gz")).suffix not in SUFFIXES:
                yield "files", f"{name!r} is none of {', '.join(SUFFIXES)}, with or without .gz"


def read_items(path: Path, fields: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Yield the texts of each item of an evaluation set, in order. Raises DataError if the file is damaged."""
    try:
        # An item that is a string, as in text files, has no keys, so `fields` does not apply.
        yield from ([item] if isinstance(item, str) else list(_texts(item, fields)) for item in _items(path))
    # pyarrow raises subclasses of ValueError and OSError.
    except (ValueError, OSError, EOFError, RecursionError, zlib.error) as error:
        raise DataError(
            "E-EVALSET-UNREADABLE",
            f"{path} cannot be read: {error}",
            rule="evaluation sets are JSONL, JSON, Parquet or text",
            fix="download the file again, or remove it from decontamination.files",
            path=str(path),
        ) from error


def _items(path: Path) -> Iterator[Any]:
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind == ".parquet":
        with require("pyarrow.parquet", "data").ParquetFile(path) as file:
            for batch in file.iter_batches(1000):
                yield from batch.to_pylist()
        return
    opened = gzip.open if path.name.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        if kind == ".txt":
            yield from (item for item in re.split(r"\n\s*\n", file.read()) if item.strip())
        elif kind == ".json":
            items = json.load(file)
            yield from items if isinstance(items, list) else [items]
        else:
            yield from (json.loads(line) for line in file if line.strip())


def _texts(value: Any, fields: tuple[str, ...]) -> Iterator[str]:
    """Yield all strings in a JSON value; if `fields` is not empty, only the strings under one of these keys."""
    if isinstance(value, str):
        if not fields:
            yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, () if key in fields else fields)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, fields)


def fingerprint(rules: DecontaminationRules) -> dict[str, Any]:
    """Return the settings and file hashes that determine an index, as JSON values.

    Raises DataMissing if a file does not exist.
    """
    return {
        "format": FORMAT,
        "ngram": rules.ngram,
        "min_words": rules.min_words,
        "fields": list(rules.fields),
        "files": [{"name": Path(name).name, "sha256": sha256_file(_existing(name))} for name in rules.files],
    }


def _existing(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise DataMissing(
            "E-EVALSET-MISSING",
            f"no evaluation set at {path}",
            rule="decontamination.files names existing files",
            fix="correct the path, or remove it from the recipe",
            path=str(path),
        )
    return path


def build_index(rules: DecontaminationRules, out: Path) -> dict[str, int]:
    """Write the index of `rules.files` into the folder `out`.

    Returns the number of items, ngrams and skipped texts (shorter than min_words). Raises DataMissing for a missing
    file, DataError for a damaged file, ConfigError if no item of a set has one of `rules.fields`.
    """
    out.mkdir(parents=True, exist_ok=True)
    hashes, owners, shapes, totals = array("Q"), array("I"), array("Q"), array("I")
    sets, lengths, skipped = [], set(), 0
    for name in rules.files:
        sets.append({"name": _set_name(name), "first": len(totals)})
        texts_found = 0
        for texts in read_items(_existing(name), rules.fields):
            of_item: dict[int, int] = {}
            for text in texts:
                texts_found += 1
                found = Words.of(text)
                words = found.strings()
                n = min(len(words), rules.ngram)
                if n < rules.min_words:
                    skipped += 1
                    continue
                lengths.add(n)
                # A text shorter than `ngram` words is found by the shape of its first `min_words` words.
                size = n if n == rules.ngram else rules.min_words
                for start, shape in enumerate(found.shapes([size])[0][: len(words) - n + 1].tolist()):
                    gram = words[start : start + n]
                    if len({word for word in gram if _LETTER.search(word)}) >= _DISTINCT:
                        of_item[hash_words(gram)] = shape
            hashes.extend(of_item)
            shapes.extend(of_item.values())
            owners.extend([len(totals)] * len(of_item))
            totals.append(len(of_item))
        if not texts_found:
            raise ConfigError(
                "E-EVALSET-FIELDS",
                f"{name} has no text in {', '.join(rules.fields) or 'any field'}",
                rule="decontamination.fields are keys of the items of every evaluation set",
                fix="compare decontamination.fields with a line of the file",
                path=name,
                fields=list(rules.fields),
            )
    sorted_hashes, sorted_owners = _few_owners(np.array(hashes, np.uint64), np.array(owners, np.uint32))
    np.save(out / "hashes.npy", sorted_hashes)
    np.save(out / "owners.npy", sorted_owners)
    np.save(out / "totals.npy", np.array(totals, np.uint32))
    np.save(out / "bitmap.npy", Bitmap.of(np.array(shapes, np.uint64)).data)
    counts = {"items": len(totals), "ngrams": len(sorted_hashes), "skipped": skipped}
    facts = {"format": FORMAT, "ngram": rules.ngram, "min_words": rules.min_words, "fields": list(rules.fields)}
    write_json(out / "index.json", facts | counts | {"lengths": sorted(lengths), "sets": sets})
    return counts


def _set_name(name: str) -> str:
    return Path(name.removesuffix(".gz")).stem


def _few_owners(hashes: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (hashes, owners) sorted by hash, with only the first _OWNERS items of each hash, because many items may
    share a passage."""
    order = np.argsort(hashes, kind="stable")
    hashes, owners = hashes[order], owners[order]
    few = np.ones(len(hashes), bool)
    few[_OWNERS:] = hashes[_OWNERS:] != hashes[: max(len(hashes) - _OWNERS, 0)]
    return hashes[few], owners[few]


@dataclass(frozen=True)
class NgramMatch:
    """An n-gram of evaluation sets in a document: its words [first, first + length).

    value: the hash of the n-gram. items: the numbers of the items that contain it.
    """

    first: int
    length: int
    value: int
    items: tuple[int, ...]


class Decontaminate:
    """The stage that drops or cuts documents with n-grams of evaluation sets. index: the folder of the index.

    Rule: contaminated.ngram ("gsm8k_test#17: 28 of 40 n-grams": the item, counted from 1, with the most matches).
    Cutting sets notes["contaminated"] to the same text and notes["contaminated_cut"] to the number of characters cut.
    Raises DataMissing if there is no index, ConfigError if the index was built with other settings.
    """

    name = "contaminated"

    def __init__(self, rules: DecontaminationRules, index: Path):
        self.rules = rules
        try:
            self._facts = json.loads((index / "index.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataMissing(
                "E-EVALINDEX-MISSING",
                f"no index of evaluation sets in {index}",
                rule="an index contains the file index.json, written last",
                fix="build the index first (build_index)",
                index=str(index),
            ) from None
        wanted = {"ngram": rules.ngram, "min_words": rules.min_words, "fields": list(rules.fields)}
        for key, value in ({"format": FORMAT} | wanted).items():
            if self._facts[key] != value:
                raise ConfigError(
                    "E-EVALINDEX-SETTINGS",
                    f"the index in {index} has {key} = {self._facts[key]}, the recipe {value}",
                    rule="an index is only valid for the settings that it was built with",
                    fix="build the index again",
                    index=str(index),
                    key=key,
                )
        # Plain arrays over the mapped files, because each access to an np.memmap costs a microsecond more.
        self._hashes, self._owners, self._totals, bitmap = (
            np.asarray(np.load(index / f"{name}.npy", mmap_mode="r"))
            for name in ("hashes", "owners", "totals", "bitmap")
        )
        self._bitmap = Bitmap(bitmap)
        lengths: list[int] = self._facts["lengths"]
        # Number of words in a shape -> lengths of the n-grams that are found by a shape of so many words.
        self._lengths = {rules.ngram: [rules.ngram]} if rules.ngram in lengths else {}
        if short := [n for n in lengths if n < rules.ngram]:
            self._lengths[rules.min_words] = short

    @property
    def ran(self) -> str:
        names = ", ".join(part["name"] for part in self._facts["sets"]) or "no evaluation sets"
        share = f", {self.rules.share:.0%} of an item" if self.rules.share else ""
        return (
            f"{self.rules.ngram}-grams of {names} ({self._facts['items']:,} items, {self._facts['ngrams']:,} n-grams, "
            f"{self._facts['skipped']:,} texts too short){share} -> {self.rules.action}"
        )

    def __call__(self, document: Document) -> Drop | None:
        words = Words.of(document.text)
        matches = self._matches(words)
        guilty = self._guilty(matches) if matches else None
        if not guilty:
            return None
        worst = max(guilty, key=lambda item: (guilty[item], -item))
        value = f"{self._item_name(worst)}: {guilty[worst]} of {self._totals[worst]} n-grams"
        if self.rules.action == "cut":
            kept = self._cut(document.text, words, [match for match in matches if guilty.keys() & set(match.items)])
            if kept is not None:
                document.notes["contaminated"] = value
                document.notes["contaminated_cut"] = len(document.text) - sum(map(len, kept))
                document.text = "\n".join(kept)
                return None
        return Drop(self.name, "contaminated.ngram", value)

    def matches(self, text: str) -> list[NgramMatch]:
        """Return the n-grams of evaluation sets in `text`."""
        return self._matches(Words.of(text))

    def _matches(self, words: Words) -> list[NgramMatch]:
        found: list[NgramMatch] = []
        count = len(words.starts)
        if count < self.rules.min_words or not self._lengths:
            return found
        for lengths, shapes in zip(self._lengths.values(), words.shapes(list(self._lengths)), strict=True):
            places = self._bitmap.candidates(shapes).tolist()
            grams = [(first, n) for first in places for n in lengths if first + n <= count]
            if not grams:
                continue
            strings = words.strings() if len(grams) > _FEW else None
            texts = [strings[i : i + n] if strings else words.strings(i, i + n) for i, n in grams]
            values = np.array(list(map(hash_words, texts)), np.uint64)
            rows = np.searchsorted(self._hashes, values)
            for gram, value, row in zip(grams, values, rows.tolist(), strict=True):
                items = self._owners_of(value, row)
                if items:
                    found.append(NgramMatch(*gram, int(value), items))
        return found

    def _owners_of(self, value: np.uint64, row: int) -> tuple[int, ...]:
        end = row
        while end < len(self._hashes) and self._hashes[end] == value:
            end += 1
        return tuple(self._owners[row:end].tolist())

    def _guilty(self, matches: list[NgramMatch]) -> Counter[int]:
        """Return, for each item of which the document contains at least `share`, the number of its distinct n-grams
        found."""
        grams = defaultdict(set)
        for match in matches:
            for item in match.items:
                grams[item].add(match.value)
        return Counter(
            {item: len(held) for item, held in grams.items() if len(held) >= self.rules.share * int(self._totals[item])}
        )

    def _item_name(self, item: int) -> str:
        sets = self._facts["sets"]
        owner = sets[bisect_right([part["first"] for part in sets], item) - 1]
        return f"{owner['name']}#{item - owner['first'] + 1}"

    def _cut(self, text: str, words: Words, matches: list[NgramMatch]) -> list[str] | None:
        """Return the pieces of `text` outside the matches and their margins; None if no piece or more than _PIECES are
        left."""
        pieces, done = [], 0
        for match in sorted(matches, key=lambda match: match.first):
            start = int(words.starts[match.first]) - self.rules.margin
            pieces.append(text[done : max(start, done)])
            done = max(done, int(words.ends[match.first + match.length - 1]) + self.rules.margin)
        pieces.append(text[done:])
        kept = [piece for piece in pieces if piece.strip()]
        return kept if 0 < len(kept) <= _PIECES else None
