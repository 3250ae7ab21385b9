"""Hashes of tensors by their bits, computed on the device of the tensors without waiting for it.

The bits of a tensor are read as integers x_i of at most 32 bits, and its hash is the sum of x_i * m_i modulo 2^64 with
odd multipliers m_i: a multilinear hash (Carter and Wegman 1981; Lemire and Kaser, arXiv 1202.4961). Sums of integers
modulo 2^64 have the same bits in any order, so a hash depends neither on the device nor on how it divides the work.

Any change of one element changes the hash: x_i changes by d with 0 < |d| < 2^32, and d * m_i is not a multiple of
2^64, because m_i is odd. So every flip of one bit is found. The multiplier of element i is a product w_j * v_c of two
words of a fixed pseudorandom sequence (i = 2^14 c + j). Taking these words as random odd numbers, any other change
keeps the hash with a probability of at most 65 * 2^(v - 63), v being the lowest changed bit of any element: 2^-56 if a
bit 0 is among them, 2^-25 in the worst case, where nothing but the highest bits of elements changed.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_ROW = 1 << 14  # elements that share a multiplier v
_AT_ONCE = {"cpu": 8 * _ROW, "cuda": 512 * _ROW}  # elements: the products fit into a cache, or fill a GPU
_WORDS = {8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # by the bytes of an element


class BitFlip(NamedTuple):
    """The only difference of two tensors: one bit. element: its index in the flat tensor. bit: 0 is the lowest."""

    element: int
    bit: int


def multipliers(first: int, count: int, stream: int = 0) -> np.ndarray:
    """Return `count` odd pseudorandom int64 words from number `first` of a sequence: SplitMix64, Steele et al. 2014."""
    x = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(stream) * np.uint64(0xD1342543DE82EF95)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64)


class _Plan(NamedTuple):
    """The hash of large tensors, row by row: small models have many that are little more than a row, where an operation
    for several costs as much as one for each.

    chunks: the rows that are multiplied at once, as (index of a tensor, first row, row after the last). multipliers,
    index: of each row in this order, int64. most_rows: of a chunk.
    """

    chunks: list[list[tuple[int, int, int]]]
    multipliers: Tensor
    index: Tensor
    most_rows: int


class TensorHasher:
    """Hashes a fixed list of tensors on the devices where they are.

    tensors: of any dtype whose elements have 1, 2, 4 or 8 bytes; the same objects in every call, with the same memory.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = list(tensors)
        self.device = next((t.device for t in self.tensors if t.device.type != "cpu"), torch.device("cpu"))
        self._words = [_bits(t) for t in self.tensors]  # views, but of those that are not contiguous
        self._copied = [i for i, t in enumerate(self.tensors) if not t.is_contiguous()]
        self._columns = {device: _on(multipliers(0, _ROW), device) for device in {t.device for t in self.tensors}}
        rows = max((-(-_words(t) // _ROW) for t in self.tensors), default=0)
        self._rows = {device: _on(multipliers(0, rows, stream=1), device) for device in self._columns}
        self._batches = list(_small_batches(self.tensors))
        inside = {i for batch in self._batches for i in batch}
        large = [i for i in range(len(self.tensors)) if i not in inside and self._words[i].numel()]
        self._plans = [self._plan([i for i in large if self.tensors[i].device == device]) for device in self._columns]
        self._segments = [self._segment(batch) for batch in self._batches]

    def _segment(self, batch: list[int]) -> tuple[Tensor, Tensor]:
        """Return the multiplier of each element of a batch of small tensors, and the index of its tensor."""
        device, sizes = self.tensors[batch[0]].device, [_words(self.tensors[i]) for i in batch]
        column, row = self._columns[device], self._rows[device][0]
        index = torch.repeat_interleave(torch.tensor(batch), torch.tensor(sizes)).to(device)
        return torch.cat([column[:size] * row for size in sizes]), index

    def _plan(self, large: list[int]) -> "_Plan | None":
        """Return how large tensors of one device are hashed; None for none."""
        if not large:
            return None
        device, counts = self.tensors[large[0]].device, [-(-self._words[i].numel() // _ROW) for i in large]
        most, chunks, open_rows = _AT_ONCE[device.type] // _ROW, list[list[tuple[int, int, int]]](), 0
        for i, rows in zip(large, counts, strict=True):
            at = 0
            while at < rows:
                if not open_rows:
                    chunks.append([])
                taken = min(rows - at, most - open_rows)
                chunks[-1].append((i, at, at + taken))
                at, open_rows = at + taken, (open_rows + taken) % most
        index = torch.repeat_interleave(torch.tensor(large), torch.tensor(counts)).to(device)
        return _Plan(chunks, torch.cat([self._rows[device][:rows] for rows in counts]), index, min(most, sum(counts)))

    @torch.no_grad()
    def hashes(self) -> Tensor:
        """Return the hash of each tensor, int64 [tensors]. The host does not wait for the device."""
        for i in self._copied:
            self._words[i] = _bits(self.tensors[i])
        by_device = {d: torch.zeros(len(self.tensors), dtype=torch.int64, device=d) for d in self._columns}
        for (device, found), plan in zip(by_device.items(), self._plans, strict=True):
            if plan is not None:
                found.index_add_(0, plan.index, self._sums_of_rows(plan, self._columns[device]).mul_(plan.multipliers))
        for batch, (multiplier, index) in zip(self._batches, self._segments, strict=True):
            words = torch.cat([self._words[i] for i in batch])
            by_device[words.device].index_add_(0, index, multiplier * words)
        total = torch.zeros(len(self.tensors), dtype=torch.int64, device=self.device)
        for found in by_device.values():
            total += found.to(self.device, non_blocking=True)
        return total

    def _sums_of_rows(self, plan: "_Plan", column: Tensor) -> Tensor:
        """Return, for each row of the tensors of a plan, the sum of its words times `column`: int64 [rows]."""
        sums = torch.empty_like(plan.multipliers)
        product = torch.empty(plan.most_rows, _ROW, dtype=torch.int64, device=column.device)
        flat, done = product.view(-1), 0
        for chunk in plan.chunks:
            begin = 0
            for i, first, last in chunk:
                words = self._words[i][first * _ROW : last * _ROW]
                end, begin = begin + words.numel(), begin + (last - first) * _ROW
                flat[end - words.numel() : end].copy_(words)
                if end < begin:  # the last row of a tensor that has no whole number of them
                    flat[end:begin].zero_()
            rows = begin // _ROW
            torch.sum(product[:rows].mul_(column), dim=1, out=sums[done : done + rows])
            done += rows
        return sums

    def locate(self, index: int, difference: int) -> BitFlip | None:
        """Return the one bit in which tensor `index` differs, as `locate` does."""
        return locate(self.tensors[index].numel(), self.tensors[index].itemsize, difference)


class BufferHasher:
    """Hashes tensors that are not known before, one by one, as TensorHasher does. device: of all of them."""

    def __init__(self, device: torch.device):
        self._device, self._column = device, _on(multipliers(0, _ROW), device)
        self._rows = _on(multipliers(0, 1, stream=1), device)

    @torch.no_grad()
    def hash(self, tensor: Tensor) -> Tensor:
        """Return the hash of a contiguous tensor, an int64 scalar on its device. The host does not wait for it."""
        words = _bits(tensor)
        if (rows := -(-words.numel() // _ROW)) > len(self._rows):
            self._rows = _on(multipliers(0, rows, stream=1), self._device)
        return _sum_of_products(words, self._column, self._rows)


def locate(elements: int, itemsize: int, difference: int) -> BitFlip | None:
    """Return the one bit in which a tensor differs if its hash differs by `difference` modulo 2^64; None if more than a
    bit differs. Reads no tensor, and takes about as long as 64 hashes of it."""
    bits, count_all, found = 8 * min(itemsize, 4), elements * max(itemsize // 4, 1), difference % 2**64
    for first in range(0, count_all, _ROW):
        count = min(_ROW, count_all - first)
        words = (multipliers(0, count) * multipliers(first // _ROW, 1, stream=1)).view(np.uint64)
        for bit in range(bits):
            change = words << np.uint64(bit)
            for sign in (found, -found % 2**64):
                (places,) = np.nonzero(change == np.uint64(sign))
                if len(places):
                    word, per = first + int(places[0]), max(itemsize // 4, 1)
                    return BitFlip(word // per, bit + 32 * (word % per))
    return None


def _sum_of_products(words: Tensor, column: Tensor, rows: Tensor) -> Tensor:
    """Return the hash of flat integers. column, rows: the multipliers within a row, and of rows."""
    step, whole = _AT_ONCE[words.device.type], words.numel() // _ROW
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    product = torch.empty(min(step, whole * _ROW), dtype=torch.int64, device=words.device)
    for first in range(0, whole * _ROW, step):
        part = words[first : min(first + step, whole * _ROW)]
        own = product[: part.numel()].copy_(part).view(-1, _ROW).mul_(column)
        total += (own.sum(1) * rows[first // _ROW : first // _ROW + len(own)]).sum()
    if rest := words.numel() - whole * _ROW:
        total += (words[-rest:] * column[:rest]).sum() * rows[whole]
    return total


def _on(words: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(words).to(device)


def _words(tensor: Tensor) -> int:
    return tensor.numel() * max(tensor.itemsize // 4, 1)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as a flat tensor of integers of at most 32 bits."""
    return tensor.detach().reshape(-1).view(_WORDS[tensor.itemsize])


def _small_batches(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indexes of tensors of less than a row, those of one device and size of elements together: an operation
    for all of them costs as much as one for each."""
    batches: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if 0 < _words(tensor) < _ROW:
            batches.setdefault((tensor.device, _WORDS[tensor.itemsize]), []).append(i)
    yield from batches.values()
