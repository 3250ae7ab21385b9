"""Train a classifier of fastText's form: the mean of word and n-gram vectors, then softmax or one-vs-all (Joulin 2016).

fastText trains on one text at a time; here a batch of texts is one matrix product, so numpy trains on 100,000 pages in
about a minute. There are two more differences, which do not affect the file format: vectors begin at zero, and rare
n-grams are not trained. So an untrained n-gram adds nothing to a score, whereas in fastText it adds its initial noise.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ingot.data.classify.model import END, Model, hash_words, ngram_buckets, probabilities, words_of
from ingot.errors import ConfigError, DataError
from ingot.ranges import Buckets, LearningRate, PositiveCount, PositiveQueue, Seed
from ingot.rng import derive

_CHUNK_TOKENS = 1 << 20
_ADAGRAD_EPS = 1e-10
Progress = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings:
    """Settings of training. dim: length of the vectors. ngrams: words in the longest n-gram. buckets: number of
    vectors for n-grams, which are assigned by hash.

    min_count: words and n-grams that occur less often are not trained. characters: how many characters from the start
    of a text are used, in training and in a build. batch: texts per update. rate: the first step size of row-wise
    AdaGrad (Duchi et al. 2011); it falls linearly to 0. loss: "softmax", or "one-vs-all" if a text can have several
    labels.
    """

    dim: PositiveQueue = 16
    ngrams: PositiveQueue = 2
    buckets: Buckets = 1 << 20
    epochs: PositiveQueue = 5
    min_count: PositiveCount = 5
    characters: PositiveCount = 5000
    batch: PositiveQueue = 16
    rate: LearningRate = 0.25
    loss: str = "softmax"
    seed: Seed = 1234

    def problems(self):
        for name in ("dim", "buckets", "epochs", "min_count", "characters", "batch"):
            if getattr(self, name) < 1:
                yield name, f"is {getattr(self, name)}, must be at least 1"
        if not 1 <= self.ngrams <= 16:
            yield "ngrams", f"is {self.ngrams}, must be in [1, 16]"
        if not 0 < self.rate < float("inf"):
            yield "rate", f"is {self.rate}, must be positive"
        if self.loss not in ("softmax", "one-vs-all"):
            yield "loss", f"is {self.loss!r}, must be 'softmax' or 'one-vs-all'"


@dataclass(frozen=True)
class Labelled:
    """A text with its label, or with several labels for one-vs-all."""

    text: str
    labels: tuple[str, ...]


@dataclass
class _WordNumbers(dict):
    """A dict from each word (bytes) to its number; a look-up gives a new word the next number."""

    def __missing__(self, word: bytes) -> int:
        number = self[word] = len(self)
        return number


@dataclass
class _EncodedTexts:
    """All texts as word numbers, 4 bytes per word. Words are numbered in the order of their first appearance."""

    words: _WordNumbers = field(default_factory=_WordNumbers)
    parts: list[np.ndarray] = field(default_factory=list)
    labels: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, example: Labelled, characters: int) -> None:
        words = words_of(example.text[:characters])
        self.parts.append(np.fromiter(map(self.words.__getitem__, words), np.int32, len(words)))
        self.labels.append(example.labels)


def train(
    examples: Iterable[Labelled], settings: ClassifierSettings | None = None, progress: Progress | None = None
) -> Model:
    """Train a model. The result depends only on `examples`, their order and the settings.

    Raises ConfigError for invalid settings, DataError for fewer than two labels.
    """
    settings = settings or ClassifierSettings()
    for name, problem in settings.problems():
        raise ConfigError(
            "E-CLASSIFIER-SETTING",
            f"{name} {problem}",
            rule="every setting of a classifier is within its bounds",
            fix=f"change {name}",
            name=name,
        )
    texts = _EncodedTexts()
    for example in examples:
        texts.add(example, settings.characters)
    counts = Counter(label for labels in texts.labels for label in labels)
    labels = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    if len(labels) < 2:
        raise DataError(
            "E-CLASSIFIER-LABELS",
            f"the examples have {len(labels)} label{'s' * (len(labels) != 1)} ({', '.join(labels) or 'none at all'})",
            rule="a classifier has at least two labels",
            fix="add examples with another label",
            labels=list(labels),
        )
    if settings.loss == "softmax" and any(len(own) > 1 for own in texts.labels):
        raise ConfigError(
            "E-CLASSIFIER-SOFTMAX",
            "an example has several labels",
            rule="with the loss softmax every text has one label",
            fix="train with the loss one-vs-all",
        )
    rows = _feature_rows(texts, settings)
    vectors, weights = _fit(rows, _targets(texts.labels, list(labels)), settings, progress or (lambda *_: None))
    return Model(
        words=rows.words,
        labels=labels,
        vectors=vectors,
        weights=weights,
        ngrams=settings.ngrams,
        buckets=settings.buckets,
        loss=settings.loss,
        epochs=settings.epochs,
        min_count=settings.min_count,
        tokens=sum(map(len, texts.parts)),
    )


def _targets(labels: Sequence[tuple[str, ...]], names: list[str]) -> np.ndarray:
    """Return float32 [texts, labels]: 1 where a text has a label, else 0."""
    targets = np.zeros((len(labels), len(names)), np.float32)
    column = {name: number for number, name in enumerate(names)}
    for row, own in enumerate(labels):
        targets[row, [column[name] for name in own]] = 1
    return targets


@dataclass(frozen=True)
class _FeatureRows:
    """The trained features of every text, as row numbers in `vectors`.

    words: the words with a vector and their counts. ids: int32, the rows of all texts, concatenated. ends: int64
    [texts], the end of each text in `ids`. sizes: float32 [texts], the number of features of a text as fastText counts
    them, including untrained n-grams. count: number of rows of `vectors`.
    """

    words: dict[bytes, int]
    ids: np.ndarray
    ends: np.ndarray
    sizes: np.ndarray
    count: int


def _feature_rows(texts: _EncodedTexts, settings: ClassifierSettings) -> _FeatureRows:
    names = list(texts.words)
    hashes, words, row_of_word = hash_words(names), *_dictionary(texts, names, settings)
    often = np.zeros(settings.buckets, np.int64)
    for chunk in _chunks(texts.parts):
        grams, _ = _ngrams(chunk, hashes, settings)
        often += np.bincount(grams, minlength=settings.buckets)
    trained = often >= settings.min_count
    ids, ends, sizes, end = [], [], [], 0
    for chunk in _chunks(texts.parts):
        count = len(chunk)
        grams, gram_owners = _ngrams(chunk, hashes, settings)
        rows = row_of_word[np.concatenate(chunk)]
        owners = np.repeat(np.arange(count), [len(part) for part in chunk])[rows >= 0]
        sizes.append(np.bincount(owners, minlength=count) + np.bincount(gram_owners, minlength=count))
        kept = trained[grams]
        owners = np.concatenate([owners, gram_owners[kept]])
        chunk_ids = np.concatenate([rows[rows >= 0], (grams[kept] + len(words)).astype(np.int32)])
        ids.append(chunk_ids[np.argsort(owners, kind="stable")])
        ends.append(end + np.cumsum(np.bincount(owners, minlength=count)))
        end = int(ends[-1][-1])
    return _FeatureRows(
        words,
        np.concatenate(ids),
        np.concatenate(ends),
        np.maximum(np.concatenate(sizes), 1).astype(np.float32),
        len(words) + settings.buckets,
    )


def _dictionary(
    texts: _EncodedTexts, names: list[bytes], settings: ClassifierSettings
) -> tuple[dict[bytes, int], np.ndarray]:
    """Return (the words that get a vector, with their counts, most frequent first; the row of each word number in
    `vectors`, -1 if it has none)."""
    counts = np.zeros(len(names), np.int64)
    for chunk in _chunks(texts.parts):
        counts += np.bincount(np.concatenate(chunk), minlength=len(names))
    # The sort is stable: words with equal counts stay in the order of first appearance, which is that of the numbers.
    kept = [n for n in np.argsort(-counts, kind="stable") if counts[n] >= settings.min_count or names[n] == END]
    row_of_word = np.full(len(names), -1, np.int32)
    row_of_word[kept] = np.arange(len(kept))
    return {names[number]: int(counts[number]) for number in kept}, row_of_word


def _chunks(parts: Sequence[np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
    """Yield the texts in order, in groups of about a million tokens."""
    first = tokens = 0
    for number, part in enumerate(parts, 1):
        tokens += len(part)
        if tokens >= _CHUNK_TOKENS or number == len(parts):
            yield parts[first:number]
            first, tokens = number, 0


def _ngrams(
    chunk: Sequence[np.ndarray], hashes: np.ndarray, settings: ClassifierSettings
) -> tuple[np.ndarray, np.ndarray]:
    """Return (bucket, number of the text within the chunk) of every n-gram, two arrays of int64."""
    ends = np.cumsum([len(part) for part in chunk])
    grams, where = ngram_buckets(hashes[np.concatenate(chunk)], ends, settings.ngrams, settings.buckets)
    return grams, np.searchsorted(ends, where, side="right")


@dataclass(frozen=True)
class _Batch:
    """A batch of texts.

    texts: the numbers of its texts. rows: the rows of its U distinct features, int32 [U]. cells: one number per
    occurrence of a feature, (position of the text in the batch) * U + (position of the feature in `rows`).
    """

    texts: np.ndarray
    rows: np.ndarray
    cells: np.ndarray

    def matrix(self, sizes: np.ndarray) -> np.ndarray:
        """Return the weight of each feature in the mean of each text, float32 [texts, U]. sizes: the number of features
        of every text of the training set."""
        counts = np.bincount(self.cells, minlength=len(self.texts) * len(self.rows))
        return counts.reshape(len(self.texts), -1).astype(np.float32) / sizes[self.texts, None]


def _batches(rows: _FeatureRows, settings: ClassifierSettings) -> list[_Batch]:
    """Return the texts in random order, cut into batches. Every epoch has the same batches in another order."""
    order = np.random.default_rng(derive(settings.seed, "texts")).permutation(len(rows.ends))
    starts = np.concatenate([[0], rows.ends[:-1]])
    batches = []
    for first in range(0, len(order), settings.batch):
        texts = order[first : first + settings.batch]
        ids = [rows.ids[starts[text] : rows.ends[text]] for text in texts]
        distinct, place = np.unique(np.concatenate(ids), return_inverse=True)
        owner = np.repeat(np.arange(len(texts)), [len(own) for own in ids])
        batches.append(_Batch(texts, distinct, (owner * len(distinct) + place).astype(np.int32)))
    return batches


def _fit(
    rows: _FeatureRows, targets: np.ndarray, settings: ClassifierSettings, progress: Progress
) -> tuple[np.ndarray, np.ndarray]:
    """Train and return vectors, float32 [rows.count, dim], and weights, float32 [labels, dim]."""
    random = np.random.default_rng(derive(settings.seed, "order"))
    vectors = np.zeros((rows.count, settings.dim), np.float32)
    weights = random.uniform(-1, 1, (targets.shape[1], settings.dim)).astype(np.float32)
    vector_squares = np.full(rows.count, _ADAGRAD_EPS, np.float32)
    weight_squares = np.full(weights.shape, _ADAGRAD_EPS, np.float32)
    batches = _batches(rows, settings)
    steps, step = settings.epochs * len(batches), 0
    for epoch in range(settings.epochs):
        for number in random.permutation(len(batches)):
            batch = batches[number]
            rate = settings.rate * (1 - step / steps)
            mean = batch.matrix(rows.sizes)
            hidden = mean @ vectors[batch.rows]
            slope = probabilities(hidden @ weights.T, settings.loss).astype(np.float32) - targets[batch.texts]
            weight_slope, hidden_slope = slope.T @ hidden, slope @ weights
            vector_slope = mean.T @ hidden_slope
            vector_squares[batch.rows] += np.einsum("ud,ud->u", vector_slope, vector_slope)
            vectors[batch.rows] -= rate * vector_slope / np.sqrt(vector_squares[batch.rows])[:, None]
            weight_squares += weight_slope**2
            weights -= rate * weight_slope / np.sqrt(weight_squares)
            step += 1
            if step % 50 == 0:
                progress(step / steps, f"epoch {epoch + 1} of {settings.epochs}")
    return vectors, weights
