"""From files to a classifier with its card: trained on nine texts of ten, measured on the tenth, written down."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ingot import __version__
from ingot.config import to_dict
from ingot.data.build.corpus import MANIFEST
from ingot.data.classify.examples import LABEL_FIELD, TEXT_FIELD, read_labelled, read_texts
from ingot.data.classify.model import write_model
from ingot.data.classify.scorer import Scorer
from ingot.data.classify.train import ClassifierSettings, Labelled, train
from ingot.errors import ConfigError, DataError
from ingot.storage import sha256_file, write_json

POSITIVE, NEGATIVE = "positive", "negative"
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Source:
    """A file of examples. label: of all its texts; "" if its lines carry their own."""

    path: Path
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Of the held-out texts: at `threshold`, what share is taken, how pure that is, and how much of `label` it has.

    precision is None where nothing is taken.
    """

    threshold: float
    taken: float
    precision: float | None
    recall: float


@dataclass(frozen=True, kw_only=True)
class LabelMetrics:
    """examples: held out, of this label. auc: probability that one of them scores above one of the others."""

    label: str
    examples: int
    auc: float
    thresholds: tuple[Threshold, ...]


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a model file is: written beside it, as MODEL.json.

    files: name -> SHA-256. licence: of the examples, in the words of who trained. trained, heldout: number of texts.
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
    return model.with_name(model.name + ".json")


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
    """Train on `sources`, write the model at `out` and its card beside it.

    heldout: share of the texts that is measured on; which ones, their content decides, so equal texts are together.
    Raises ConfigError when `out` exists and `force` is off or no licence is named; DataError.
    """
    settings = settings or ClassifierSettings()
    if not licence.strip():
        raise ConfigError(
            "no licence of the examples is named",
            rule="a model that decides what is kept says what it was trained on",
            fix="--licence 'CC BY-SA 4.0', or 'own texts'",
        )
    if out.exists() and not force:
        raise ConfigError(f"{out} exists", rule="a model is not overwritten", fix="--force, or another --out")
    if not 0 < heldout < 1:
        raise ConfigError(f"heldout is {heldout}", rule="a share of the texts, above 0 and below 1")
    kept_out: list[Labelled] = []
    trained = 0

    def training() -> Iterator[Labelled]:
        nonlocal trained
        for example in read_examples(sources, text_field, label_field):
            beginning = example.text[: settings.characters]  # equal ones are on one side, however they go on
            if _held_out(beginning, heldout):
                kept_out.append(Labelled(beginning, example.labels))
            else:
                trained += 1
                yield example

    model = train(training(), settings, progress)
    if not kept_out:
        raise DataError("no text was held out", rule="a classifier is measured", fix="give more examples")
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
    """(share of texts whose likeliest label is one of theirs, metrics by label) of `scorer` on `examples`."""
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
    """Mann-Whitney: by ranks, equal scores sharing theirs; 0.5 where there is nothing to compare."""
    ours, others = int(truth.sum()), int((~truth).sum())
    if not ours or not others:
        return 0.5
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[group]
    return float((ranks[truth].sum() - ours * (ours + 1) / 2) / (ours * others))


def load_card(model: Path) -> dict:
    """The card beside `model` as it was written. Raises ConfigError when there is none, or it is of another file."""
    path = card_path(model)
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
        written = card["model_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{model} has no card ({path.name}: {error})", rule="ingot data classifier train writes one beside a model"
        ) from None
    if sha256_file(model) != written:
        raise ConfigError(
            f"{path.name} is the card of another model than {model} (SHA-256 {written[:12]}..)",
            rule="a card tells what one file was trained on",
            fix="train it again, with --force",
        )
    return card
