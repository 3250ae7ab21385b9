"""Changes of the data at a step: accepted changes of tokens or mixture, a new epoch, other shares of the sources."""

from collections import Counter
from collections.abc import Iterator, Sequence

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
