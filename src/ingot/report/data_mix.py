"""The section of a report on the mix of the training data: the share of each source that the run asks for, and has."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.errors import IngotError
from ingot.report.facts import RunData
from ingot.report.lineage.exposure import RunTokens
from ingot.report.lineage.order_sections import OrderByStep
from ingot.report.render.page import Bar, Bars, Block, Section, Text
from ingot.schema.tokens import TokenManifest

_STEPS = 500  # whose samples are counted
_SHOWN = 30


@dataclass(frozen=True, kw_only=True)
class SourceMix:
    """A source of the training data. asked: its share of the samples by the run file, or by its size without weights.
    found: its share of the samples of counted steps. epochs: how often the run has passed over it."""

    source: str
    asked: float
    found: float
    epochs: float


def data_mix_section(data: RunData) -> Section | None:
    """Return the shares of all sources; None before the first step, for one source, and without the tokens."""
    shares, counted = source_shares(data.folder.root, data.valid_step)
    return Section("mix", "Data mix", mix_blocks(shares, counted, data.valid_step)) if len(shares) > 1 else None


def mix_blocks(shares: list[SourceMix], counted: int, last_step: int) -> list[Block]:
    """Return the shares as bars, the largest first. counted: the steps whose samples were counted."""
    which = "all steps" if counted == last_step else f"{counted:,} of {last_step:,} steps, evenly spread"
    shown = sorted(shares, key=lambda own: -own.found)[:_SHOWN]
    rows = [Bar(own.source, own.found, _cells(own)) for own in shown]
    words = f"Shares of the samples, counted in {which}, and what the run file asks for."
    if len(shares) > _SHOWN:
        words += f" The {_SHOWN} largest of {len(shares):,} sources."
    return [Text(words), Bars(("Source", "Trained on", "Asked for", "Difference", "Epochs"), rows)]


def _cells(own: SourceMix) -> tuple[str, ...]:
    return f"{own.found:.1%}", f"{own.asked:.1%}", f"{own.found - own.asked:+.1%}", f"{own.epochs:.2f}"


def source_shares(root: Path, last_step: int) -> tuple[list[SourceMix], int]:
    """Return the shares of the sources of the run folder `root` after `last_step` steps, and how many steps were
    counted; ([], 0) if the order of samples is not known."""
    with suppress(IngotError, OSError, ValueError, StopIteration):
        return _source_shares(root, last_step)
    return [], 0


def _source_shares(root: Path, last_step: int) -> tuple[list[SourceMix], int]:
    if last_step < 1:
        return [], 0
    tokens = RunTokens(root)
    orders = OrderByStep(tokens, max(last_step, tokens.config.train.steps))
    every = -(-last_step // _STEPS)
    steps, found = range(every, last_step + 1, every), Counter()
    order = batch = None
    for step in steps:
        section, order = orders.at(step)
        batch = section.global_batch
        shards, counts = np.unique(order.locate(order.step(step, batch))[0], return_counts=True)
        for shard, count in zip(shards.tolist(), counts.tolist(), strict=True):
            found[order.manifest.shards[shard].source] += count
    if order is None or batch is None:
        return [], 0
    weights = tokens.config.data.weights or _sizes(order.manifest)
    whole, total = sum(weights.values()), max(found.total(), 1)
    epochs = order.epochs(last_step * batch)
    names = sorted({*weights, *found})
    return [
        SourceMix(
            source=name,
            asked=weights.get(name, 0.0) / whole if whole else 0.0,
            found=found[name] / total,
            epochs=epochs.get(name, 0.0),
        )
        for name in names
    ], len(steps)


def _sizes(manifest: TokenManifest) -> dict[str, float]:
    sizes: Counter[str] = Counter()
    for shard in manifest.shards:
        sizes[shard.source] += shard.tokens
    return dict(sizes)
