"""The blocks of tensors that a rank stores, and the list of them that it sends to rank 0 for the manifest. No torch.

A block is (offsets, sizes), each with one number per dim. A scalar has no dims, and its only block is ((), ()). A rank
of a 405B model holds a few hundred tensors, with the same cut in all layers. The rank sends each distinct block
position once and tensor names as numbers, so rank 0 unpacks a few thousand objects instead of millions.
"""

import json
import math
import zlib
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ingot.errors import CheckpointError
from ingot.schema.checkpoint import BlockLayout, FileEntry, TensorEntry, pack_crc32

# -- rectangular blocks --


Block = tuple[Sequence[int], Sequence[int]]


def overlap(a: Block, b: Block) -> Block | None:
    """Return the block that `a` and `b` share, with offsets in the whole tensor; None if they share no element."""
    offsets = [max(x, y) for x, y in zip(a[0], b[0], strict=True)]
    sizes = [min(x + m, y + n) - o for x, m, y, n, o in zip(a[0], a[1], b[0], b[1], offsets, strict=True)]
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def slices(block: Block, origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of `block` in an array whose first element is at `origin` in the whole tensor."""
    return tuple(slice(o - z, o - z + size) for o, size, z in zip(*block, origin, strict=True))


def tiling_problem(shape: Sequence[int], blocks: Sequence[Block]) -> str:
    """Return why `blocks`, all inside `shape`, do not hold each element exactly once; "" if they do.

    The reason continues a sentence whose subject is the blocks.
    """
    if sum(math.prod(sizes) for _, sizes in blocks) != math.prod(shape):
        return f"do not cover its shape {list(shape)}"
    return "overlap" if len(blocks) > 1 and _some_overlap(len(shape), blocks) else ""


def _some_overlap(dims: int, blocks: Sequence[Block]) -> bool:
    # Sweep along the dim with the most cuts, where few blocks are open at a time: if columns are cut into many rows, as
    # many as there are columns.
    if dims == 0:
        return True
    along = max(range(dims), key=lambda dim: len({offsets[dim] for offsets, _ in blocks}))
    open_blocks: list[Block] = []
    for block in sorted(blocks, key=lambda block: block[0][along]):
        start = block[0][along]
        open_blocks = [b for b in open_blocks if b[0][along] + b[1][along] > start]
        if any(overlap(b, block) for b in open_blocks):
            return True
        open_blocks.append(block)
    return False


# -- the list of blocks of a rank --


Numbers = tuple[int, ...]
Kind = tuple[str, Numbers]  # dtype, shape of the whole tensor
Row = tuple[Numbers, Numbers, int]  # offsets, sizes, rank


@dataclass(frozen=True)
class RankBlocks:
    """The blocks that one rank wrote.

    kinds: name -> (dtype, whole shape) of all tensors that the rank holds, as compressed JSON; equal on all ranks of a
    pipeline stage.

    places: (offsets, sizes, indices of the tensors in `kinds`, CRC-32 of each tensor's block); the last two are the
    bytes of unsigned 32-bit integers.

    verify_seconds: how long the rank read its file back and compared it. It is for the event log, not for the manifest.
    """

    file: FileEntry
    kinds: bytes
    places: list[tuple[Numbers, Numbers, bytes, bytes]]
    verify_seconds: float = 0.0

    @staticmethod
    def pack(
        file: FileEntry,
        kinds: Mapping[str, Kind],
        written: Sequence[tuple[str, Numbers, Numbers]],
        checksums: Sequence[int],
        verify_seconds: float = 0.0,
    ) -> "RankBlocks":
        """Pack the blocks of a rank. written: (tensor, offsets, sizes) of each block. checksums: a CRC-32 per block."""
        number = {name: i for i, name in enumerate(kinds)}
        by_place = defaultdict(lambda: (array("I"), array("I")))
        for (name, offsets, sizes), crc32 in zip(written, checksums, strict=True):
            numbers, crcs = by_place[offsets, sizes]
            numbers.append(number[name])
            crcs.append(crc32)
        places = [(*place, numbers.tobytes(), crcs.tobytes()) for place, (numbers, crcs) in by_place.items()]
        return RankBlocks(file, zlib.compress(json.dumps(kinds).encode(), 1), places, verify_seconds)

    def to_bytes(self) -> bytes:
        """Return the bytes to send to rank 0: the length of a JSON header, the header, and the binary parts."""
        lengths = [[offsets, sizes, len(numbers)] for offsets, sizes, numbers, _ in self.places]
        about = [self.file.bytes, self.file.sha256, self.verify_seconds, len(self.kinds), lengths]
        header = json.dumps(about, separators=(",", ":")).encode()
        binary = (part for _, _, numbers, crcs in self.places for part in (numbers, crcs))
        return b"".join([len(header).to_bytes(4, "little"), header, self.kinds, *binary])

    @staticmethod
    def from_bytes(data: bytes) -> "RankBlocks":
        """Return the blocks that `to_bytes` made into `data`. Raises ValueError for bytes of another length."""
        start = 4 + int.from_bytes(data[:4], "little")
        file_bytes, sha256, verify_seconds, kinds_bytes, lengths = json.loads(data[4:start])
        kinds, start, places = data[start : start + kinds_bytes], start + kinds_bytes, []
        for offsets, sizes, length in lengths:
            middle, end = start + length, start + 2 * length
            places.append((tuple(offsets), tuple(sizes), data[start:middle], data[middle:end]))
            start = end
        if start != len(data):
            raise ValueError(f"the blocks of a rank have {len(data)} bytes, not {start}")
        return RankBlocks(FileEntry(bytes=file_bytes, sha256=sha256), kinds, places, verify_seconds)


def assemble(parts: Sequence[RankBlocks]) -> tuple[tuple[BlockLayout, ...], dict[str, TensorEntry]]:
    """Make the cuts and tensors of the manifest from the ranks' blocks.

    Raises CheckpointError unless each element was written exactly once.
    """
    names = cache(lambda packed: tuple(json.loads(zlib.decompress(packed))))
    kinds = _same_kinds(parts)
    rows: dict[str, list[Row]] = {name: [] for name in kinds}
    checksums: dict[str, array] = {name: array("I") for name in kinds}
    for rank, part in enumerate(parts):
        here = names(part.kinds)
        for offsets, sizes, numbers, crcs in part.places:
            row = (offsets, sizes, rank)
            for number, crc32 in zip(array("I", numbers), array("I", crcs), strict=True):
                rows[here[number]].append(row)
                checksums[here[number]].append(crc32)
    return _tensors(kinds, rows, checksums)


def _same_kinds(parts: Sequence[RankBlocks]) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    first_rank: dict[bytes, int] = {}
    for rank, part in enumerate(parts):
        first_rank.setdefault(part.kinds, rank)
    for packed, rank in first_rank.items():
        for name, (dtype, shape) in json.loads(zlib.decompress(packed)).items():
            kind = (dtype, tuple(shape))
            if kinds.setdefault(name, kind) != kind:
                raise CheckpointError(
                    "E-STATE-RANKS",
                    f"{name} is {dtype}{list(shape)} on rank {rank}, but has another shape or dtype on a lower rank",
                    rule="a tensor has the same shape and dtype on all ranks",
                    fix="start all ranks with the same run file and the same version of ingot",
                    tensor=name,
                    rank=rank,
                    shape=list(shape),
                )
    return kinds


def _tensors(
    kinds: dict[str, Kind], rows: dict[str, list[Row]], checksums: dict[str, array]
) -> tuple[tuple[BlockLayout, ...], dict[str, TensorEntry]]:
    orders: dict[tuple[Row, ...], list[int]] = {}  # rows in rank order -> the indices that sort them by position
    numbers: dict[tuple[Row, ...], int] = {}  # rows in rank order -> number of the cut
    tiled: dict[tuple[int, Numbers], str] = {}  # (cut, shape) -> tiling_problem
    cuts, entries = [], {}
    for name, (dtype, shape) in kinds.items():
        gathered = tuple(rows[name])
        if gathered not in numbers:
            orders[gathered] = sorted(range(len(gathered)), key=gathered.__getitem__)
            offsets, sizes, ranks = (
                zip(*(gathered[i] for i in orders[gathered]), strict=True) if gathered else ((),) * 3
            )
            numbers[gathered] = len(cuts)
            cuts.append(BlockLayout(ranks=ranks, offsets=offsets, sizes=sizes))
        number = numbers[gathered]
        if (number, shape) not in tiled:
            tiled[number, shape] = tiling_problem(shape, [(offsets, sizes) for offsets, sizes, _ in gathered])
        if problem := tiled[number, shape]:
            raise CheckpointError(
                "E-STATE-OWNERS",
                f"the blocks of {name} that the ranks own {problem}",
                rule="every element is saved by exactly one rank",
                fix="this is a bug in ingot; please report it with the run's run.toml",
                tensor=name,
                shape=list(shape),
                elements=sum(math.prod(sizes) for _, sizes, _ in gathered),
            )
        crc32 = pack_crc32([checksums[name][i] for i in orders[gathered]])
        entries[name] = TensorEntry(dtype=dtype, shape=shape, cut=number, crc32=crc32)
    return tuple(cuts), entries
