"""Cut long spans of words that occur earlier in the corpus (Lee et al. 2022; RefinedWeb cuts spans of 50 tokens).

A window is a run of `words` words, compared without their whitespace. It is repeated if the same window begins earlier:
in an earlier document, or earlier in the same document. A word is cut if a repeated window covers it, so the first
occurrence of each span stays. There are three steps; only the order of the corpus affects their results:
    write_windows   map, one task per file: the hashes of its windows, grouped by partition, each group in corpus order
    mark_repeated   reduce, one task per partition: one bit per window, set if the window is repeated
    RepeatedSpans   map: read the same texts again in the same order. The bits are in the order in which the windows
                    were written, so no positions are stored: 8 bytes and one bit per word are written.
Windows count as equal if their 64-bit hashes are equal. So no window is missed, and n windows give about n^2 / 2^65
false pairs (0.03 for 10^9 words, 27,000 for 10^12), each of which cuts one span. Pairs are not verified, because that
would need every text twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from re import compile as pattern

import numpy as np

from ingot.data.dedup.arrays import PIECE, ArrayFile, ArrayWriter, Partitions, by_hash, partitions_for
from ingot.data.dedup.minhash import word_hashes
from ingot.errors import DataError
from ingot.ranges import PositiveCount

_ROW_BYTES = 48  # memory per window while a partition is sorted
_WORD = pattern(r"\S+")  # matches the words of str.split
_BASE = 0x9E3779B97F4A7C15
_BLOCK = 1 << 16  # windows of a long text that are hashed at a time
_INVERSE = pow(_BASE, -1, 2**64)


@dataclass(frozen=True, kw_only=True)
class SubstringRules:
    """Settings for cutting repeated spans. words: the least length, in words, of a span that is cut."""

    enabled: bool = False
    words: PositiveCount = 50

    def problems(self):
        if self.words < 2:
            yield "words", f"is {self.words}, must be at least 2"

    @property
    def ran(self) -> str:
        return f"spans of {self.words} or more words that came before are cut"


def window_partitions(windows: int, limit_bytes: int = 512 << 20) -> int:
    """Return the number of partitions that keeps the memory of `mark_repeated` near `limit_bytes`."""
    return partitions_for(windows, _ROW_BYTES, limit_bytes)


def window_hashes(text: str, words: int) -> np.ndarray:
    """Return a hash of every run of `words` words, uint64 [max(words in `text` - `words` + 1, 0)].

    The hash is a polynomial of the words' hashes, in an odd base modulo 2^64, computed from differences of prefix sums,
    so its cost does not depend on `words`.
    """
    hashes = word_hashes(text)
    count = max(len(hashes) - words + 1, 0)
    found = np.empty(count, np.uint64)
    for first in range(0, count, _BLOCK):
        block = hashes[first : first + _BLOCK + words - 1]
        sums = np.zeros(len(block) + 1, np.uint64)
        np.cumsum(block * _powers(_BASE, _BLOCK + words)[: len(block)], out=sums[1:])
        inverse = _powers(_INVERSE, _BLOCK + words)[: len(block) - words + 1]
        found[first : first + _BLOCK] = (sums[words:] - sums[:-words]) * inverse
    return found ^ found >> np.uint64(32)


@lru_cache(4)
def _powers(base: int, count: int) -> np.ndarray:
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


def write_windows(texts: Iterable[str], rules: SubstringRules, partitions: int, folder: Path) -> int:
    """Write the hashes of the windows of one file's texts into the existing `folder`; return their number.

    windows.npy: uint64, grouped by partition; starts.npy: uint64 [partitions + 1], the start of each group.
    """
    spread = Partitions(folder / "scratch", partitions, "<u8")
    waiting, held = [], 0
    for text in texts:
        waiting.append(window_hashes(text, rules.words))
        held += len(waiting[-1])
        if held > PIECE:
            hashes, waiting, held = np.concatenate(waiting), [], 0
            spread.append(hashes, by_hash(hashes, partitions))
    hashes = np.concatenate([np.empty(0, np.uint64), *waiting])
    spread.append(hashes, by_hash(hashes, partitions))
    starts = [0]
    with ArrayWriter(folder / "windows.npy", "<u8") as file:
        for number in range(partitions):
            for piece in spread.take(number):
                file.append(piece)
            starts.append(file.rows)
    spread.close()
    np.save(folder / "starts.npy", np.array(starts, "<u8"))
    return file.rows


def mark_repeated(partition: int, folders: Sequence[Path], out: Path) -> int:
    """Write which windows of one partition occur earlier in the corpus; return their number.

    folders: the folders of `write_windows`, in corpus order. out: an existing folder for repeated.npy (uint8, one bit
    per window; the bits of each folder begin at a new byte) and starts.npy (uint64 [folders + 1], the byte at which
    each folder begins). The whole partition is in memory: about 48 bytes per window.
    """
    groups = []
    for folder in folders:
        start, stop = np.load(folder / "starts.npy")[partition : partition + 2].tolist()
        groups.append(ArrayFile(folder / "windows.npy").read(start, stop))
    hashes = np.concatenate([np.empty(0, "<u8"), *groups])
    borders = np.cumsum([0, *map(len, groups)]).tolist()
    del groups
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    repeated = np.zeros(len(hashes), bool)
    repeated[order[1:]] = hashes[1:] == hashes[:-1]  # the sort is stable: the first of equal hashes is first in corpus
    starts = [0]
    with ArrayWriter(out / "repeated.npy", "u1") as file:
        for start, stop in pairwise(borders):
            file.append(np.packbits(repeated[start:stop]))
            starts.append(file.rows)
    np.save(out / "starts.npy", np.array(starts, "<u8"))
    return int(repeated.sum())


class RepeatedSpans:
    """Finds the spans to cut from the texts of one file, which must come in the order that `write_windows` got them."""

    def __init__(self, number: int, folder: Path, marked: Sequence[Path], rules: SubstringRules):
        """Load the bits of one file.

        number: position of `folder` in the `folders` of `mark_repeated`. marked: for each partition, its `out`.
        """
        self._folder, self._words, self._partitions = folder, rules.words, len(marked)
        sizes = np.diff(np.load(folder / "starts.npy").astype(np.int64))
        bits = []
        for size, one in zip(sizes.tolist(), marked, strict=True):
            start, stop = np.load(one / "starts.npy")[number : number + 2].tolist()
            bits.append(np.unpackbits(ArrayFile(one / "repeated.npy").read(start, stop), count=size).view(bool))
        self._repeated = np.concatenate([np.empty(0, bool), *bits])
        self._ends = np.cumsum(sizes)
        self._next = self._ends - sizes  # for each partition, its next bit

    def of(self, text: str) -> list[tuple[int, int]]:
        """Return the character ranges [start, end) to cut from `text`, the next text: whole words with the whitespace
        after them, ascending.

        Raises DataError if the texts have more windows than were written.
        """
        hashes = window_hashes(text, self._words)
        if not len(hashes):
            return []
        partitions = by_hash(hashes, self._partitions)
        order = np.argsort(partitions, kind="stable")
        counts = np.bincount(partitions, minlength=self._partitions)
        if (self._next + counts > self._ends).any():
            raise self._texts_changed()
        # Each window reads the next unread bit of its partition, in the order of the text.
        base = self._next - (np.cumsum(counts) - counts)
        repeated = np.empty(len(hashes), bool)
        repeated[order] = self._repeated[base[partitions[order]] + np.arange(len(hashes))]
        self._next = self._next + counts
        return _spans(text, repeated, self._words) if repeated.any() else []

    def finish(self) -> None:
        """Check that all bits were read. Raises DataError if the texts had fewer windows than were written."""
        if (self._next != self._ends).any():
            raise self._texts_changed()

    def _texts_changed(self) -> DataError:
        return DataError(
            "E-DEDUP-TEXTS-CHANGED",
            f"the texts differ from the texts whose windows are in {self._folder}",
            rule="repeated spans are cut from the texts that were searched, in the same order",
            fix="remove the work folder and build again",
            folder=str(self._folder),
        )


def _spans(text: str, repeated: np.ndarray, words: int) -> list[tuple[int, int]]:
    """Return the runs of words that repeated windows cover, as character ranges. repeated: one bool per window."""
    change = np.zeros(len(repeated) + words + 1, np.int64)
    change[1 : len(repeated) + 1] += repeated
    change[words + 1 :] -= repeated
    covered = np.cumsum(change) > 0  # per word, with one False before the first word
    borders = np.flatnonzero(covered[1:] != covered[:-1])
    starts = [match.start() for match in _WORD.finditer(text)]
    edges = [starts[border] if border < len(starts) else len(text) for border in borders.tolist()]
    return list(zip(edges[0::2], edges[1::2], strict=True))


def cut(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Return `text` without the characters of `spans`."""
    keep, place = [], 0
    for start, end in spans:
        keep.append(text[place:start])
        place = end
    return "".join([*keep, text[place:]])
