"""The features of a text as fastText has them: words and hashed word n-grams (Joulin et al. 2016, arXiv:1607.01759).

What is not plain is kept, because a model file has to mean the same here and there: bytes of UTF-8 are hashed as signed
ones, the end of the line is a word, and the n-grams' arithmetic sign-extends the words' hashes. Subwords are not used.
"""

from collections.abc import Sequence

import numpy as np

END = b"</s>"
LABEL = b"__label__"
_FNV_OFFSET, _FNV_PRIME = 2166136261, 16777619
_NGRAM_FACTOR = np.uint64(116049371)


def words_of(text: str) -> list[bytes]:
    """The words of `text`, UTF-8, as one line for fastText: cut at ASCII white space and NUL, END at the end.

    What stands behind a literal END is not read, and words that look like labels are none.
    """
    words = text.encode("utf-8", "replace").replace(b"\0", b" ").split()
    if END in words:
        words = words[: words.index(END)]
    if LABEL.decode() in text:
        words = [word for word in words if not word.startswith(LABEL)]
    return [*words, END]


def hash_words(words: Sequence[bytes]) -> np.ndarray:
    """FNV-1a of every word, its bytes taken as signed chars: uint32 [len(words)]."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    order = np.argsort(-lengths, kind="stable")
    starts = np.cumsum(lengths) - lengths
    data = np.frombuffer(b"".join(words), np.int8)
    longest_first, starts = lengths[order], starts[order]
    hashes = np.full(len(words), _FNV_OFFSET, np.uint32)
    for position in range(int(longest_first[0]) if len(words) else 0):
        count = int(np.searchsorted(-longest_first, -position))  # words longer than `position`
        signed = data[starts[:count] + position].astype(np.int32).view(np.uint32)
        hashes[:count] = (hashes[:count] ^ signed) * np.uint32(_FNV_PRIME)
    found = np.empty_like(hashes)
    found[order] = hashes
    return found


def ngram_buckets(hashes: np.ndarray, ends: np.ndarray, order: int, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """The bucket of every n-gram of 2..`order` words that lies within one document, and its first word's position.

    hashes: uint32 [tokens] of documents back to back. ends: int64 [documents], where each one ends. Both results are
    int64; n-grams come by length, then by position.
    """
    signed = hashes.view(np.int32).astype(np.int64).view(np.uint64)
    tokens = len(hashes)
    last = np.repeat(ends, np.diff(ends, prepend=0))  # the end of each token's document
    rolling, found, where = signed.copy(), [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    positions = np.arange(tokens)
    for reach in range(1, order):
        if reach >= tokens:
            break
        rolling = rolling[: tokens - reach] * _NGRAM_FACTOR + signed[reach:]
        inside = positions[: tokens - reach] + reach < last[: tokens - reach]
        found.append((rolling[inside] % np.uint64(buckets)).astype(np.int64))
        where.append(positions[: tokens - reach][inside])
    return np.concatenate(found), np.concatenate(where)
