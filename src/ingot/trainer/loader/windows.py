"""Samples cut from token shards, by number: a window is seq_len + 1 tokens of one shard.

The first seq_len tokens are inputs, the same shifted by one are targets. Windows of a shard start seq_len apart, so
every token but a shard's first is a target exactly once (less than a window is left over at a shard's end). Window ids
count over the shards in the manifest's order.
"""

import numpy as np

from ingot.errors import ConfigError, DataError
from ingot.schema.tokens import TokenManifest


class Windows:
    """The windows of `seq_len` + 1 tokens of a token folder. Memory is O(shards).

    counts, ends: windows per shard and their running sum, int64. Raises DataError when there is no window at all.
    """

    def __init__(self, manifest: TokenManifest, seq_len: int):
        if seq_len < 1:
            raise ConfigError(f"seq_len = {seq_len}", rule="a sample has at least one token")
        self.seq_len = seq_len
        tokens = np.array([shard.tokens for shard in manifest.shards], np.int64)
        self.counts = np.maximum((tokens - 1) // seq_len, 0)
        self.ends = np.cumsum(self.counts)
        self.count = int(self.counts.sum())
        if not self.count:
            raise DataError(
                f"no shard holds {seq_len + 1:,} tokens (longest: {max(tokens.tolist(), default=0):,})",
                rule="a sample is seq_len + 1 consecutive tokens of one shard",
                fix="use a shorter train.seq_len, or more data",
            )

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index of the shard in the manifest, first token in that shard) per window id, both int64."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.count:
            raise DataError(
                f"window {ids.min() if ids.min() < 0 else ids.max()} does not exist",
                rule=f"these tokens hold {self.count:,} windows of {self.seq_len + 1} tokens",
                fix="the ids were made for other tokens or another seq_len",
            )
        shards = np.searchsorted(self.ends, ids, side="right")
        return shards, (ids - self.ends[shards] + self.counts[shards]) * self.seq_len
