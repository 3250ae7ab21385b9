"""Changes of the data at a step: accepted changes of tokens or mixture, a new epoch, other shares of the sources."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.report.lineage.exposure import RunTokens
from ingot.report.lineage.trace import DocumentPart
from ingot.trainer.loader.order import Order


def changes_at(tokens: RunTokens, order: Order, step: int) -> Iterator[str]:
    """Yield, in words, what changed in the data at `step`, or in the `guard.level` steps before it: the guard compares
    a step with those, so the level of another text is a spike until they are all of it."""
    batch, level = tokens.config.train.global_batch, tokens.config.guard.level
    for record in tokens.records:
        if 1 <= step - record.step <= level:
            for setting, (before, after) in record.changes.items():
                if setting.startswith(("data", "tokens", "train.seq_len", "train.global_batch")):
                    yield f"{setting} changed from {_short(before)} to {_short(after)} at step {record.step + 1}"
    first = max(step - level, 0)
    begun, done = order.epochs(first * batch), order.epochs(step * batch)
    for source, epochs in sorted(done.items()):
        if (whole := int(epochs)) > int(begun.get(source, 0.0)) and whole >= 1:
            at = next(own for own in range(first + 1, step + 1) if int(order.epochs(own * batch)[source]) >= whole)
            yield f"epoch {whole + 1} of source {source} began at step {at}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def shares_of_sources(own: Sequence[DocumentPart], healthy: Sequence[DocumentPart]) -> dict[str, tuple[float, float]]:
    """Return source -> its share of the tokens of a batch, and of healthy ones."""
    counts = [Counter[str](), Counter[str]()]
    for counter, parts in zip(counts, (own, healthy), strict=True):
        for part in parts:
            counter[part.shard.source] += part.tokens
    totals = [max(counter.total(), 1) for counter in counts]
    names = sorted({*counts[0], *counts[1]})
    return {name: (counts[0][name] / totals[0], counts[1][name] / totals[1]) for name in names}


# A change of a source's share is no chance if it has so many deviations (16 places and all sources are looked at), and
# it counts from this size on.
_SIGMAS, _LEAST_SHARE = 7.0, 0.1


@dataclass(frozen=True, kw_only=True)
class SourceChange:
    """A change of the mixture of sources. step: the first one with the new mixture. source: the one whose share changed
    most. before, after: its share of the samples."""

    step: int
    source: str
    before: float
    after: float


def source_change(tokens: RunTokens, order: Order, step: int) -> SourceChange | None:
    """Return the change of the mixture of sources at `step`, or in the `guard.level` - 1 steps before it; None if the
    samples have no more than chance explains."""
    batch, level = tokens.config.train.global_batch, tokens.config.guard.level
    names = tokens.manifest.sources
    begin = max(step - 2 * level, 0)  # steps before the first one that is looked at
    if len(names) < 2 or step - begin < 2:
        return None
    of_shard = np.array([names.index(shard.source) for shard in tokens.manifest.shards])
    ids = np.concatenate([order.step(one, batch) for one in range(begin + 1, step + 1)])
    sources = of_shard[order.locate(ids)[0]]
    counts = np.stack([np.bincount(own, minlength=len(names)) for own in sources.reshape(-1, batch)])
    found, most = None, _SIGMAS
    for first in range(max(step - level + 1, begin + 2), step + 1):
        old, new = counts[: first - begin - 1].sum(0), counts[first - begin - 1 :].sum(0)
        before, after, pooled = old / old.sum(), new / new.sum(), (old + new) / (old.sum() + new.sum())
        deviation = np.sqrt(pooled * (1 - pooled) * (1 / old.sum() + 1 / new.sum()))
        sigmas = np.abs(after - before) / np.maximum(deviation, 1e-12)
        sigmas[np.abs(after - before) < _LEAST_SHARE] = 0.0
        which = int(sigmas.argmax())
        if sigmas[which] > most:
            most = float(sigmas[which])
            found = SourceChange(
                step=first, source=names[which], before=float(before[which]), after=float(after[which])
            )
    return found
