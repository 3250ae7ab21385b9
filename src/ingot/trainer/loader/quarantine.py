"""The windows that training leaves out, because their tokens are damaged or listed, and the windows in their places.

A window is replaced by another one of its source, which a function of the run's seed and the number of the sample
chooses: so the mixture stays as it is, and the order is a function of seed, token manifest and record
(schema/quarantine_record.py), on any number of ranks. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from ingot.errors import DataError
from ingot.rng import derive
from ingot.schema.quarantine_record import Quarantined
from ingot.schema.tokens import TokenManifest
from ingot.trainer.loader.reader import Windows

LIMIT = "E-QUARANTINE-LIMIT"
LISTED = "E-DOCUMENT-LISTED"  # the code of a record of a document that is on a list
_PURGE = "remove the listed documents from the tokens: ingot data purge DIR --quarantine LIST"
_COPY = (
    "copy the damaged shards again from their origin, and delete quarantine.json of the run folder if there is no "
    "checkpoint yet; ingot data verify DIR finds all damage"
)


def touched(windows: Windows, shard: int, begin: int, end: int) -> range:
    """Return the ids of the windows of a shard, by its index in the manifest, that have a token of begin..end-1.

    A window has seq_len inputs and the last target, so the token at a border belongs to two windows.
    """
    length, here = windows.seq_len, int(windows.counts[shard])
    first, last = max(-(-begin // length) - 1, 0), min((end - 1) // length, here - 1)
    before = int(windows.ends[shard]) - here
    return range(before + first, before + max(last + 1, first))


@dataclass(frozen=True)
class _Spans:
    """Windows that samples from `sample` on do not use: firsts[i]..lasts[i]-1, sorted, without overlap; int64."""

    sample: int
    firsts: np.ndarray
    lasts: np.ndarray

    @classmethod
    def of(cls, sample: int, spans: Sequence[range]) -> "_Spans":
        """Return `spans`, each of one shard, without their overlaps."""
        merged: list[range] = []
        for span in sorted(spans, key=lambda one: one.start):
            if merged and span.start < merged[-1].stop:
                merged[-1] = range(merged[-1].start, max(merged[-1].stop, span.stop))
            else:
                merged.append(span)
        return cls(sample, np.array([one.start for one in merged]), np.array([one.stop for one in merged]))

    def have(self, ids: np.ndarray) -> np.ndarray:
        """Return whether each of the windows `ids` is one of them: bool, [n]."""
        at = np.searchsorted(self.firsts, ids, side="right") - 1
        return (at >= 0) & (ids < self.lasts[at])


class QuarantinedWindows:
    """The windows that records leave out, for the samples of a run. Memory is O(shards + records).

    key: of the order of samples. records: (the first sample that a record holds for, the record). Those of shards that
    the manifest lacks have no effect: the tokens of the run changed. Raises DataError if a source has no window left.
    """

    def __init__(self, manifest: TokenManifest, windows: Windows, key: int, records: Sequence[tuple[int, Quarantined]]):
        self._manifest, self._windows, self._key = manifest, windows, derive(key, "replacement")
        index = {(shard.name, shard.blocks_sha256): number for number, shard in enumerate(manifest.shards)}
        by_sample: dict[int, list[range]] = {}
        codes: dict[str, set[str]] = {}
        for sample, one in records:
            number = index.get((one.shard, one.blocks_sha256))
            if number is not None and (own := touched(windows, number, one.begin, one.end)):
                by_sample.setdefault(sample, []).append(own)
                codes.setdefault(manifest.shards[number].source, set()).add(one.code)
        self._spans = [_Spans.of(sample, own) for sample, own in by_sample.items()]
        self._shard_of_source: dict[str, np.ndarray] = {}
        for source, (out, among) in self.shares().items():
            if out == among:
                fixes = {_PURGE: LISTED in codes[source], _COPY: codes[source] != {LISTED}}
                raise DataError(
                    LIMIT,
                    f"all {among:,} windows of source {source!r} are in quarantine",
                    rule="a window is replaced by another one of its source, so one has to be left",
                    fix="; ".join(text for text, holds in fixes.items() if holds),
                    source=source,
                    windows=among,
                )

    def __bool__(self) -> bool:
        return bool(self._spans)

    def shares(self) -> dict[str, tuple[int, int]]:
        """Return, for each source with windows in quarantine, their number and that of all its windows."""
        found: dict[str, int] = {}
        every = _Spans.of(0, [range(*span) for one in self._spans for span in zip(one.firsts, one.lasts, strict=True)])
        for first, last in zip(every.firsts.tolist(), every.lasts.tolist(), strict=True):
            source = self._source(first)
            found[source] = found.get(source, 0) + last - first
        return {source: (out, int(self._of_source(source)[-1])) for source, out in found.items()}

    def replaced(self, first: int, ids: np.ndarray) -> np.ndarray:
        """Return whether each of the windows `ids`, those of the samples from `first` on, is left out: bool, [n]."""
        samples, out = np.arange(first, first + len(ids)), np.zeros(len(ids), bool)
        for spans in self._spans:
            out |= spans.have(ids) & (samples >= spans.sample)
        return out

    def apply(self, first: int, ids: np.ndarray) -> np.ndarray:
        """Return `ids`, the windows of the samples from `first` on, with others in the places of those left out."""
        if not self._spans or not (places := np.flatnonzero(self.replaced(first, ids))).size:
            return ids
        ids = ids.copy()
        for at in places.tolist():
            ids[at] = self._replacement(first + at, int(ids[at]))
        return ids

    def _replacement(self, sample: int, window: int) -> int:
        """Return the window in the place of `window`: the first of a row of random windows of its source that is not
        left out."""
        ends = self._of_source(self._source(window))
        for attempt in count():
            number = derive(self._key, sample, attempt) % int(ends[-1])
            shard = int(np.searchsorted(ends, number, side="right"))
            found = number - int(ends[shard]) + int(self._windows.ends[shard])
            if not self.replaced(sample, np.array([found]))[0]:
                return found
        raise AssertionError("count() has no end")

    def _source(self, window: int) -> str:
        return self._manifest.shards[int(np.searchsorted(self._windows.ends, window, side="right"))].source

    def _of_source(self, source: str) -> np.ndarray:
        """Return the running sum of the windows of a source over the shards, int64."""
        if source not in self._shard_of_source:
            own = [shard.source == source for shard in self._manifest.shards]
            self._shard_of_source[source] = np.cumsum(np.where(own, self._windows.counts, 0))
        return self._shard_of_source[source]


def require_few(left_out: QuarantinedWindows, most: float, found: str, fix: str) -> None:
    """Raise DataError if more than the share `most` of the windows of a source is left out. found: the last cause."""
    for source, (out, among) in left_out.shares().items():
        if out > most * among:
            raise DataError(
                LIMIT,
                f"{out:,} of the {among:,} windows of source {source!r} would be in quarantine. {found}",
                rule=f"at most data.max_quarantined = {most:g} of the windows of a source are replaced by others of it",
                fix=f"{fix}, or raise data.max_quarantined; then run the same command again: it continues",
                source=source,
                windows=out,
                of=among,
            )
