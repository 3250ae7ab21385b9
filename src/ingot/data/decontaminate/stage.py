"""The stage that looks documents up in an index of evaluation sets."""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.data.decontaminate.index import FORMAT, DecontaminationRules
from ingot.data.decontaminate.words import Bitmap, Words, hash_words
from ingot.errors import ConfigError, DataMissing
from ingot.schema.document import Document, Drop

_FEW = 20  # n-grams whose words are cheaper one by one than with all words of a document
_PIECES = 10  # more than these left of a document: drop it, as GPT-3 did


@dataclass(frozen=True)
class Match:
    """Words [first, first + length) of a document stand in `items`, by their numbers; value: the n-gram's hash."""

    first: int
    length: int
    value: int
    items: tuple[int, ...]


class Decontaminate:
    """Stage: drops or cuts documents that hold n-grams of the evaluation sets in the folder `index`.

    Rule contaminated.ngram ("gsm8k_test#17: 28 of 40 n-grams": the item, counted from 1, with the most hits).
    Cutting sets notes["contaminated"] to the same and notes["contaminated_cut"] to the number of characters.
    Raises DataMissing if there is no index, ConfigError if it was built with other settings.
    """

    name = "contaminated"

    def __init__(self, rules: DecontaminationRules, index: Path):
        self.rules = rules
        try:
            self._facts = json.loads((index / "index.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataMissing(f"no index of evaluation sets in {index}", rule="build_index writes one") from None
        wanted = {"ngram": rules.ngram, "min_words": rules.min_words, "fields": list(rules.fields)}
        for key, value in ({"format": FORMAT} | wanted).items():
            if self._facts[key] != value:
                raise ConfigError(
                    f"the index in {index} has {key} = {self._facts[key]}, the recipe {value}",
                    rule="an index serves the settings that it was built with",
                    fix="build it again",
                )
        # Views without the class memmap, whose every access costs a microsecond; the files stay mapped.
        self._hashes, self._owners, self._totals, bitmap = (
            np.asarray(np.load(index / f"{name}.npy", mmap_mode="r"))
            for name in ("hashes", "owners", "totals", "bitmap")
        )
        self._bitmap = Bitmap(bitmap)
        lengths: list[int] = self._facts["lengths"]
        # Words that a shape is made of -> lengths of n-grams that begin with it.
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

    def matches(self, text: str) -> list[Match]:
        """The n-grams of evaluation sets in `text`."""
        return self._matches(Words.of(text))

    def _matches(self, words: Words) -> list[Match]:
        found: list[Match] = []
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
                    found.append(Match(*gram, int(value), items))
        return found

    def _owners_of(self, value: np.uint64, row: int) -> tuple[int, ...]:
        end = row
        while end < len(self._hashes) and self._hashes[end] == value:
            end += 1
        return tuple(self._owners[row:end].tolist())

    def _guilty(self, matches: list[Match]) -> Counter[int]:
        """Item -> distinct n-grams of it that the document holds, for items of which it holds enough."""
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

    def _cut(self, text: str, words: Words, matches: list[Match]) -> list[str] | None:
        """What stands between the matches and their margins; None if it is too little or in too many pieces."""
        pieces, done = [], 0
        for match in sorted(matches, key=lambda match: match.first):
            start = int(words.starts[match.first]) - self.rules.margin
            pieces.append(text[done : max(start, done)])
            done = max(done, int(words.ends[match.first + match.length - 1]) + self.rules.margin)
        pieces.append(text[done:])
        kept = [piece for piece in pieces if piece.strip()]
        return kept if 0 < len(kept) <= _PIECES else None
