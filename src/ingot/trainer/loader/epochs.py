"""A count of the samples that a run consumed, by window: each window of an epoch once, none left out.

The count uses the ids alone, not the functions that made the order, so that a fault of the order is noticed as well. No
torch.
"""

from collections.abc import Mapping

import numpy as np

from ingot.errors import DataError
from ingot.schema.tokens import TokenManifest

_ALL = ""  # the stream of all windows, of which a run without weights consists


class EpochCount:
    """The number of times that each window of `seq_len` + 1 tokens was consumed.

    Without weights all windows are one stream, with weights each source is one. A stream that holds n windows starts an
    epoch with every n-th sample. Memory: 4 bytes per window, twice that if a run used both forms.
    """

    def __init__(self, manifest: TokenManifest, seq_len: int):
        counts = [max((shard.tokens - 1) // seq_len, 0) for shard in manifest.shards]
        self.ends = np.cumsum(np.array(counts, np.int64))
        self.windows = int(self.ends[-1]) if counts else 0
        self.sources = np.array([shard.source for shard in manifest.shards])
        self.sizes = {_ALL: self.windows}
        for name in manifest.sources:
            self.sizes[name] = sum(n for n, shard in zip(counts, manifest.shards, strict=True) if shard.source == name)
        self.taken: dict[str, int] = {}
        self._seen: dict[bool, np.ndarray] = {}  # with weights -> times that each window was consumed

    def epochs(self) -> dict[str, float]:
        """Return, for each stream, how many times it was passed over; the stream of all windows is named ""."""
        return {name: taken / self.sizes[name] for name, taken in self.taken.items()}

    def add(self, step: int, ids: np.ndarray, weights: Mapping[str, float]) -> None:
        """Count the samples `ids` of a step that used `weights`.

        If no window comes twice in an epoch of n windows, then n samples are all n windows. So a window is missing
        exactly if another one comes twice, which raises a DataError, as does a window that the streams do not have.
        """
        if (outside := np.flatnonzero((ids < 0) | (ids >= self.windows))).size:
            raise self._foreign(step, int(outside[0]), int(ids[outside[0]]), "does not exist")
        shards = np.searchsorted(self.ends, ids, side="right")
        names = self.sources[shards] if weights else np.full(len(ids), _ALL)
        for name in np.unique(names).tolist() if weights else ():
            if name not in weights:
                at = int(np.argmax(names == name))
                raise self._foreign(step, at, int(ids[at]), f"is of source {name!r}, which has no weight")
        seen = self._seen.setdefault(bool(weights), np.zeros(self.windows, np.uint32))
        for name in np.unique(names).tolist():
            self._add_stream(step, name, ids, np.flatnonzero(names == name), seen)

    def _add_stream(self, step: int, name: str, ids: np.ndarray, positions: np.ndarray, seen: np.ndarray) -> None:
        while len(positions):
            epoch, done = divmod(self.taken.get(name, 0), self.sizes[name])
            own, positions = np.split(positions, [self.sizes[name] - done])
            windows, first = np.unique(ids[own], return_index=True)
            twice = np.flatnonzero(seen[windows] != epoch)
            repeated = own[first[twice]] if twice.size else np.delete(own, first)
            if repeated.size:
                at = int(repeated.min())
                raise DataError(
                    "E-LEDGER-REPEAT",
                    f"step {step}: sample {at} is window {ids[at]}, which epoch {epoch + 1} had before",
                    rule="an epoch has each window exactly once, so a window that comes twice displaces another one",
                    fix="this is a bug in ingot: please report it with run.toml and the ledger folder of the run",
                    step=step,
                    sample=at,
                    found=int(ids[at]),
                    epoch=epoch + 1,
                )
            seen[windows] += 1
            self.taken[name] = self.taken.get(name, 0) + len(own)

    def _foreign(self, step: int, at: int, window: int, what: str) -> DataError:
        return DataError(
            "E-LEDGER-WINDOW",
            f"step {step}: sample {at} is window {window}, which {what}",
            rule=f"the tokens have the windows 0 to {self.windows - 1}, of which a run uses the sources with a weight",
            fix="use the tokens, train.seq_len and data.weights that the run was trained with",
            step=step,
            sample=at,
            found=window,
        )
