"""A supervised fastText model: its features, its `.bin` file, and its scores (Joulin et al. 2016, arXiv:1607.01759).

The scores of a text are a linear function of the mean of its features' vectors: softmax(W mean(E[features])). fastText
and fasttext-predict can read the files that `write_model` writes. A build scores with `Scorer`, which uses
fasttext-predict because it is faster; `Model.scores` is the reference and needs no other package. The file format is
that of fastText's `save` methods (Model, Dictionary, Matrix), version 12.

Features are words and hashed word n-grams, exactly as in fastText: bytes of UTF-8 are hashed as signed values, the end
of the line is a word, and n-gram hashes sign-extend the words' hashes. Subwords are not used.
"""

import functools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ingot.errors import ConfigError, DataError, require
from ingot.storage import atomic_file, sha256_file

_MAGIC, _VERSION = 793712314, 12
_SUPERVISED = 3
_LOSSES = {"softmax": 3, "one-vs-all": 4}
# dim, ws, epoch, minCount, neg, wordNgrams, loss, model, bucket, minn, maxn, lrUpdateRate, t
_ARGUMENTS = struct.Struct("<12id")
_DICTIONARY = struct.Struct("<3i2q")  # entries, words, labels, tokens seen, pruned size (-1: not pruned)
_ENTRY = struct.Struct("<qb")  # count, kind
_WORD, _IS_LABEL = 0, 1


@dataclass(frozen=True)
class Model:
    """A fastText model.

    words, labels: each with its number of occurrences in training, most frequent first; labels have no prefix
    "__label__". vectors: float32 [len(words) + buckets, dim], the vectors of words, then of hashed n-grams of
    2..`ngrams` words. weights: float32 [len(labels), dim]. loss: "softmax", or "one-vs-all" if a text can have several
    labels.
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
        """Return the row numbers in `vectors` of the features of `text`, int64, with repeats."""
        words = words_of(text)
        known = [number for word in words if (number := self._numbers.get(word)) is not None]
        hashes = hash_words(words)
        grams, _ = ngram_buckets(hashes, np.array([len(words)]), self.ngrams, max(self.buckets, 1))
        return np.concatenate([np.array(known, np.int64), grams + len(self.words)])

    def scores(self, text: str) -> dict[str, float]:
        """Return the probability of each label; empty for a text without a known feature."""
        rows = self.features(text)
        if not len(rows):
            return {}
        logits = self.weights.astype(np.float64) @ self.vectors[rows].mean(axis=0, dtype=np.float64)
        found = _tabled_sigmoid(logits) if self.loss == "one-vs-all" else probabilities(logits[None], self.loss)[0]
        return dict(zip(self.labels, found.tolist(), strict=True))


def probabilities(logits: np.ndarray, loss: str) -> np.ndarray:
    """Return the probabilities of `logits`, both [texts, labels]: rows that sum to one for softmax, independent values
    for one-vs-all."""
    if loss == "one-vs-all":
        return 1 / (1 + np.exp(-logits.clip(-60, 60)))
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


def _tabled_sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid as fastText's table gives it: 512 steps from -8 to 8, rounded down; 0 or 1 outside."""
    steps = np.floor((logits.clip(-8, 8) + 8) * 32)
    return np.where(np.abs(logits) > 8, logits > 0, 1 / (1 + np.exp(8 - steps / 32)))


def write_model(path: Path, model: Model) -> None:
    """Write `model` to `path` as a fastText `.bin` file."""
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
            file.write(struct.pack("<b2q", 0, *matrix.shape))  # 0: not quantized
            file.write(np.ascontiguousarray(matrix, "<f4").data)


def read_model(path: Path) -> Model:
    """Read a `.bin` file with word n-grams and softmax or one-vs-all loss, such as those that `train` makes.

    Raises DataError for all other files: damaged or quantized (.ftz), with subwords, with hierarchical softmax.
    """
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise DataError(
            "E-CLASSIFIER-UNREADABLE",
            f"cannot read the model {path}: {error.strerror}",
            rule="a model is a readable file",
            fix="correct the path of the model",
            path=str(path),
        ) from None
    try:
        return _parse(data)
    except (struct.error, ValueError, IndexError, UnicodeDecodeError, KeyError, OverflowError) as error:
        raise DataError(
            "E-CLASSIFIER-FORMAT",
            f"{path} is not a classifier that ingot can read without fastText ({error})",
            rule="the file must be a fastText .bin: supervised, word n-grams, softmax or one-vs-all, not quantized",
            fix="train a model with `ingot data classifier train`; only builds read .ftz and other forms",
            path=str(path),
            cause=str(error),
        ) from None


