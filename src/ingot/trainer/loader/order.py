"""Which samples a step trains on: a pure function of (seed, token manifest, step), on any number of ranks.

Without weights all windows are one stream, shuffled anew every epoch. With weights every source is a stream of its
own, and each cycle of 4,096 samples holds exactly its quota of every source. When the weights of a run change, every
source's stream goes on where the mixture before left it: nothing of an epoch is skipped or comes twice.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.errors import ConfigError, DataError
from ingot.rng import derive
from ingot.schema.tokens import TokenManifest
from ingot.trainer.loader.shuffle import Shuffle, permuted_range
from ingot.trainer.loader.windows import Windows

CYCLE = 4096  # samples in which the quotas of weighted sources are exact
_ALL = ""  # the stream over all windows, which is used without weights


class Order:
    """The order of samples over one token folder. Memory is O(shards). Not for several threads.

    weights: source -> share of the samples; a source that is not named is not used. earlier: what the weights were
    before, as (samples up to which they held, weights), oldest first; samples are counted from 0 over the whole run.
    Between weights and none at all the streams are others, so there an epoch starts anew. Sources of earlier weights
    that are not there any more are left out: the run went over to other tokens as well.
    Raises DataError when no shard is long enough for a window, ConfigError when weights do not fit the sources.
    """

    def __init__(
        self,
        manifest: TokenManifest,
        seq_len: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
        *,
        earlier: Sequence[tuple[int, Mapping[str, float]]] = (),
    ):
        self.manifest, self.windows = manifest, Windows(manifest, seq_len)
        key = derive(seed, "order", manifest.fingerprint(), seq_len)
        self._cycle_key = derive(key, "cycle")
        self._cycle_at, self._cycle_labels = (-1, -1), np.empty(0, np.int64)
        self._streams: dict[str, _Stream] = {}
        self._mixes: list[_Mix] = []
        begin = 0
        for end, own in (*((end, self._known(own)) for end, own in earlier), (None, weights or {})):
            if own is None or (end is not None and end <= begin):
                continue  # nothing of it is there, or it never held
            self._mixes.append(mix := self._mix(begin, end, own))
            for name in mix.names:
                if name not in self._streams:
                    self._streams[name] = _Stream(self, name, seq_len, derive(key, "source", name))
            begin = end or 0

    @property
    def epoch_windows(self) -> int:
        """Windows in one pass over all shards."""
        return self.windows.count

    def samples(self, first: int, count: int) -> np.ndarray:
        """Window ids (int64) of the samples first..first+count-1, counted from 0 over the whole run."""
        out = np.empty(count, np.int64)
        done = 0
        while done < count:
            mix = self._mix_at(first + done)
            stop = count if mix.end is None else min(count, mix.end - first)
            out[done:stop] = self._of_mix(mix, first + done - mix.begin, stop - done)
            done = stop
        return out

    def step(self, step: int, global_batch: int) -> np.ndarray:
        """Window ids (int64 [global_batch]) of optimizer step `step`, counted from 1."""
        return self.samples((step - 1) * global_batch, global_batch)

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index of the shard in the manifest, first token in it) per window id, both int64."""
        return self.windows.locate(ids)

    def epochs(self, samples: int) -> dict[str, float]:
        """How often `samples` samples pass over each source: what a run repeats, or does not reach."""
        mix = self._mix_at(samples)
        now = {name: (samples - mix.begin) * int(q) / CYCLE for name, q in zip(mix.names, mix.quotas, strict=True)}
        found: dict[str, float] = {}
        for name in {**mix.taken, **now}:
            epochs = (mix.taken.get(name, 0) + now.get(name, 0)) / self._streams[name].windows
            for source in self.manifest.sources if name == _ALL else [name]:
                found[source] = found.get(source, 0.0) + epochs
        return found

    def _known(self, weights: Mapping[str, float]) -> Mapping[str, float] | None:
        """Without sources that these tokens do not have; None if that leaves none."""
        known = {name: weight for name, weight in weights.items() if name in self.manifest.sources}
        return known if known or not weights else None

    def _mix(self, begin: int, end: int | None, weights: Mapping[str, float]) -> "_Mix":
        names = sorted(weights) or [_ALL]
        quotas = _quotas(names, weights, self.manifest) if weights else np.array([CYCLE])
        taken = self._taken(self._mixes[-1], begin - self._mixes[-1].begin) if self._mixes else {}
        return _Mix(len(self._mixes), begin, end, tuple(names), quotas, taken)

    def _mix_at(self, sample: int) -> "_Mix":
        return next(mix for mix in self._mixes if mix.end is None or sample < mix.end)

    def _taken(self, mix: "_Mix", samples: int) -> dict[str, int]:
        """How many windows each stream has given, in all mixes, once `samples` samples of `mix` are done."""
        cycles, rest = divmod(samples, CYCLE)
        labels = self._labels(mix, cycles)[:rest] if rest else np.empty(0, np.int64)
        now = cycles * mix.quotas + np.bincount(labels, minlength=len(mix.names))
        return mix.taken | {n: mix.taken.get(n, 0) + int(k) for n, k in zip(mix.names, now, strict=True)}

    def _of_mix(self, mix: "_Mix", first: int, count: int) -> np.ndarray:
        """Window ids of samples first..first+count-1 of a mix, counted from its begin."""
        starts = [mix.taken.get(name, 0) for name in mix.names]
        if len(mix.names) == 1:
            return self._streams[mix.names[0]].take(starts[0] + first, starts[0] + first + count)
        out = np.empty(count, np.int64)
        done = 0
        while done < count:
            cycle, offset = divmod(first + done, CYCLE)
            labels = self._labels(mix, cycle)
            here = labels[offset : offset + count - done]
            for number, name in enumerate(mix.names):
                before = starts[number] + cycle * int(mix.quotas[number])
                before += int(np.count_nonzero(labels[:offset] == number))
                mine = here == number
                taken = self._streams[name].take(before, before + int(np.count_nonzero(mine)))
                out[done : done + len(here)][mine] = taken
            done += len(here)
        return out

    def _labels(self, mix: "_Mix", cycle: int) -> np.ndarray:
        """Which source each sample of a cycle is from: the quotas, shuffled. Of the first mix as without any other."""
        if self._cycle_at != (mix.number, cycle):
            labels = np.repeat(np.arange(len(mix.quotas)), mix.quotas)
            names = (cycle,) if not mix.begin else ("from", mix.begin, cycle)
            self._cycle_labels = labels[permuted_range(CYCLE, derive(self._cycle_key, *names))]
            self._cycle_at = (mix.number, cycle)
        return self._cycle_labels


@dataclass(frozen=True)
class _Mix:
    """Weights that hold for the samples begin..end-1 (None: for all that follow). taken: by streams before it."""

    number: int
    begin: int
    end: int | None
    names: tuple[str, ...]
    quotas: np.ndarray
    taken: dict[str, int]


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
