"""Make a classifier from files of examples: read them, train, measure on held-out texts, write the model and its
card."""

import gzip
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ingot import __version__
from ingot.config import to_dict
from ingot.data.build.corpus import MANIFEST, read_documents
from ingot.data.classify.model import LABEL, Scorer, write_model
from ingot.data.classify.train import ClassifierSettings, Labelled, train
from ingot.errors import ConfigError, DataError, DataMissing
from ingot.storage import sha256_file, write_json

POSITIVE, NEGATIVE = "positive", "negative"
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
Progress = Callable[[float, str], None]
TEXT_FIELD, LABEL_FIELD = "text", "label"


def read_texts(path: Path, field: str = TEXT_FIELD) -> Iterator[str]:
    """Yield the texts of a corpus folder, of a JSONL file (`field` of each line), or of another file (each line is a
    text).

    Files may be gzipped. Blank texts are left out. Raises DataMissing for a missing file, DataError for a bad line.
    """
    if path.is_dir():
        if not (path / MANIFEST).exists() and (path / "corpus" / MANIFEST).exists():
            path = path / "corpus"
        for _, document in read_documents(path):
            yield document["text"]
        return
    for number, line in _lines(path):
        text = _field(path, number, line, field) if _is_jsonl(path) else line
        if not text.isspace() and text:
            yield text


def read_labelled(path: Path, text_field: str = TEXT_FIELD, label_field: str = LABEL_FIELD) -> Iterator[Labelled]:
    """Yield the examples of a file in fastText's form ("__label__good text ..."), or of JSONL with a text and a label
    (or a list of labels).

    A line without a label raises DataError; otherwise its text would be ignored silently.
    """
    for number, line in _lines(path):
        if _is_jsonl(path):
            text = _field(path, number, line, text_field)
            given = json.loads(line).get(label_field)
            labels = tuple(str(one) for one in (given if isinstance(given, list) else [given] if given else []))
        else:
            prefix, words, labels = LABEL.decode(), line.split(), []
            while words and words[0].startswith(prefix):
                labels.append(words.pop(0).removeprefix(prefix))
            text, labels = " ".join(words), tuple(labels)
        if not all(labels) or not labels or any(set(label) & set(" \t\r\n\v\f\0") for label in labels):
            raise DataError(
                "E-EXAMPLE-LABEL",
                f"{path}, line {number}: no label, or a label with whitespace",
                rule=f"each line is '__label__NAME text', or JSON with {text_field!r} and {label_field!r}",
                fix="correct the line; for files whose texts all have the same label use --positive and --negative",
                path=str(path),
                line=number,
            )
        yield Labelled(text, labels)


def _is_jsonl(path: Path) -> bool:
    return ".jsonl" in path.suffixes or ".json" in path.suffixes


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield number, line.decode().rstrip("\n")
    except FileNotFoundError:
        raise DataMissing(
            "E-EXAMPLES-MISSING",
            f"no file at {path}",
            rule="examples are files or corpus folders",
            fix="correct the path",
            path=str(path),
        ) from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(
            "E-EXAMPLES-UNREADABLE",
            f"{path} cannot be read after line {number} ({error})",
            rule="a file of examples is UTF-8 text, plain or gzip",
            fix="convert the file to UTF-8, or download it again if it is damaged",
            path=str(path),
            line=number,
        ) from None


def _field(path: Path, number: int, line: str, field: str) -> str:
    try:
        value = json.loads(line)[field]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "E-EXAMPLE-FIELD",
            f"{path}, line {number}: no {field!r} ({error})",
            rule=f"JSONL has one object per line, with the field {field!r} (a string)",
            fix="correct the line, or name the field of the texts with --text-field",
            path=str(path),
            line=number,
            field=field,
        ) from None
    if not isinstance(value, str):
        raise DataError(
            "E-EXAMPLE-FIELD",
            f"{path}, line {number}: {field!r} is {type(value).__name__}",
            rule=f"JSONL has one object per line, with the field {field!r} (a string)",
            fix="correct the line, or name the field of the texts with --text-field",
            path=str(path),
            line=number,
            field=field,
        )
    return value