def _parse(data: memoryview) -> Model:
    if struct.unpack_from("<2i", data) != (_MAGIC, _VERSION):
        raise ValueError("not a fastText file of version 12")
    at = 8
    dim, _, epochs, min_count, _, ngrams, loss, kind, buckets, _, maxn, _, _ = _ARGUMENTS.unpack_from(data, at)
    names = {number: name for name, number in _LOSSES.items()}
    if kind != _SUPERVISED or maxn > 0 or loss not in names or not 1 <= ngrams <= 16:
        raise ValueError("not supervised, or with subwords, or with an unsupported loss")
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
        raise ValueError("its dictionary has an entry twice")
    for rows in (num_words + buckets, num_labels):
        quantized, *shape = struct.unpack_from("<b2q", data, at)
        at += 17
        if quantized or shape != [rows, dim]:
            raise ValueError("a matrix is quantized or has another shape")
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


END = b"</s>"
LABEL = b"__label__"
_FNV_OFFSET, _FNV_PRIME = 2166136261, 16777619
_NGRAM_FACTOR = np.uint64(116049371)


def words_of(text: str) -> list[bytes]:
    """Return the words of `text` in UTF-8, as fastText sees a line: split at ASCII whitespace and NUL, followed by END.

    The words after a literal END ("</s>"), and words that begin with "__label__", are left out.
    """
    words = text.encode("utf-8", "replace").replace(b"\0", b" ").split()
    if END in words:
        words = words[: words.index(END)]
    if LABEL.decode() in text:
        words = [word for word in words if not word.startswith(LABEL)]
    return [*words, END]


def hash_words(words: Sequence[bytes]) -> np.ndarray:
    """Return the FNV-1a hash of every word, with its bytes as signed chars: uint32 [len(words)]."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    order = np.argsort(-lengths, kind="stable")
    starts = np.cumsum(lengths) - lengths
    data = np.frombuffer(b"".join(words), np.int8)
    longest_first, starts = lengths[order], starts[order]
    hashes = np.full(len(words), _FNV_OFFSET, np.uint32)
    for position in range(int(longest_first[0]) if len(words) else 0):
        count = int(np.searchsorted(-longest_first, -position))  # number of words longer than `position`
        signed = data[starts[:count] + position].astype(np.int32).view(np.uint32)
        hashes[:count] = (hashes[:count] ^ signed) * np.uint32(_FNV_PRIME)
    found = np.empty_like(hashes)
    found[order] = hashes
    return found


def ngram_buckets(hashes: np.ndarray, ends: np.ndarray, order: int, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (bucket, position of the first word) of every n-gram of 2..`order` words; n-grams do not cross documents.

    hashes: uint32 [tokens], the hashes of all documents' words, concatenated. ends: int64 [documents], the end of each
    document in `hashes`. Both results are int64, ordered by the length of the n-gram, then by position.
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


# fastText adds this to a probability before taking the logarithm, so the probabilities that it returns include it.
_ADDED = 1e-5
_PREFIX = "__label__"


class Scorer:
    """Scores texts with a model file, `.bin` or `.ftz`, by fasttext-predict. A file is loaded once per process.

    path, sha256: the file and its hash. labels: the model's labels without the prefix "__label__", in arbitrary order.
    """

    def __init__(self, path: Path):
        self.path, self.sha256 = path, model_sha256(path)
        self._model = _load(str(path), self.sha256)
        self.labels = tuple(self.scores("a"))

    def scores(self, text: str) -> dict[str, float]:
        """Return the probability of each label; empty if the model knows no feature of the text."""
        # fastText reads one line; a lone surrogate, which UTF-8 cannot encode, becomes '?'.
        line = text.replace("\n", " ").encode("utf-8", "replace").decode()
        labels, found = self._model.predict(line, k=-1)
        pairs = zip(labels, found, strict=True)
        return {label.removeprefix(_PREFIX): min(max(float(p) - _ADDED, 0.0), 1.0) for label, p in pairs}


def model_sha256(path: Path) -> str:
    """Return the SHA-256 of a model file. Raises ConfigError if the file does not exist."""
    try:
        stat = path.stat()
        return _file_sha256(str(path), stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise ConfigError(
            "E-CLASSIFIER-MISSING",
            f"no classifier at {path} ({error.strerror})",
            rule="ingot comes without models: you train or download one",
            fix="ingot data classifier train --positive FILES --negative FILES --licence TEXT --out model.bin",
            path=str(path),
        ) from None


@functools.cache
def _file_sha256(path: str, size: int, modified: int) -> str:
    return sha256_file(Path(path))


@functools.cache
def _load(path: str, sha256: str):
    try:
        return require("fasttext", "data").load_model(path)
    except (ValueError, RuntimeError, MemoryError) as error:
        raise ConfigError(
            "E-CLASSIFIER-FORMAT",
            f"{path} is not a fastText model ({error})",
            rule="a classifier is a supervised fastText model, .bin or .ftz",
            fix="train a model with `ingot data classifier train`, or download the file again",
            path=str(path),
            cause=str(error),
        ) from None
