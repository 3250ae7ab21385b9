"""A supervised fastText model: the `.bin` file, written and read, and its scores computed here.

A text's score is a linear function of the mean of its features' vectors: softmax(W mean(E[features])). Files that are
written here are read by fastText and by fasttext-predict, which a build scores with because it is quicker (stage.py);
this is the reference, and what needs no package. Format: fastText's Model, Dictionary and Matrix `save`, version 12.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ingot.data.classify.features import LABEL, hash_words, ngram_buckets, words_of
from ingot.errors import DataError
from ingot.storage import atomic_file

_MAGIC, _VERSION = 793712314, 12
_SUPERVISED = 3
_LOSSES = {"softmax": 3, "one-vs-all": 4}
# dim, ws, epoch, minCount, neg, wordNgrams, loss, model, bucket, minn, maxn, lrUpdateRate, t
_ARGUMENTS = struct.Struct("<12id")
_DICTIONARY = struct.Struct("<3i2q")  # entries, words, labels, tokens seen, pruned (-1: nothing was)
_ENTRY = struct.Struct("<qb")  # count, kind
_WORD, _IS_LABEL = 0, 1


@dataclass(frozen=True)
class Model:
    """words, labels: with their counts in training, most frequent first; labels without the prefix "__label__".

    vectors: float32 [len(words) + buckets, dim], of words, then of hashed n-grams of 2..`ngrams` words.
    weights: float32 [len(labels), dim]. loss: "softmax", or "one-vs-all" for labels that do not exclude each other.
    """

    words: Mapping[bytes, int]
    labels: Mapping[str, int]
    vectors: np.ndarray
    weights: np.ndarray
    ngrams: int
    buckets: int
    loss: str = "softmax"
    epochs: int = 0
    min_count: int = 1
    tokens: int = 0
    _numbers: dict[bytes, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "_numbers", {word: number for number, word in enumerate(self.words)})

    def features(self, text: str) -> np.ndarray:
        """Rows of `vectors` that the text has, int64, each as often as it has it."""
        words = words_of(text)
        known = [number for word in words if (number := self._numbers.get(word)) is not None]
        hashes = hash_words(words)
        grams, _ = ngram_buckets(hashes, np.array([len(words)]), self.ngrams, max(self.buckets, 1))
        return np.concatenate([np.array(known, np.int64), grams + len(self.words)])

    def scores(self, text: str) -> dict[str, float]:
        """Label -> probability; empty for a text without a feature."""
        rows = self.features(text)
        if not len(rows):
            return {}
        logits = self.weights.astype(np.float64) @ self.vectors[rows].mean(axis=0, dtype=np.float64)
        found = _tabled_sigmoid(logits) if self.loss == "one-vs-all" else probabilities(logits[None], self.loss)[0]
        return dict(zip(self.labels, found.tolist(), strict=True))


def probabilities(logits: np.ndarray, loss: str) -> np.ndarray:
    """Of logits [B, L], row by row: shares of one for softmax, each by itself for one-vs-all."""
    if loss == "one-vs-all":
        return 1 / (1 + np.exp(-logits.clip(-60, 60)))
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


def _tabled_sigmoid(logits: np.ndarray) -> np.ndarray:
    """fastText looks its sigmoid up: 512 steps from -8 to 8, rounded down; 0 and 1 beyond."""
    steps = np.floor((logits.clip(-8, 8) + 8) * 32)
    return np.where(np.abs(logits) > 8, logits > 0, 1 / (1 + np.exp(8 - steps / 32)))


def write_model(path: Path, model: Model) -> None:
    """Write `model` as fastText's `.bin`."""
    dim = model.vectors.shape[1]
    arguments = (dim, 5, model.epochs, model.min_count, 5, model.ngrams, _LOSSES[model.loss], _SUPERVISED)
    arguments += (model.buckets, 0, 0, 100, 1e-4)
    entries = [(word, count, _WORD) for word, count in model.words.items()]
    entries += [(LABEL + label.encode(), count, _IS_LABEL) for label, count in model.labels.items()]
    with atomic_file(path) as file:
        file.write(struct.pack("<2i", _MAGIC, _VERSION) + _ARGUMENTS.pack(*arguments))
        file.write(_DICTIONARY.pack(len(entries), len(model.words), len(model.labels), model.tokens, -1))
        file.write(b"".join(name + b"\0" + _ENTRY.pack(count, kind) for name, count, kind in entries))
        for matrix in (model.vectors, model.weights):
            file.write(struct.pack("<b2q", 0, *matrix.shape))  # 0: not quantised
            file.write(np.ascontiguousarray(matrix, "<f4").data)


def read_model(path: Path) -> Model:
    """Read a `.bin` of word n-grams with softmax or one-vs-all loss, which is what `train` makes.

    Raises DataError for anything else: damaged or quantised files (.ftz), subwords, hierarchical softmax.
    """
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read the model {path}: {error.strerror}", fix="check its path") from None
    try:
        return _parse(data)
    except (struct.error, ValueError, IndexError, UnicodeDecodeError, KeyError, OverflowError) as error:
        raise DataError(
            f"{path} is not a classifier that ingot can read by itself ({error})",
            rule="a fastText .bin of a supervised model with word n-grams, softmax or one-vs-all, not quantised",
            fix="ingot data classifier train makes one; in a build fastText's own reader takes .ftz and others as well",
        ) from None


def _parse(data: memoryview) -> Model:
    if struct.unpack_from("<2i", data) != (_MAGIC, _VERSION):
        raise ValueError("no fastText file of version 12")
    at = 8
    dim, _, epochs, min_count, _, ngrams, loss, kind, buckets, _, maxn, _, _ = _ARGUMENTS.unpack_from(data, at)
    names = {number: name for name, number in _LOSSES.items()}
    if kind != _SUPERVISED or maxn > 0 or loss not in names or not 1 <= ngrams <= 16:
        raise ValueError("not supervised, or with subwords, or with another loss")
    at += _ARGUMENTS.size
    size, num_words, num_labels, tokens, pruned = _DICTIONARY.unpack_from(data, at)
    at += _DICTIONARY.size
    if pruned >= 0 or size != num_words + num_labels or min(num_words, num_labels, buckets) < 0:
        raise ValueError("its dictionary was pruned")
    entries: list[tuple[bytes, int]] = []
    raw = data.obj
    assert isinstance(raw, bytes)
    for _ in range(size):
        end = raw.index(b"\0", at)
        count, _ = _ENTRY.unpack_from(data, end + 1)
        entries.append((raw[at:end], count))
        at = end + 1 + _ENTRY.size
    matrices = []
    if len(dict(entries)) < len(entries):
        raise ValueError("an entry of the dictionary comes twice")
    for rows in (num_words + buckets, num_labels):
        quantised, *shape = struct.unpack_from("<b2q", data, at)
        at += 17
        if quantised or shape != [rows, dim]:
            raise ValueError("a matrix is quantised or has another shape")
        matrices.append(np.frombuffer(data, "<f4", rows * dim, at).reshape(rows, dim))
        at += rows * dim * 4
    return Model(
        words=dict(entries[:num_words]),
        labels={name.removeprefix(LABEL).decode(): count for name, count in entries[num_words:]},
        vectors=matrices[0],
        weights=matrices[1],
        ngrams=ngrams,
        buckets=buckets,
        loss=names[loss],
        epochs=epochs,
        min_count=min_count,
        tokens=tokens,
    )
