"""The order of samples: a pure function of (seed, token manifest, step), on any number of ranks.

A sample is a window of tokens (loader/reader.py). Without weights, all windows are one stream, shuffled again every
epoch. With weights, every source is a stream of its own, and each cycle of 4,096 samples contains exactly the quota of
every source. When the weights of a run change, every source's stream continues where the earlier mixture left it: no
window of an epoch is skipped or repeated.

The shuffle is a bijection, computed in O(1) memory and only at the requested positions. Two levels keep reads near each
other. Blocks of consecutive windows are permuted; then the windows within each group of GROUP_BLOCKS consecutive
permuted blocks are permuted. Any range of samples therefore comes from a few blocks, each a sequential read, and any
two windows of a group may become neighbors.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.errors import ConfigError, DataError
from ingot.rng import derive
from ingot.schema.accepted import AcceptedChanges
from ingot.schema.quarantine_record import Quarantined
from ingot.schema.tokens import TokenManifest
from ingot.trainer.loader.quarantine import QuarantinedWindows
from ingot.trainer.loader.reader import Windows

# -- shuffle --


BLOCK_TOKENS = 1 << 19  # a block of windows is about this long: 1 MiB of uint16, one sequential read
MAX_BLOCK_WINDOWS = 1024
GROUP_BLOCKS = 32  # blocks per group; with blocks of 2**19 tokens a group is 16.8M tokens
_ROUNDS = 6


def mix(values: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 (Steele et al. 2014): uint64 -> uint64, a pseudorandom bijection."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permuted_range(n: int, key: int) -> np.ndarray:
    """Return the numbers 0..n-1 in a pseudorandom order given by `key`, int64. O(n) memory: only for bounded n."""
    keys = mix(np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key))
    return np.argsort(keys, kind="stable")


def permute(positions: np.ndarray, n: int, key: int) -> np.ndarray:
    """Return the images of `positions` (int64, all below n) in a permutation of 0..n-1 given by `key`.

    A balanced Feistel network over the next even number of bits is a bijection for any round function (Luby & Rackoff
    1988). Results outside 0..n-1 pass through it again (cycle walking, Black & Rogaway 2002), still a bijection.
    """
    half = np.uint64(max((max(n - 1, 1).bit_length() + 1) // 2, 1))
    low = (np.uint64(1) << half) - np.uint64(1)
    round_keys = [np.uint64(derive(key, "feistel", r)) for r in range(_ROUNDS)]
    out = positions.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        left, right = out[walking] >> half, out[walking] & low
        for round_key in round_keys:
            left, right = right, left ^ (mix(right + round_key) & low)
        out[walking] = (left << half) | right
        walking = walking[out[walking] >= n]
    return out.astype(np.int64)


class Shuffle:
    """The windows 0..n-1 of one source, epoch after epoch, each epoch in a permutation of its own.

    Not thread-safe, because the last group is cached.
    """

    def __init__(self, windows: int, seq_len: int, key: int):
        self.windows = windows
        self.key = key
        self.block_windows = min(max(BLOCK_TOKENS // seq_len, 1), MAX_BLOCK_WINDOWS)
        self.group_windows = self.block_windows * GROUP_BLOCKS
        self._group_at: tuple[int, int] | None = None
        self._group_ids = np.empty(0, np.int64)

    def take(self, first: int, last: int) -> np.ndarray:
        """Return the windows of samples first..last-1 (int64); sample i is in epoch i // windows."""
        parts = [np.empty(0, np.int64)]
        while first < last:
            epoch, position = divmod(first, self.windows)
            group, offset = divmod(position, self.group_windows)
            ids = self._group(epoch, group)[offset : offset + last - first]
            parts.append(ids)
            first += len(ids)
        return np.concatenate(parts)

    def _group(self, epoch: int, group: int) -> np.ndarray:
        """Return all windows of one group in their final order.

        A group is GROUP_BLOCKS consecutive blocks of the permuted order; its windows are permuted together.
        """
        if self._group_at != (epoch, group):
            key = derive(self.key, "epoch", epoch)
            begin = group * self.group_windows
            size = min(self.group_windows, self.windows - begin)
            inside = permuted_range(size, derive(key, "group", group))
            self._group_ids = self._windows_at(begin + inside, key)
            self._group_at = (epoch, group)
        return self._group_ids

    def _windows_at(self, positions: np.ndarray, key: int) -> np.ndarray:
        """Return the window at each position after the first level, the permutation of blocks.

        The full blocks are permuted; the short last block is at a random place between them.
        """
        full, tail = divmod(self.windows, self.block_windows)
        tail_begin = derive(key, "tail") % (full + 1) * self.block_windows
        in_tail = (positions >= tail_begin) & (positions < tail_begin + tail)
        in_full = np.where(positions < tail_begin, positions, positions - tail)
        in_full[in_tail] = 0  # not used, but must be a legal position
        blocks, which = np.unique(in_full // self.block_windows, return_inverse=True)
        if full:
            blocks = permute(blocks, full, derive(key, "blocks"))
        windows = blocks[which] * self.block_windows + in_full % self.block_windows
        return np.where(in_tail, full * self.block_windows + positions - tail_begin, windows)


# -- order --


CYCLE = 4096  # the number of samples after which the quotas of weighted sources are exact
_ALL = ""  # the name of the stream over all windows, used without weights
KEY = "data.weights"
Weights = Mapping[str, float]


class Order:
    """The order of samples over one token folder. Memory is O(shards). Not thread-safe.

    weights: source -> share of the samples; other sources are not used. earlier: the earlier weights, oldest first, as
    (the run's number of samples when these weights ended, weights). A change between weights and no weights changes the
    streams, so an epoch starts again. Sources of earlier weights that the tokens lack are ignored: then the tokens of
    the run changed, too. quarantine: what is left out, as (the first sample that it holds for, the record); other
    windows are in its place (loader/quarantine.py).
    Raises DataError if no shard is long enough for a window, ConfigError if the weights do not fit the sources.
    """

    def __init__(
        self,
        manifest: TokenManifest,
        seq_len: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
        *,
        earlier: Sequence[tuple[int, Mapping[str, float]]] = (),
        quarantine: Sequence[tuple[int, Quarantined]] = (),
    ):
        self.manifest, self.windows = manifest, Windows(manifest, seq_len)
        key = derive(seed, "order", manifest.fingerprint(), seq_len)
        self.quarantine = QuarantinedWindows(manifest, self.windows, key, quarantine)
        self._cycle_key = derive(key, "cycle")
        self._cycle_at, self._cycle_labels = (-1, -1), np.empty(0, np.int64)
        self._streams: dict[str, _SourceWindows] = {}
        self._mixes: list[_Mix] = []
        begin = 0
        for end, own in (*((end, self._known(own)) for end, own in earlier), (None, weights or {})):
            if own is None or (end is not None and end <= begin):
                continue  # the tokens have none of the sources, or no sample was read with these weights
            self._mixes.append(mix := self._mix(begin, end, own))
            for name in mix.names:
                if name not in self._streams:
                    self._streams[name] = _SourceWindows(self, name, seq_len, derive(key, "source", name))
            begin = end or 0

    @property
    def epoch_windows(self) -> int:
        """The number of windows in one pass over all shards."""
        return self.windows.count

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return the window ids, int64 [count], of the run's samples first..first+count-1, counted from 0."""
        return self.quarantine.apply(first, self._whole(first, count))

    def replaced(self, step: int, global_batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the windows of `step` as they were without a quarantine, and which of them are replaced: int64 and
        bool, [global_batch]."""
        first = (step - 1) * global_batch
        ids = self._whole(first, global_batch)
        return ids, self.quarantine.replaced(first, ids)

    def _whole(self, first: int, count: int) -> np.ndarray:
        """Return the windows of the samples first..first+count-1, without a quarantine."""
        out = np.empty(count, np.int64)
        done = 0
        while done < count:
            mix = self._mix_at(first + done)
            stop = count if mix.end is None else min(count, mix.end - first)
            out[done:stop] = self._of_mix(mix, first + done - mix.begin, stop - done)
            done = stop
        return out

    def step(self, step: int, global_batch: int) -> np.ndarray:
        """Return the window ids (int64 [global_batch]) of optimizer step `step`, counted from 1."""
        return self.samples((step - 1) * global_batch, global_batch)

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, per window id, the index of its shard in the manifest and its first token in the shard, as int64."""
        return self.windows.locate(ids)

    def epochs(self, samples: int) -> dict[str, float]:
        """Return, for each source, how many times the first `samples` samples pass over it.

        A value below 1 means that part of the source has not been read.
        """
        mix = self._mix_at(samples)
        now = {name: (samples - mix.begin) * int(q) / CYCLE for name, q in zip(mix.names, mix.quotas, strict=True)}
        found: dict[str, float] = {}
        for name in {**mix.taken, **now}:
            epochs = (mix.taken.get(name, 0) + now.get(name, 0)) / self._streams[name].windows
            for source in self.manifest.sources if name == _ALL else [name]:
                found[source] = found.get(source, 0.0) + epochs
        return found

    def _known(self, weights: Mapping[str, float]) -> Mapping[str, float] | None:
        """Return `weights` without sources that the tokens lack; None if no source is left."""
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
        """Count the windows taken from each stream, in all mixes, after `samples` samples of `mix`."""
        cycles, rest = divmod(samples, CYCLE)
        labels = self._labels(mix, cycles)[:rest] if rest else np.empty(0, np.int64)
        now = cycles * mix.quotas + np.bincount(labels, minlength=len(mix.names))
        return mix.taken | {n: mix.taken.get(n, 0) + int(k) for n, k in zip(mix.names, now, strict=True)}

    def _of_mix(self, mix: "_Mix", first: int, count: int) -> np.ndarray:
        """Return the window ids of samples first..first+count-1 of `mix`, counted from its first sample."""
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
                own = here == number
                taken = self._streams[name].take(before, before + int(np.count_nonzero(own)))
                out[done : done + len(here)][own] = taken
            done += len(here)
        return out

    def _labels(self, mix: "_Mix", cycle: int) -> np.ndarray:
        """Return the source number of each sample of a cycle: the quotas, shuffled with a key of the mix and cycle."""
        if self._cycle_at != (mix.number, cycle):
            labels = np.repeat(np.arange(len(mix.quotas)), mix.quotas)
            names = (cycle,) if not mix.begin else ("from", mix.begin, cycle)
            self._cycle_labels = labels[permuted_range(CYCLE, derive(self._cycle_key, *names))]
            self._cycle_at = (mix.number, cycle)
        return self._cycle_labels


@dataclass(frozen=True)
class _Mix:
    """The mixture of samples begin..end-1 (end None: of all later samples). names: streams. quotas: samples per cycle.

    taken: the number of windows taken from each stream before `begin`.
    """

    number: int
    begin: int
    end: int | None
    names: tuple[str, ...]
    quotas: np.ndarray
    taken: dict[str, int]


class _SourceWindows:
    """The windows of one source ("" for all sources), shuffled."""

    def __init__(self, order: Order, name: str, seq_len: int, key: int):
        self.name = name
        of_source = [not name or shard.source == name for shard in order.manifest.shards]
        counts = np.where(of_source, order.windows.counts, 0)
        self._ends = np.cumsum(counts)
        # The difference of a window id and the window's number within the source, by shard.
        self._shift = (order.windows.ends - order.windows.counts) - (self._ends - counts)
        self.windows = int(self._ends[-1])
        if not self.windows:
            raise DataError(
                "E-TOKENS-TOO-FEW",
                f"no shard of source {name!r} has {seq_len + 1:,} tokens",
                rule="a source with a weight has at least one sample, which is seq_len + 1 tokens of one shard",
                fix=f"use a shorter train.seq_len, add data to the source, or remove {name!r} from data.weights",
                source=name,
                seq_len=seq_len,
            )
        self._shuffle = Shuffle(self.windows, seq_len, key)

    def take(self, first: int, last: int) -> np.ndarray:
        """Return the window ids of samples first..last-1 of this stream, int64."""
        windows = self._shuffle.take(first, last)
        return windows + self._shift[np.searchsorted(self._ends, windows, side="right")]


def _quotas(names: list[str], weights: Mapping[str, float], manifest: TokenManifest) -> np.ndarray:
    """Return the samples per cycle of each source, int64 with the sum CYCLE, by the largest remainder method."""
    for name in names:
        if name not in manifest.sources:
            close = difflib.get_close_matches(name, manifest.sources, n=1)
            raise ConfigError(
                "E-SOURCE-UNKNOWN",
                f"data.weights names the source {name!r}, which the tokens do not have",
                rule=f"the tokens have these sources: {', '.join(manifest.sources)}",
                fix=f"did you mean {close[0]!r}?" if close else "remove this source from data.weights",
                source=name,
                sources=list(manifest.sources),
                close=close,
            )
    values = np.array([weights[name] for name in names], np.float64)
    if not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(
            "E-WEIGHTS-VALUE",
            f"data.weights = {dict(weights)}",
            rule="weights are positive, finite numbers",
            fix="give every source a positive weight, or remove the source",
            weights=dict(weights),
        )
    shares = values / values.sum() * CYCLE
    quotas = np.floor(shares).astype(np.int64)
    quotas[np.argsort(quotas - shares, kind="stable")[: CYCLE - int(quotas.sum())]] += 1
    if (too_small := shares < 1).any():
        name = names[int(np.argmax(too_small))]
        raise ConfigError(
            "E-WEIGHT-TOO-SMALL",
            f"data.weights gives {name!r} a share of {weights[name] / values.sum():.6f}",
            rule=f"a source has at least one sample in {CYCLE:,}, a share of {1 / CYCLE:.6f}",
            fix="raise its weight, or remove the source",
            source=name,
            share=float(weights[name] / values.sum()),
        )
    return quotas


def quarantine_from(records: Sequence[Quarantined], global_batch: int) -> list[tuple[int, Quarantined]]:
    """Return `records` with the first sample that each holds for."""
    return [((one.step - 1) * global_batch, one) for one in records]


def earlier_weights(records: Sequence[AcceptedChanges], weights: Weights) -> list[tuple[int, dict[str, float]]]:
    """Return (last step, weights) of every mixture before `weights`, oldest first; empty if the weights never changed.

    records: the accepted changes of the run, oldest first. weights: the current weights, those of the run file.
    """
    return [(step, dict(own)) for step, own in earlier_values(records, KEY, dict(weights))]


def earlier_values(records: Sequence[AcceptedChanges], key: str, value: Any) -> list[tuple[int, Any]]:
    """Return (last step, value) of every value of setting `key` before `value`, which is current, oldest first.

    Not every recorded change was used in training: it may be undone or replaced before the next step. The search
    therefore goes backward from `value` over the records that led to it.
    """
    changes = [(one.step, *one.changes[key]) for one in records if key in one.changes]
    found: list[tuple[int, Any]] = []
    now, before_step = value, float("inf")
    for step, old, new in reversed(changes):
        if new == now and step < before_step:
            found.append((step, old))
            now, before_step = old, step
    return found[::-1]
