"""The verdict on a spike, by a replay: did its batch make it, the weights, both, or the hardware?

A size is the distance from the level of the healthy steps before: of the loss in nats, of the gradient norm as a
logarithm. A replay shows a spike again if it has at least half of its size.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ingot.rehearse.replay.found import ReplayedSpike
from ingot.report.diagnose.attempts import ChangedSetting, StepAttempt
from ingot.report.diagnose.changed_settings import blamed, changes_before, way_back
from ingot.report.diagnose.spike import SpikeBatch
from ingot.report.diagnose.troubled import usual_levels
from ingot.report.facts import RunData
from ingot.report.lineage.trace import DocumentPart

SpikeCause = Literal["data", "data and state", "state", "settings", "hardware", "none", "unknown"]
HALF = 0.5  # of the size of a spike
_LEAST_NORM = math.log(2)  # a gradient norm below twice the usual one is no spike


@dataclass(frozen=True, kw_only=True)
class SpikeVerdict:
    """The verdict on a step. measure: by what it was judged. reasons: what was found, as sentences. advice: what to do.
    has_spike: the replay has the spike, too.

    usual_loss, usual_grad_norm: the medians of the healthy steps of the log before. departs: the first replayed step
    whose numbers are not those of the log, by a tenth of the spike or more; 0: none.
    """

    cause: SpikeCause
    measure: Literal["loss", "gradient norm"]
    usual_loss: float
    usual_grad_norm: float
    departs: int
    has_spike: bool
    reasons: tuple[str, ...]
    advice: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DocumentLoss:
    """The loss of a document in the batch. tokens: those that are predicted. loss: their mean. excess: its share of all
    loss of the batch above the mean of the batch that it is compared with, of documents above it; NaN without one."""

    document: str
    source: str
    tokens: int
    loss: float
    excess: float


@dataclass(frozen=True, kw_only=True)
class ReplayedSource:
    """The loss of a source in the batch, and in the batch that it is compared with; NaN where it has no token."""

    source: str
    tokens: int
    loss: float
    other: float


def judge_spike(
    data: RunData, batch: SpikeBatch, replayed: ReplayedSpike, attempt: StepAttempt | None = None
) -> SpikeVerdict:
    """Return the verdict on the step of `batch`, from the log of its run and the replay of the step.

    attempt: this training of the step, whose steps `data` has; None: no setting changed on the way.
    """
    assert data.run is not None
    step, own = batch.step, replayed.own
    usual_loss, usual_norm = usual_levels(data, step.step, data.run.guard.level)
    logged_loss = math.inf if "loss not finite" in step.found else step.loss
    logged_norm = math.inf if "gradient not finite" in step.found else step.grad_norm
    logged = (logged_loss - usual_loss, _ratio(logged_norm, usual_norm))
    again = (_or_infinite(own.loss) - usual_loss, _ratio(_or_infinite(own.grad_norm), usual_norm))
    by_norm = not logged[0] > _least_loss(data) and logged[1] >= _LEAST_NORM
    size, shown = (logged[1], again[1]) if by_norm else (logged[0], again[0])
    other = math.nan
    if replayed.other_step:
        other_loss, other_norm = _or_infinite(replayed.other_loss), _or_infinite(replayed.other_grad_norm)
        other = _ratio(other_norm, usual_norm) if by_norm else other_loss - usual_loss
    least = _LEAST_NORM if by_norm else _least_loss(data)
    departs = _departs(data, replayed, HALF * (abs(size) if math.isfinite(size) else least) / 5, by_norm)
    cause, reasons = _cause(data, replayed, size, shown, other, by_norm)
    has_spike = cause not in ("hardware", "none")
    changed = changes_before(data, batch, replayed, attempt) if attempt else []
    if changed and cause in ("state", "data and state", "hardware"):
        cause, reasons = "settings", (*reasons, *(blamed(one, step.step) for one in changed))
    logged_value, replay_value = (step.grad_norm, own.grad_norm) if by_norm else (step.loss, own.loss)
    what = "gradient norm" if by_norm else "loss"
    usual = usual_norm if by_norm else usual_loss
    first = f"{what} {logged_value:.4g} in the log, {replay_value:.4g} in the replay, {usual:.4g} in the steps before"
    if 0 < departs < step.step and cause not in ("none", "unknown"):
        text = f"log and replay differ from step {departs} on: the weights of the replay are not those of the run"
        reasons = (*reasons, text)
    return SpikeVerdict(
        cause=cause,
        measure=what,
        usual_loss=usual_loss,
        usual_grad_norm=usual_norm,
        departs=departs,
        has_spike=has_spike,
        reasons=(first, *reasons),
        advice=tuple(_advice(cause, data, batch, replayed, changed)),
    )


def _cause(
    data: RunData, replayed: ReplayedSpike, size: float, again: float, other: float, by_norm: bool
) -> tuple[SpikeCause, tuple[str, ...]]:
    """Return the cause and the reasons for it. size: of the spike in the log. again: in the replay. other: of another
    batch on the same weights."""
    if math.isnan(size):
        return "unknown", ("the log has no healthy steps before it, or no values of the step",)
    least = _LEAST_NORM if by_norm else _least_loss(data)
    if size < least:
        return "none", ("the step is no spike: its values are near those of the steps before",)
    if not again >= (HALF * size if math.isfinite(size) else least):
        return "hardware", ("the same batch on the same weights has no spike in the replay",)
    if math.isnan(other):
        return "unknown", ("the replay shows it again, and there is no other batch to compare with",)
    if other >= HALF * again:
        return "state", (f"the batch of step {replayed.other_step} has a spike on these weights, too",)
    reason = f"the batch of step {replayed.other_step} has none on the same weights"
    early = _or_infinite(replayed.early_loss) - replayed.early_other_loss
    if by_norm or not replayed.steps:
        return "data", (reason,)
    if not replayed.checkpoint:  # to these weights, all batches are alike
        untrained = "whether older weights have it too is not known: there is no checkpoint before it, and the first "
        return "data", (reason, f"{untrained}weights are untrained")
    when = f"on the weights of step {replayed.checkpoint}"
    above = _or_infinite(replayed.own.loss) - replayed.other_loss
    if early >= (HALF * above if math.isfinite(above) else least):
        by = f"by {early:.3g} nats" if math.isfinite(early) else "and is not finite"
        return "data", (reason, f"{when} its loss is above that of the other batch, too, {by}")
    return "data and state", (reason, f"{when} its loss is that of the other batch ({early:+.3g} nats)")


def _least_loss(data: RunData) -> float:
    """Return the size of a spike of the loss that the guard would find in a calm run, in nats."""
    assert data.run is not None
    return data.run.guard.sigmas * data.run.guard.loss_spread


def _ratio(value: float, usual: float) -> float:
    """Return the logarithm of a ratio; infinite for a value that is not finite, NaN if one is unknown or 0."""
    if math.isinf(value):
        return math.inf
    return math.log(value / usual) if value > 0 and usual > 0 else math.nan


def _or_infinite(value: float) -> float:
    """Return a value that was computed; infinity for NaN."""
    return math.inf if math.isnan(value) else value


def _departs(data: RunData, replayed: ReplayedSpike, least: float, by_norm: bool) -> int:
    """Return the first replayed step whose value differs from that of the log by `least` or more; 0 without one."""
    for one in (*replayed.steps, replayed.own):
        if (event := data.steps.get(one.step)) is None:
            continue
        difference = _ratio(event["grad_norm"], one.grad_norm) if by_norm else event["loss"] - one.loss
        if abs(difference) >= least or math.isnan(difference):
            return one.step
    return 0


def _advice(
    cause: SpikeCause,
    data: RunData,
    batch: SpikeBatch,
    replayed: ReplayedSpike,
    changed: Sequence[ChangedSetting],
) -> list[str]:
    assert data.run is not None
    root, step = data.folder.root, batch.step
    lower = f"lower the learning rate (optim.lr, now {data.run.optim.lr:.2g}), or optim.clip_norm"
    skipped = "the guard skipped its update, so it harmed no weights" if step.skipped else ""
    if not skipped and replayed.other_loss_after < replayed.other_loss + _least_loss(data):
        skipped = f"its update was made, and the loss of the batch of step {replayed.other_step} did not rise after it"
    harmed = f"its update was made and harmed the weights: go back to a checkpoint before step {step.step}"
    found = [skipped or (harmed if replayed.other_step else "")]
    if cause in ("data", "data and state"):
        found.append(
            "look at the documents with the most excess loss; --quarantine lists suspects, and ingot data purge "
            "removes them"
        )
    if cause in ("state", "data and state"):
        found.append(lower)
    if cause == "state":
        found.append(
            f"go back to a checkpoint before the loss rose (ingot ckpt ls {root}): ingot ckpt rewind {root} --to STEP"
        )
    if cause == "settings":
        found += way_back(root, changed, replayed.checkpoint)
    if cause == "hardware":
        undone = f"nothing to undo: the run went back, and trained the step again with a loss of {step.later_loss:.4g}"
        found = [
            "" if math.isnan(step.later_loss) else undone,
            "check the machines: ingot doctor --bench on each, ingot doctor DIR --nodes N for all",
            f"prove the layout: ingot check {root} --proof; without a fault of it, continue: ingot train {root}",
            "" if data.run.guard.hash_every else "set guard.hash_every: hashes name the rank of a wrong bit",
        ]
    return [one for one in found if one] if cause not in ("none", "unknown") else []


def document_losses(parts: Sequence[DocumentPart], replayed: ReplayedSpike) -> list[DocumentLoss]:
    """Return the loss of each document of the batch, those with the largest share of the excess first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    sources: dict[str, str] = {}
    for part, nats in _nats_of(parts, replayed.nats):
        own = sums[part.document]
        own[0] += float(nats.sum(dtype=np.float64))
        own[1] += len(nats)
        sources[part.document] = part.shard.source
    above = {one: max(total - count * replayed.other_loss, 0.0) for one, (total, count) in sums.items()}
    whole = sum(above.values())
    found = [
        DocumentLoss(
            document=one,
            source=sources[one],
            tokens=int(count),
            loss=total / count,
            excess=above[one] / whole if whole > 0 else math.nan,
        )
        for one, (total, count) in sums.items()
        if count
    ]
    return sorted(found, key=lambda one: (-(one.excess if one.excess == one.excess else 0.0), -one.loss, one.document))


