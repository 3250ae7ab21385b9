"""The manifest of one checkpoint folder: written last, so a folder without it was never a checkpoint.

A run of 16,384 ranks has millions of blocks, so nothing here is said once per block that can be said once per cut.
"""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def file_of(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def key_of(name: str, offsets: Sequence[int]) -> str:
    """A block's name in its file: the tensor's, with the offset where it is a block of a larger one."""
    return f"{name}@{','.join(map(str, offsets))}" if any(offsets) else name


def pack_crc32(checksums: Sequence[int]) -> str:
    return b64encode(np.asarray(checksums, "<u4").tobytes()).decode()


def unpack_crc32(text: str) -> list[int]:
    """Raises ValueError for what `pack_crc32` did not make."""
    return np.frombuffer(b64decode(text, validate=True), "<u4").tolist()


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A block of a tensor: stored under `key` in safetensors file `file`, at `offsets` in the whole, with `sizes`."""

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How tensors are cut: block i starts at offsets[i] of the whole, has sizes[i] and lies in the file of ranks[i].

    A parameter and its moments share one, and so do the layers of a pipeline stage where their blocks are alike.
    """

    ranks: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """cut: the number of its Cut in the manifest.

    crc32: of each block's bytes, as base64 of little-endian uint32. Integrity is the file's SHA-256; this names the
    tensor when that does not match.
    """

    dtype: str  # "float32", "bfloat16", ...
    shape: tuple[int, ...]
    cut: int
    crc32: str


@dataclass(frozen=True, kw_only=True)
class LedgerSegment:
    """Samples consumed in steps first..last (inclusive): `file` below the run's ledger folder."""

    file: str
    first_step: int
    last_step: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """step: optimizer steps done. settings: RunConfig.training_settings(), config_sha256: their hash.

    data_fingerprint: of the token manifest, tokens: consumed so far.

    layout: mesh degrees it was written on, for people; loading does not depend on it.
    world: the number of ranks that wrote it; only with as many do the random states in their files come back.
    rng: those states in hex, in checkpoints of version 1.
    """

    version: int = 2
    step: int
    tokens: int
    config_sha256: str
    settings: dict[str, Any]
    data_fingerprint: str
    layout: dict[str, int]
    world: int = 1
    files: dict[str, FileEntry]
    cuts: tuple[Cut, ...] = ()
    tensors: dict[str, TensorEntry]
    rng: tuple[str, ...] = ()
    ledger: tuple[LedgerSegment, ...]

    def chunk(self, name: str, number: int) -> Chunk:
        """Block `number` of tensor `name`, in the order of its cut."""
        cut = self.cuts[self.tensors[name].cut]
        offsets = cut.offsets[number]
        return Chunk(
            file=file_of(cut.ranks[number]), key=key_of(name, offsets), offsets=offsets, sizes=cut.sizes[number]
        )

    def chunks(self, name: str) -> list[Chunk]:
        return [self.chunk(name, i) for i in range(len(self.cuts[self.tensors[name].cut].ranks))]
