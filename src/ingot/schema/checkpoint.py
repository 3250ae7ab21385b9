"""The manifest of one checkpoint folder: written last, so a folder without it was never a checkpoint."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A block of a tensor: stored under `key` in safetensors file `file`, at `offsets` in the whole, with `sizes`.

    crc32: of the block's bytes. Integrity is the file's SHA-256; this names the tensor when that does not match.
    """

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    crc32: int


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    dtype: str  # "float32", "bfloat16", ...
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


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
    rng: one entry per rank, hex of the generator state; only used when the layout is the same.
    """

    version: int = 1
    step: int
    tokens: int
    config_sha256: str
    settings: dict[str, Any]
    data_fingerprint: str
    layout: dict[str, int]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    rng: tuple[str, ...]
    ledger: tuple[LedgerSegment, ...]
