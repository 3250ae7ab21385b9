"""A shuffle of n windows in O(1) memory: a bijection, computed only at the requested positions.

Two levels keep reads near each other. Blocks of consecutive windows are permuted; then the windows within each group of
GROUP_BLOCKS consecutive permuted blocks are permuted. Any range of samples therefore comes from a few blocks, each a
sequential read, and any two windows of a group may become neighbors.
"""

import numpy as np

from ingot.rng import derive

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
        """Return all windows of one group in shuffled order: the second level, applied to blocks of the first level."""
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
