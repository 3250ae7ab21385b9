"""The text of a batch: the lengths of its documents, and the sequences of tokens that are in it more than once."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.report.diagnose.document_signs import NGRAM

_MOST_NAMED = 3  # repeated sequences that are named
_PRIME = np.uint64(0x100000001B3)  # of FNV-1a, odd: multiplying by it is a bijection of 64 bits


@dataclass(frozen=True, kw_only=True)
class RepeatedSequence:
    """A sequence of NGRAM tokens that occurs `times` times in a batch, in `documents` documents. text: "" if the text
    of tokens is unknown."""

    tokens: tuple[int, ...]
    times: int
    documents: int
    text: str


@dataclass(frozen=True, kw_only=True)
class BatchText:
    """The text of a batch.

    documents: their number. tokens: that of their tokens in the batch. shortest, median, longest: tokens of one
    document in the batch. repeated: the share of the tokens that are in a sequence of NGRAM tokens which occurs more
    than once in the batch. most_repeated: such sequences, the most frequent first; they do not overlap in the text.
    """

    documents: int
    tokens: int
    shortest: int
    median: int
    longest: int
    repeated: float
    most_repeated: tuple[RepeatedSequence, ...]


def describe_batch(
    parts: Sequence[tuple[str, np.ndarray]], decode: Callable[[np.ndarray], str] | None = None
) -> BatchText:
    """Return the lengths and repetitions of a batch. parts: the id of a document and its tokens, integers [n], for each
    part of a document in the batch. decode: the text of tokens; None: it is unknown."""
    lengths = Counter[str]()
    for document, tokens in parts:
        lengths[document] += len(tokens)
    own = sorted(lengths.values()) or [0]
    repeated, most = _repeated(parts, decode)
    return BatchText(
        documents=len(lengths),
        tokens=lengths.total(),
        shortest=own[0],
        median=own[len(own) // 2],
        longest=own[-1],
        repeated=repeated,
        most_repeated=most,
    )


def _repeated(
    parts: Sequence[tuple[str, np.ndarray]], decode: Callable[[np.ndarray], str] | None
) -> tuple[float, tuple[RepeatedSequence, ...]]:
    long = [(document, tokens) for document, tokens in parts if len(tokens) >= NGRAM]
    total = sum(len(tokens) for _, tokens in parts)
    if not long:
        return 0.0, ()
    hashes = np.concatenate([_hashes(tokens) for _, tokens in long])
    counts = [len(tokens) - NGRAM + 1 for _, tokens in long]
    part_of = np.repeat(np.arange(len(long)), counts)
    begins = np.concatenate([np.arange(count) for count in counts])
    _, first, which, often = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    again = often[which] > 1
    offsets = np.cumsum([0, *(len(tokens) for _, tokens in long)])
    starts = offsets[part_of[again]] + begins[again]
    marks = np.zeros(int(offsets[-1]) + 1, np.int64)
    np.add.at(marks, starts, 1)
    np.add.at(marks, starts + NGRAM, -1)
    covered = int((np.cumsum(marks[:-1]) > 0).sum())
    named: list[RepeatedSequence] = []
    taken: list[tuple[int, int]] = []  # a longer repetition has many sequences that overlap
    for one in np.lexsort((first, -often)):
        if often[one] < 2 or len(named) == _MOST_NAMED:
            break
        number, begin = int(part_of[first[one]]), int(begins[first[one]])
        if any(number == other and abs(begin - at) < NGRAM for other, at in taken):
            continue
        taken.append((number, begin))
        tokens = long[number][1][begin : begin + NGRAM]
        where = {long[at][0] for at in part_of[which == one].tolist()}
        text = " ".join(decode(tokens).split()) if decode else ""
        named.append(
            RepeatedSequence(tokens=tuple(tokens.tolist()), times=int(often[one]), documents=len(where), text=text)
        )
    return covered / max(total, 1), tuple(named)


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """Return a hash of each sequence of NGRAM tokens, uint64 [n - NGRAM + 1]."""
    wide = tokens.astype(np.uint64)
    found = np.full(len(tokens) - NGRAM + 1, 0xCBF29CE484222325, np.uint64)
    for at in range(NGRAM):
        found = (found ^ wide[at : at + len(found)]) * _PRIME
        found ^= found >> np.uint64(29)
    return found
