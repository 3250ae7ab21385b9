"""The n-grams of evaluation sets, written once as files that workers map into memory."""

import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ingot.data.decontaminate.sets import SUFFIXES, read_items
from ingot.data.decontaminate.words import Bitmap, Words, hash_words
from ingot.errors import ConfigError, DataMissing
from ingot.storage import sha256_file, write_json

FORMAT = 1
_DISTINCT = 5  # words with a letter that an n-gram needs; tables of numbers and "la la la" are nobody's question
_OWNERS = 10  # items that are kept for one n-gram
_LETTER = re.compile(r"[^\W\d_]")


@dataclass(frozen=True, kw_only=True)
class DecontaminationRules:
    """files: evaluation sets (JSONL, JSON, Parquet, text with items between blank lines; also .gz); none: nothing runs.

    fields: keys whose text counts; empty takes every string of an item. ngram: words. min_words: texts of at least
    these and fewer than `ngram` words are looked for as a whole, shorter ones never. share: of an item's n-grams that
    a document has to hold; 0: one is enough. action: "drop" the document, or "cut" the n-grams with `margin`
    characters on both sides.
    """

    enabled: bool = True
    files: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    ngram: int = 13
    min_words: int = 8
    share: float = 0.0
    action: Literal["drop", "cut"] = "drop"
    margin: int = 200

    def problems(self):
        if not 5 <= self.ngram <= 100:
            yield "ngram", f"is {self.ngram}, must be in [5, 100]: fewer words stand anywhere by chance"
        if not 5 <= self.min_words <= self.ngram:
            yield "min_words", f"is {self.min_words}, must be in [5, ngram = {self.ngram}]"
        if not 0 <= self.share <= 1:
            yield "share", f"is {self.share}, must be in [0, 1]"
        if self.margin < 0:
            yield "margin", f"is {self.margin}, must be at least 0"
        for name in self.files:
            if Path(name.removesuffix(".gz")).suffix not in SUFFIXES:
                yield "files", f"{name!r} is none of {', '.join(SUFFIXES)}, with or without .gz"


def fingerprint(rules: DecontaminationRules) -> dict[str, Any]:
    """What decides an index, with the files' content and not their places; JSON. Raises DataMissing."""
    return {
        "format": FORMAT,
        "ngram": rules.ngram,
        "min_words": rules.min_words,
        "fields": list(rules.fields),
        "files": [{"name": Path(name).name, "sha256": sha256_file(existing(name))} for name in rules.files],
    }


def existing(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise DataMissing(
            f"no evaluation set at {path}",
            rule="decontamination.files names files that are there",
            fix="correct the path or take it out of the recipe",
        )
    return path


def build_index(rules: DecontaminationRules, out: Path) -> dict[str, int]:
    """Write the index of `rules.files` into the folder `out`.

    Returns counts: items, ngrams, skipped (texts shorter than min_words). Raises DataMissing, DataError for a file
    that cannot be read, ConfigError where `rules.fields` names nothing that a set has.
    """
    out.mkdir(parents=True, exist_ok=True)
    hashes, owners, shapes, totals = array("Q"), array("I"), array("Q"), array("I")
    sets, lengths, skipped = [], set(), 0
    for name in rules.files:
        sets.append({"name": _set_name(name), "first": len(totals)})
        texts_found = 0
        for texts in read_items(existing(name), rules.fields):
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
                # A text that counts as a whole is looked for by the shape of its first words, whatever its length.
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
                f"{name} has no text in {', '.join(rules.fields) or 'any field'}",
                rule="decontamination.fields are keys of the sets' items",
                fix="look at one line of the file",
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
    """Both sorted by hash, with the first _OWNERS items of each: one passage may stand before a hundred questions."""
    order = np.argsort(hashes, kind="stable")
    hashes, owners = hashes[order], owners[order]
    few = np.ones(len(hashes), bool)
    few[_OWNERS:] = hashes[_OWNERS:] != hashes[: max(len(hashes) - _OWNERS, 0)]
    return hashes[few], owners[few]
