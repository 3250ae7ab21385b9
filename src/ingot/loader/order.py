"""Which samples a step trains on: a pure function of (seed, token manifest, step), on any number of ranks.

Without weights all windows are one stream, shuffled anew every epoch. With weights every source is a stream of its
own, and each cycle of 4,096 samples holds exactly its quota of every source.
"""

import difflib
from collections.abc import Mapping

import numpy as np

from ingot.errors import ConfigError, DataError
from ingot.loader.shuffle import Shuffle, permuted_range
from ingot.loader.windows import Windows
from ingot.rng import derive
from ingot.schema.tokens import TokenManifest

CYCLE = 4096  # samples in which the quotas of weighted sources are exact


class Order:
    """The order of samples over one token folder. Memory is O(shards). Not for several threads.

    weights: source -> share of the samples; a source that is not named is not used.
    Raises DataError when no shard is long enough for a window, ConfigError when weights do not fit the sources.
    """

    def __init__(self, manifest: TokenManifest, seq_len: int, seed: int, weights: Mapping[str, float] | None = None):
        self.manifest, self.windows = manifest, Windows(manifest, seq_len)
        key = derive(seed, "order", manifest.fingerprint(), seq_len)
        self._cycle_key = derive(key, "cycle")
        self._cycle_at, self._cycle_labels = -1, np.empty(0, np.int64)
        names = sorted(weights) if weights else [""]
        self._quotas = _quotas(names, weights, manifest) if weights else np.array([CYCLE])
        self._streams = [_Stream(self, name, seq_len, derive(key, "source", name)) for name in names]

    @property
    def epoch_windows(self) -> int:
        """Windows in one pass over all shards."""
        return self.windows.count

    def samples(self, first: int, count: int) -> np.ndarray:
        """Window ids (int64) of the samples first..first+count-1, counted from 0 over the whole run."""
        if len(self._streams) == 1:
            return self._streams[0].take(first, first + count)
        out = np.empty(count, np.int64)
        done = 0
        while done < count:
            cycle, offset = divmod(first + done, CYCLE)
            labels = self._labels(cycle)
            here = labels[offset : offset + count - done]
            for number, stream in enumerate(self._streams):
                before = cycle * int(self._quotas[number]) + int(np.count_nonzero(labels[:offset] == number))
                mine = here == number
                out[done : done + len(here)][mine] = stream.take(before, before + int(np.count_nonzero(mine)))
            done += len(here)
        return out

    def step(self, step: int, global_batch: int) -> np.ndarray:
        """Window ids (int64 [global_batch]) of optimizer step `step`, counted from 1."""
        return self.samples((step - 1) * global_batch, global_batch)

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index of the shard in the manifest, first token in it) per window id, both int64."""
        return self.windows.locate(ids)

    def epochs(self, samples: int) -> dict[str, float]:
        """How often `samples` samples pass over each source: what a run repeats, or does not reach."""
        if len(self._streams) == 1 and not self._streams[0].name:
            return dict.fromkeys(self.manifest.sources, samples / self.epoch_windows)
        return {
            stream.name: samples * int(quota) / CYCLE / stream.windows
            for stream, quota in zip(self._streams, self._quotas, strict=True)
        }

    def _labels(self, cycle: int) -> np.ndarray:
        """Which source each sample of a cycle is from: the quotas, shuffled."""
        if self._cycle_at != cycle:
            labels = np.repeat(np.arange(len(self._quotas)), self._quotas)
            self._cycle_labels = labels[permuted_range(CYCLE, derive(self._cycle_key, cycle))]
            self._cycle_at = cycle
        return self._cycle_labels


class _Stream:
    """The windows of one source ("" for all), shuffled."""

    def __init__(self, order: Order, name: str, seq_len: int, key: int):
        self.name = name
        of_source = [not name or shard.source == name for shard in order.manifest.shards]
        counts = np.where(of_source, order.windows.counts, 0)
        self._ends = np.cumsum(counts)
        self._shift = (order.windows.ends - order.windows.counts) - (
            self._ends - counts
        )  # source's window number -> window id
        self.windows = int(self._ends[-1])
        if not self.windows:
            raise DataError(
                f"source {name!r} holds no {seq_len + 1:,} consecutive tokens",
                rule="a source with a weight gives at least one sample",
                fix=f"use a shorter train.seq_len, give more data for it, or take {name!r} out of data.weights",
            )
        self._shuffle = Shuffle(self.windows, seq_len, key)

    def take(self, first: int, last: int) -> np.ndarray:
        windows = self._shuffle.take(first, last)
        return windows + self._shift[np.searchsorted(self._ends, windows, side="right")]


def _quotas(names: list[str], weights: Mapping[str, float], manifest: TokenManifest) -> np.ndarray:
    """Samples per cycle of each source, int64 that add up to CYCLE: largest remainders (Hamilton's method)."""
    for name in names:
        if name not in manifest.sources:
            close = difflib.get_close_matches(name, manifest.sources, n=1)
            raise ConfigError(
                f"data.weights names the source {name!r}, which the tokens do not have",
                rule=f"sources here: {', '.join(manifest.sources)}",
                fix=f"did you mean {close[0]!r}?" if close else "take it out of data.weights",
            )
    values = np.array([weights[name] for name in names], np.float64)
    if not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(f"data.weights = {dict(weights)}", rule="weights are positive shares")
    shares = values / values.sum() * CYCLE
    quotas = np.floor(shares).astype(np.int64)
    quotas[np.argsort(quotas - shares, kind="stable")[: CYCLE - int(quotas.sum())]] += 1
    if (too_small := shares < 1).any():
        name = names[int(np.argmax(too_small))]
        raise ConfigError(
            f"data.weights gives {name!r} a share of {weights[name] / values.sum():.6f}",
            rule=f"a source has at least one sample in {CYCLE:,}",
            fix="raise its weight, or take it out",
        )
    return quotas
