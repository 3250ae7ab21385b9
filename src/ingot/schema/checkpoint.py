"""The manifest of one checkpoint folder. It is written last, so a folder without a manifest is not a checkpoint.

A run of 16,384 ranks has millions of blocks, so a layout of blocks that many tensors share is stored only once.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ingot.schema.accepted import AcceptedChanges
from ingot.schema.guard_record import GuardState
from ingot.schema.quarantine_record import Quarantined

SaveKind = Literal["full", "weights"]
FULL: SaveKind = "full"
WEIGHTS: SaveKind = "weights"
KINDS: tuple[SaveKind, ...] = (FULL, WEIGHTS)


def file_of(rank: int) -> str:
    """Return the name of the checkpoint file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def segment_file(first_step: int, last_step: int) -> str:
    """Return the name, in the ledger folder of a run, of the file of the samples of these steps (inclusive)."""
    return f"steps-{first_step:08d}-{last_step:08d}.i64"


def key_of(name: str, offsets: Sequence[int]) -> str:
    """Return a block's key in its file: the tensor's name, followed by "@" and the offsets unless all are 0."""
    return f"{name}@{','.join(map(str, offsets))}" if any(offsets) else name


def pack_crc32(checksums: Sequence[int]) -> str:
    """Return checksums as base64 of little-endian uint32."""
    return b64encode(np.asarray(checksums, "<u4").tobytes()).decode()


def unpack_crc32(text: str) -> list[int]:
    """Return the checksums from a text that `pack_crc32` made. Raises ValueError for other text."""
    return np.frombuffer(b64decode(text, validate=True), "<u4").tolist()


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """The size and hash of one file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class StoredBlock:
    """A block of a tensor. file, key: its safetensors file, and its key there. offsets, sizes: its place in the whole
    tensor.
    """

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The division of a tensor into blocks: block i starts at offsets[i] of the tensor, has the shape sizes[i] and is
    in the file of rank ranks[i].

    Tensors that are divided alike share one BlockLayout: a parameter and its moments, or equal layers of a stage.
    """

    ranks: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor of a checkpoint. cut: index of its BlockLayout in the manifest's `cuts`.

    crc32: checksum of each block's bytes, as base64 of little-endian uint32. The file's SHA-256 protects the data; if
      that hash differs, these checksums show which tensor is damaged.
    """

    dtype: str  # "float32", "bfloat16", ...
    shape: tuple[int, ...]
    cut: int
    crc32: str


@dataclass(frozen=True, kw_only=True)
class LedgerSegment:
    """A file, in the run's ledger folder, of the samples consumed in the steps first_step..last_step (inclusive).

    untrained: those of the steps that changed no weights, so that their samples are in the file as ~id.
    """

    file: str
    first_step: int
    last_step: int
    sha256: str
    untrained: tuple[int, ...] = ()


def segments_of(values: Iterable[Mapping[str, Any]]) -> tuple[LedgerSegment, ...]:
    """Return the segments whose JSON is `values`."""
    return tuple(LedgerSegment(**{**one, "untrained": tuple(one["untrained"])}) for one in values)


@dataclass(frozen=True, kw_only=True)
class Health:
    """A judgment of the weights in a checkpoint, made when it was saved.

    A run resumes from a suspect checkpoint only if it has no other.

    state: "unknown" if nothing judged them, as in checkpoints of earlier versions. reason: for people. by: the name of
    the judge.
    """

    state: Literal["healthy", "suspect", "unknown"] = "unknown"
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """The contents of a checkpoint.

    kind: "full", or "weights" for a save of the model's weights alone, which has no optimizer state, no random states
    and no ledger.
    step: optimizer steps done. epoch: the number of the attempt that saved it (trainer/checkpoint/fence.py), 0 in
      checkpoints of earlier versions. settings: RunConfig.settings(); checkpoints of earlier versions of ingot have
      only those that need confirmation to change (schema/changes.py). config_sha256: RunConfig.training_sha256().
      data_fingerprint: fingerprint of the token manifest. tokens: number of tokens consumed so far. layout: mesh
      degrees at the time of writing, as information for people; loading does not depend on them. world: the number of
      ranks that wrote the checkpoint. Their files contain random states, which are restored only on the same number of
      ranks. rng: the random states in hex, in checkpoints of version 1. ledger: the samples of all steps from 1 to
      `step`. The hash of the manifest covers this list. accepted: the changes of settings and data that hold for some
      of these steps, oldest first; None in checkpoints of earlier versions of ingot. callbacks: the JSON that each
      callback recorded (plugins/callback.py), by its name. guard: the measures of the guard so far, and the skipped
      steps that it has not decided about. quarantine: the tokens that training left out so far, which is part of the
      order of samples.
    """

    version: int = 2
    kind: SaveKind = FULL
    step: int
    epoch: int = 0
    tokens: int
    config_sha256: str
    settings: dict[str, Any]
    data_fingerprint: str
    layout: dict[str, int]
    world: int = 1
    health: Health = field(default_factory=Health)
    files: dict[str, FileEntry]
    cuts: tuple[BlockLayout, ...] = ()
    tensors: dict[str, TensorEntry]
    rng: tuple[str, ...] = ()
    ledger: tuple[LedgerSegment, ...]
    accepted: tuple[AcceptedChanges, ...] | None = None
    callbacks: dict[str, Any] = field(default_factory=dict)
    guard: GuardState = field(default_factory=GuardState)
    quarantine: tuple[Quarantined, ...] = ()

    def chunk(self, name: str, number: int) -> StoredBlock:
        """Return block `number` of tensor `name`, in the order of its layout."""
        cut = self.cuts[self.tensors[name].cut]
        offsets = cut.offsets[number]
        return StoredBlock(
            file=file_of(cut.ranks[number]), key=key_of(name, offsets), offsets=offsets, sizes=cut.sizes[number]
        )

    def chunks(self, name: str) -> list[StoredBlock]:
        """Return all blocks of tensor `name`."""
        return [self.chunk(name, i) for i in range(len(self.cuts[self.tensors[name].cut].ranks))]