def source_losses(
    parts: Sequence[DocumentPart], other_parts: Sequence[DocumentPart], replayed: ReplayedSpike
) -> list[ReplayedSource]:
    """Return the loss of each source in the batch and in the other one, in the order of names."""
    own = _by_source(parts, replayed.nats)
    other = _by_source(other_parts, replayed.other_nats) if replayed.other_nats is not None else {}
    missing = (math.nan, 0)
    return [
        ReplayedSource(
            source=name,
            tokens=own.get(name, missing)[1],
            loss=own.get(name, missing)[0],
            other=other.get(name, missing)[0],
        )
        for name in sorted({*own, *other})
    ]


def _by_source(parts: Sequence[DocumentPart], nats: np.ndarray) -> dict[str, tuple[float, int]]:
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    for part, own in _nats_of(parts, nats):
        found[part.shard.source].append(own)
    joined = {name: np.concatenate(own) for name, own in found.items()}
    return {name: (float(own.mean(dtype=np.float64)), len(own)) for name, own in joined.items() if len(own)}


def _nats_of(parts: Sequence[DocumentPart], nats: np.ndarray) -> list[tuple[DocumentPart, np.ndarray]]:
    """Return each part with the losses of its tokens. parts: those of a batch, in its order. nats: [samples, T]; the
    first token of a sample is an input only."""
    found, at, sample = [], 0, -1
    for part in parts:
        if part.sample != sample:
            at, sample = 0, part.sample
        found.append((part, nats[sample, max(at - 1, 0) : max(at + part.tokens - 1, 0)]))
        at += part.tokens
    return found
