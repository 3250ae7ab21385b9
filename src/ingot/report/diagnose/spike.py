"""The documents of the steps in which the guard found trouble, compared with those of healthy steps of the same run.

Read are the run folder, the tokens and their lineage; no torch, no device. Without lineage, or without the tokenizer,
what they would show is left out.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.data.lineage.purge.history import TokenLayout
from ingot.errors import DataError, DataMissing, IngotError, UsageError
from ingot.report.diagnose.attempts import attempt_of
from ingot.report.diagnose.batch_text import BatchText, describe_batch
from ingot.report.diagnose.data_changes import SourceChange, changes_at, shares_of_sources, source_change
from ingot.report.diagnose.document_signs import (
    DocumentSigns,
    HealthySigns,
    JudgedSign,
    UsualTokens,
    measure_signs,
)
from ingot.report.diagnose.troubled import TroubledStep, troubled_steps
from ingot.report.facts import RunData, gather, no_run_folder
from ingot.report.lineage.exposure import RunTokens
from ingot.report.lineage.trace import DocumentPart, check_ledger, origins_of, parts_of
from ingot.rng import derive
from ingot.tokenizer.encoder import Encoder, load_encoder
from ingot.trainer.loader.order import Order
from ingot.trainer.loader.reader import TokenReader
from ingot.trainer.resilience.lock import is_locked

MOST_STEPS = 8  # explained without --step, the worst ones
_HEALTHY_STEPS, _HEALTHY_WINDOWS, _HEALTHY_TOKENS = 256, 2048, 4 << 20
_FEWEST_STEPS = 8  # if fewer healthy steps were trained, steps to come are taken, too
_FEWEST = 16  # healthy documents to compare with
_CUT = 3  # bytes of a character that a window may cut off at either end, each of which is decoded as U+FFFD

Progress = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class BatchDocument:
    """A document in a batch. samples: the positions in the batch that have tokens of it. tokens: their number. url,
    file, record_id: "" if there is no lineage. signs: those of its most unusual part, the most unusual first."""

    id: str
    source: str
    url: str
    file: str
    record_id: str
    samples: tuple[int, ...]
    tokens: int
    signs: tuple[JudgedSign, ...]

    @property
    def ratio(self) -> float:
        """The distance of its most unusual sign (document_signs.py); 0 if it could not be compared."""
        return self.signs[0].ratio if self.signs else 0.0

    @property
    def reasons(self) -> tuple[JudgedSign, ...]:
        """The signs that are unusual; first those that explain the others."""
        return tuple(sorted((sign for sign in self.signs if sign.unusual), key=lambda sign: sign.kind.general))


@dataclass(frozen=True, kw_only=True)
class SpikeBatch:
    """A step and its documents, the most suspicious first. changes: in words, what changed in the settings and
    in the data at or shortly before the step. sources: source -> its share of the tokens of the step, and of healthy
    ones. source_change: of the mixture, shortly before the step; None: there is none. text: the lengths and repetitions
    of the batch. lr: the learning rate of this training of the step in the log, NaN if it is not there. parts: of
    documents, in the order of the batch."""

    step: TroubledStep
    documents: tuple[BatchDocument, ...]
    changes: tuple[str, ...]
    sources: dict[str, tuple[float, float]]
    source_change: SourceChange | None
    text: BatchText
    lr: float
    parts: tuple[DocumentPart, ...]

    @property
    def suspects(self) -> tuple[BatchDocument, ...]:
        """The documents with an unusual sign."""
        return tuple(document for document in self.documents if document.reasons)


@dataclass(frozen=True, kw_only=True)
class SpikeReport:
    """The troubled steps of a run and their documents. more: troubled steps that are not explained here. healthy_steps,
    healthy_documents: with how many the batches are compared. unknown: what could not be measured, in words."""

    root: Path
    name: str
    running: bool
    batches: tuple[SpikeBatch, ...]
    more: tuple[int, ...]
    healthy_steps: int
    healthy_documents: int
    unknown: tuple[str, ...]


def explain_spike(root: Path, step: int | None = None, progress: Progress | None = None) -> SpikeReport:
    """Return the documents of a step, or of the worst MOST_STEPS troubled steps of the log, else of the step whose
    numbers ended the run.

    Raises UsageError if `root` is not a run folder or the step was not trained, DataMissing if no step is given and the
    log names none, DataError if the tokens are damaged, or are not those of the step.
    """
    report = progress or (lambda fraction, text: None)
    data = gather(root)
    if data.run is None:
        raise no_run_folder(root)
    found = troubled_steps(data)
    chosen = _chosen(data, found, step)
    batches = _Batches(root, report)
    batches.check_trained(data, [one.step for one in chosen])
    parts = {one.step: batches.parts(one.step) for one in chosen}
    suspected = {part.document for own in parts.values() for part in own}
    healthy = batches.healthy(_healthy_steps(data, batches.tokens, found, [one.step for one in chosen]), suspected)
    origin, unknown = batches.origins([part for own in parts.values() for part in own])
    explained = []
    for number, one in enumerate(chosen):
        report(0.5 + 0.5 * number / len(chosen), f"step {one.step}")
        own, attempt = parts[one.step], attempt_of(data, one.step, one.time)
        level = batches.tokens.config.guard.level
        settings = (str(change) for change in attempt.changes if change.step >= one.step - level and change.shown)
        explained.append(
            SpikeBatch(
                step=one,
                documents=batches.documents(own, healthy, origin),
                changes=(*settings, *changes_at(batches.tokens, batches.order, one.step)),
                sources=shares_of_sources(own, healthy.parts),
                source_change=source_change(batches.tokens, batches.order, one.step),
                text=batches.text(own),
                lr=attempt.rates.get(one.step, math.nan),
                parts=tuple(own),
            )
        )
    named = {one.step for one in chosen}
    return SpikeReport(
        root=root,
        name=data.run.name,
        running=is_locked(data.folder.lock),
        batches=tuple(explained),
        more=() if step is not None else tuple(one.step for one in found if one.step not in named),
        healthy_steps=healthy.steps,
        healthy_documents=len({part.document for part in healthy.parts}),
        unknown=tuple(filter(None, (unknown, batches.no_text, healthy.few))),
    )


def parts_at(root: Path, step: int) -> list[DocumentPart]:
    """Return the parts of documents in the batch of `step`, which may be still to come. Raises DataError if the tokens
    are damaged."""
    tokens = RunTokens(root)
    layout = TokenLayout(tokens.manifest, (tokens.tokens,), True)
    order = tokens.order(layout)
    return list(parts_of(layout, order, order.step(step, tokens.config.train.global_batch)))


def _step_of_the_end(data: RunData) -> int | None:
    """Return the step whose numbers ended the run; None if it did not end so."""
    last = data.faults[-1] if data.faults else None
    if last is None or last.resumed_at is not None or last.failure != "numerics" or last.step not in data.steps:
        return None
    return last.step


def _chosen(data: RunData, found: Sequence[TroubledStep], step: int | None) -> list[TroubledStep]:
    if step is not None:
        event = data.steps.get(step, {})
        plain = TroubledStep(
            step=step, found=(), loss=event.get("loss", math.nan), grad_norm=event.get("grad_norm", math.nan)
        )
        return [next((one for one in found if one.step == step), plain)]
    if not found and (ended := _step_of_the_end(data)) is not None:
        event = data.steps[ended]
        return [TroubledStep(step=ended, found=("the run ended",), loss=event["loss"], grad_norm=event["grad_norm"])]
    if not found:
        raise DataMissing(
            "E-SPIKE-NO-STEP",
            f"the log of {data.folder.root} has no finding of the guard, up to step {data.last_step}",
            rule="steps are found in the log, in which the guard writes what it found (docs/guard.md)",
            fix=f"name the step: ingot explain spike {data.folder.root} --step N",
            run=str(data.folder.root),
            last_step=data.last_step,
        )
    return list(found[:MOST_STEPS])


def _healthy_steps(data: RunData, tokens: RunTokens, found: Sequence[TroubledStep], wanted: Sequence[int]) -> list[int]:
    """Return steps without trouble, in random order: trained ones, and if there are few of them, the next ones."""
    bad = {one.step for one in found} | {*wanted}
    bad |= {step for event in (*data.passed, *data.vetoes) for step in event["steps"]}
    for event in data.measures:
        bad |= set(range(event["first"], event["last"] + 1))
    last = max(data.last_step, tokens.trained_steps)
    steps = [step for step in range(1, last + 1) if step not in bad]
    if len(steps) < _FEWEST_STEPS:
        ahead = range(last + 1, tokens.config.train.steps + 1)
        steps += [step for step in ahead if step not in bad][: _FEWEST_STEPS - len(steps)]
    random = np.random.default_rng(derive(tokens.config.seed, "healthy steps") % 2**63)
    current = [step for step in steps if (layout := tokens.layout_at(step)) is not None and layout.current]
    return [current[at] for at in random.permutation(len(current))[:_HEALTHY_STEPS]]


@dataclass(frozen=True, kw_only=True)
class _Healthy:
    """Healthy documents. usual: the tokens of one half of them. signs: those of the other half. few: why they are few,
    in words, or ""."""

    parts: list[DocumentPart]
    steps: int
    usual: UsualTokens
    signs: HealthySigns
    few: str


class _Batches:
    """The batches of a run, read from its tokens. no_text: why the text of tokens is unknown, in words, or ""."""

    def __init__(self, root: Path, report: Progress):
        self.tokens, self._report = RunTokens(root), report
        config = self.tokens.config
        self._reader = TokenReader(self.tokens.tokens, config.train.seq_len, manifest=self.tokens.manifest)
        self._layout = TokenLayout(self.tokens.manifest, (self.tokens.tokens,), True)
        self.order: Order = self.tokens.order(self._layout)
        self._shards = {shard.name: number for number, shard in enumerate(self.tokens.manifest.shards)}
        self._encoder, self.no_text = self._open_encoder()

    def _check_tokens(self, step: int) -> None:
        layout = self.tokens.layout_at(step)
        if layout is None or not layout.current:
            raise DataError(
                "E-STEP-TOKENS-GONE",
                f"step {step} was trained on other tokens than those in data.tokens now",
                rule="the texts of a step are read from the tokens on which it was trained",
                fix=f"restore these tokens; ingot data trace --run {self.tokens.folder.root} --step {step} may still "
                "name its documents",
                step=step,
            )

    def _open_encoder(self) -> tuple[Encoder | None, str]:
        """Return the tokenizer of the tokens: that of the run file, or the one beside the tokens."""
        config, root = self.tokens.config, self.tokens.folder.root
        places = [root / config.data.tokenizer] if config.data.tokenizer else []
        places.append(self.tokens.tokens.parent / "tokenizer.json")
        why = ""
        for place in places:
            try:
                encoder = load_encoder(place, eot=self.tokens.manifest.eot_id)
            except IngotError as error:
                why = why or error.found
                continue
            if encoder.sha256 == self.tokens.manifest.tokenizer_sha256:
                return encoder, ""
            why = why or f"{place} did not encode these tokens"
        return None, f"the text of the documents, so only their tokens are compared: {why}"

    def check_trained(self, data: RunData, steps: Sequence[int]) -> None:
        """Raise UsageError for a step that the run has not trained, DataError if its tokens are not there."""
        last = max(data.last_step, self.tokens.trained_steps)
        for step in steps:
            if step > last:
                raise UsageError(
                    "E-SPIKE-STEP",
                    f"step {step} was not trained: the log ends at step {last}",
                    rule="a batch can be compared with healthy ones once it was trained",
                    fix=f"use a step up to {last}, or list its documents: ingot data trace --run "
                    f"{self.tokens.folder.root} --step {step}",
                    step=step,
                    last_step=last,
                )
            self._check_tokens(step)

    def parts(self, step: int) -> list[DocumentPart]:
        """Return the parts of documents in the batch of a step. Raises DataError if the ledger has other samples."""
        ids = self.order.step(step, self.tokens.config.train.global_batch)
        check_ledger(self.tokens, step, ids)
        return list(parts_of(self._layout, self.order, ids))

    def healthy(self, steps: Sequence[int], suspected: Collection[str]) -> _Healthy:
        """Return documents of `steps`, without those that are `suspected`: of a batch that is in the run twice, say."""
        config = self.tokens.config
        most = max(min(_HEALTHY_WINDOWS, _HEALTHY_TOKENS // config.train.seq_len), 1)
        each = max(-(-most // max(len(steps), 1)), 1)
        parts: list[DocumentPart] = []
        used = left = 0
        for step in steps:
            if used >= most:
                break
            ids = self.order.step(step, config.train.global_batch)
            random = np.random.default_rng(derive(config.seed, "healthy samples", step) % 2**63)
            ids = ids[random.permutation(len(ids))[:each]]
            own = [part for part in parts_of(self._layout, self.order, ids) if part.document not in suspected]
            parts += own
            used, left = used + len(ids), left + 1
        documents = sorted({part.document for part in parts})
        counted = set(documents[::2])  # ids are hashes, so every other one is a random half
        first = [part for part in parts if part.document in counted]
        usual = UsualTokens.of([self._read(part) for part in first], self.tokens.manifest.vocab_size)
        signs = []
        for number, part in enumerate(part for part in parts if part.document not in counted):
            if number % 64 == 0:
                self._report(0.5 * number / max(len(parts) - len(first), 1), "healthy documents")
            signs.append(self._signs(part, usual))
        few = f"only {len(signs)} healthy documents are left, too few to compare with" if len(signs) < _FEWEST else ""
        return _Healthy(parts=parts, steps=left, usual=usual, signs=HealthySigns([] if few else signs), few=few)

    def _read(self, part: DocumentPart) -> np.ndarray:
        """Return the tokens of a part without the end-of-text token. Raises DataError if they are damaged."""
        seq_len = self._reader.seq_len
        number = self._shards[part.shard.name]
        first = int(self.order.windows.ends[number] - self.order.windows.counts[number])
        window = min(part.start // seq_len, int(self.order.windows.counts[number]) - 1)
        row = self._reader.read(np.array([first + window]))[0]
        begin = part.start - window * seq_len
        tokens = row[begin : begin + part.tokens]
        return tokens[:-1] if len(tokens) and tokens[-1] == self.tokens.manifest.eot_id else tokens

    def text(self, parts: Sequence[DocumentPart]) -> BatchText:
        """Return the lengths of the documents of a batch, and what is repeated in it."""
        decode = self._encoder.decode if self._encoder else None
        return describe_batch([(part.document, self._read(part)) for part in parts], decode)

    def _signs(self, part: DocumentPart, usual: UsualTokens) -> DocumentSigns:
        tokens = self._read(part)
        if not len(tokens):
            return DocumentSigns(tokens=0, characters=0, values={}, excerpts={})
        if self._encoder is None:
            return measure_signs(tokens, None, usual)
        text = _without_cuts(self._encoder.decode(tokens))
        return measure_signs(tokens, text, usual, self._encoder.special)

    def documents(
        self, parts: Sequence[DocumentPart], healthy: _Healthy, origin: dict[str, dict]
    ) -> tuple[BatchDocument, ...]:
        """Return the documents of a batch, the most suspicious first."""
        by_id: dict[str, list[DocumentPart]] = defaultdict(list)
        for part in parts:
            by_id[part.document].append(part)
        found = []
        for one, own in by_id.items():
            judged = [healthy.signs.judge(self._signs(part, healthy.usual)) for part in own]
            worst = max(judged, key=lambda signs: signs[0].ratio if signs else 0.0)
            known = origin.get(one, {})
            found.append(
                BatchDocument(
                    id=one,
                    source=own[0].shard.source,
                    url=known.get("url", ""),
                    file=known.get("file", ""),
                    record_id=known.get("record_id", ""),
                    samples=tuple(dict.fromkeys(part.sample for part in own)),
                    tokens=sum(part.tokens for part in own),
                    signs=tuple(worst),
                )
            )
        return tuple(sorted(found, key=lambda document: (-document.ratio, -document.tokens, document.id)))

    def origins(self, parts: list[DocumentPart]) -> tuple[dict[str, dict], str]:
        """Return the lineage of the documents by id, and why there is none, in words."""
        try:
            return origins_of(self.tokens.tokens, self._layout, parts), ""
        except (IngotError, OSError) as error:
            return {}, f"where the documents come from: {getattr(error, 'found', error)}"


def _without_cuts(text: str) -> str:
    """Return a text without the remains of characters that were cut at its ends."""
    begin = next((at for at, char in enumerate(text[:_CUT]) if char != "\ufffd"), min(_CUT, len(text)))
    rest = text[begin:]
    end = next((at for at, char in enumerate(rest[::-1][:_CUT]) if char != "\ufffd"), min(_CUT, len(rest)))
    return rest[: len(rest) - end]