@dataclass(frozen=True)
class Source:
    """A file or corpus folder of examples. label: the label of all its texts; "" if each line has its own labels."""

    path: Path
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Quality on the held-out texts at one threshold.

    taken: the share of all texts with a score of at least `threshold`. precision: the share of these texts that have
    the label, None if there are none. recall: the share of the texts with the label that are taken.
    """

    threshold: float
    taken: float
    precision: float | None
    recall: float


@dataclass(frozen=True, kw_only=True)
class LabelMetrics:
    """Quality of one label on the held-out texts.

    examples: number of held-out texts with this label. auc: probability that a text with the label scores higher than
    a text without it.
    """

    label: str
    examples: int
    auc: float
    thresholds: tuple[Threshold, ...]


@dataclass(frozen=True, kw_only=True)
class Card:
    """The description of a model file, written next to it as MODEL.json.

    files: the SHA-256 of each file of examples. licence: the license of the examples, as the user gave it. labels: the
    number of training texts with each label. trained, heldout: numbers of texts.
    """

    model_sha256: str
    licence: str
    files: dict[str, str]
    labels: dict[str, int]
    trained: int
    heldout: int
    settings: ClassifierSettings
    accuracy: float
    metrics: tuple[LabelMetrics, ...]
    ingot: str = field(default=__version__)


def card_path(model: Path) -> Path:
    return model.parent / f"{model.name}.json"


def make_classifier(
    sources: Sequence[Source],
    out: Path,
    *,
    licence: str,
    settings: ClassifierSettings | None = None,
    heldout: float = 0.1,
    text_field: str = TEXT_FIELD,
    label_field: str = LABEL_FIELD,
    force: bool = False,
    progress: Progress | None = None,
) -> Card:
    """Train on `sources`, write the model to `out` and its card next to it.

    heldout: share of the texts to hold out for measuring. A hash of the beginning of a text decides, so equal texts
    never end up in both parts. Raises ConfigError if `out` exists and `force` is off, or if no license is named;
    DataError for unusable examples.
    """
    settings = settings or ClassifierSettings()
    if not licence.strip():
        raise ConfigError(
            "E-CLASSIFIER-LICENSE",
            "no license of the examples is named",
            rule="the card of a model names the license of the texts it was trained on",
            fix="add --licence 'CC BY-SA 4.0', or --licence 'own texts'",
        )
    if out.exists() and not force:
        raise ConfigError(
            "E-CLASSIFIER-EXISTS",
            f"{out} exists",
            rule="a model is overwritten only with --force",
            fix="add --force, or name another file with --out",
            path=str(out),
        )
    if not 0 < heldout < 1:
        raise ConfigError(
            "E-CLASSIFIER-SETTING",
            f"heldout is {heldout}",
            rule="heldout is the share of the texts to measure with, above 0 and below 1",
            fix="use a value like 0.1",
            name="heldout",
        )
    kept_out: list[Labelled] = []
    trained = 0

    def training() -> Iterator[Labelled]:
        nonlocal trained
        for example in read_examples(sources, text_field, label_field):
            beginning = example.text[: settings.characters]  # equal beginnings are in the same part
            if _held_out(beginning, heldout):
                kept_out.append(Labelled(beginning, example.labels))
            else:
                trained += 1
                yield example

    model = train(training(), settings, progress)
    if not kept_out:
        raise DataError(
            "E-CLASSIFIER-HELDOUT",
            f"none of the {trained} texts was held out",
            rule="a classifier is measured on at least one held-out text",
            fix="use more examples, or hold out a larger share",
            trained=trained,
        )
    write_model(out, model)
    accuracy, metrics = measure(Scorer(out), kept_out, list(model.labels))
    card = Card(
        model_sha256=sha256_file(out),
        licence=licence,
        files=dict(_hashes(sources)),
        labels=dict(model.labels),
        trained=trained,
        heldout=len(kept_out),
        settings=settings,
        accuracy=accuracy,
        metrics=metrics,
    )
    write_json(card_path(out), to_dict(card))
    return card


def read_examples(
    sources: Sequence[Source], text_field: str = TEXT_FIELD, label_field: str = LABEL_FIELD
) -> Iterator[Labelled]:
    for source in sources:
        if source.label:
            yield from (Labelled(text, (source.label,)) for text in read_texts(source.path, text_field))
        else:
            yield from read_labelled(source.path, text_field, label_field)


def _held_out(text: str, share: float) -> bool:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def _hashes(sources: Sequence[Source]) -> Iterator[tuple[str, str]]:
    for source in sources:
        path = source.path
        if path.is_dir():
            path = path / MANIFEST if (path / MANIFEST).exists() else path / "corpus" / MANIFEST
        yield str(source.path), sha256_file(path)


def measure(
    scorer: Scorer, examples: Sequence[Labelled], labels: Sequence[str]
) -> tuple[float, tuple[LabelMetrics, ...]]:
    """Return (accuracy, metrics of each label) of `scorer` on `examples`. The accuracy is the share of the examples
    whose most probable label is one of their labels."""
    scores = np.zeros((len(examples), len(labels)))
    truth = np.array([[label in example.labels for label in labels] for example in examples])
    for row, example in enumerate(examples):
        found = scorer.scores(example.text)
        scores[row] = [found.get(label, 0.0) for label in labels]
    accuracy = float(truth[np.arange(len(examples)), scores.argmax(axis=1)].mean())
    return accuracy, tuple(_label_metrics(label, scores[:, n], truth[:, n]) for n, label in enumerate(labels))


def _label_metrics(label: str, scores: np.ndarray, truth: np.ndarray) -> LabelMetrics:
    thresholds = []
    for threshold in THRESHOLDS:
        taken = scores >= threshold
        right = int((taken & truth).sum())
        thresholds.append(
            Threshold(
                threshold=threshold,
                taken=float(taken.mean()),
                precision=right / int(taken.sum()) if taken.any() else None,
                recall=right / max(int(truth.sum()), 1),
            )
        )
    return LabelMetrics(label=label, examples=int(truth.sum()), auc=_auc(scores, truth), thresholds=tuple(thresholds))


def _auc(scores: np.ndarray, truth: np.ndarray) -> float:
    """Return the area under the ROC curve, by the Mann-Whitney statistic with mean ranks for equal scores; 0.5 if all
    texts or none have the label. truth: which texts have the label."""
    ours, others = int(truth.sum()), int((~truth).sum())
    if not ours or not others:
        return 0.5
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[group]
    return float((ranks[truth].sum() - ours * (ours + 1) / 2) / (ours * others))


def load_card(model: Path) -> dict:
    """Return the card next to `model`. Raises ConfigError if the card is missing or belongs to another file."""
    path = card_path(model)
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
        written = card["model_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "E-CARD-MISSING",
            f"{model} has no card ({path.name}: {error})",
            rule="`ingot data classifier train` writes a card next to its model",
            fix="copy the card next to the model, or train the model again with --force",
            path=str(path),
        ) from None
    if sha256_file(model) != written:
        raise ConfigError(
            "E-CARD-OTHER-MODEL",
            f"{path.name} is not the card of {model} but of another model (SHA-256 {written[:12]}..)",
            rule="a card names the SHA-256 of its model file",
            fix="copy the right card, or train the model again with --force",
            path=str(path),
            model=str(model),
        )
    return card
