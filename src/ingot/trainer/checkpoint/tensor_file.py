"""Write a safetensors file, hash it while it is written, and compare what the disk gives back. No torch.

The layout is that of safetensors (8 bytes header length, JSON header, raw little-endian data). The library's own writer
cannot hash the bytes while it writes them, and a hash of only the bytes read back would accept a bad write. Reading
uses the library.

The bytes read back are compared with those in memory, from which the hash was made: a second hash would find the same
differences and take half as much processor time as the whole write.
"""

import hashlib
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.errors import CheckpointError
from ingot.schema.checkpoint import FileEntry
from ingot.trainer.checkpoint.rules import DTYPES

_CHUNK = 1 << 20  # stays in a processor's cache from the hash to the write
# Floating-point dtypes that NumPy lacks or is slow with -> the exponent bits of an element, as an unsigned integer of
# its size. NaN and infinity have all of them; float8_e4m3fn has no infinity, and its NaN has all bits but the sign.
_EXPONENTS = {
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float8_e5m2": 0x7C,
    "float8_e4m3fn": 0x7F,
}


@dataclass(frozen=True)
class FilePart:
    """A tensor of a file: its key, its dtype by torch's name ("bfloat16"), and its shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][0]


def header_of(parts: Sequence[FilePart]) -> bytes:
    """Return what precedes the data of a safetensors file of these tensors, a multiple of 8 bytes."""
    header: dict = {"__metadata__": {"format": "pt"}}
    position = 0
    for part in parts:
        end = position + part.bytes
        header[part.key] = {
            "dtype": DTYPES[part.dtype][1],
            "shape": list(part.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    return len(text).to_bytes(8, "little") + text


def write_parts(
    path: Path, parts: Sequence[FilePart], data: Callable[[], Iterable[memoryview]]
) -> tuple[FileEntry, list[int]]:
    """Write the tensors `parts` to the new file `path`, durably.

    data: yields the bytes of each part, in the same order. It is called twice, and the bytes stay the same meanwhile.

    Returns the file's entry and the CRC-32 of each tensor's bytes. Raises CheckpointError for a value that is not
    finite (a run could not continue from it), and if the data read back differs from the data written.
    """
    file, header = _HashedFile(path), header_of(parts)
    file.write(header)
    checksums = []
    for part, whole in zip(parts, data(), strict=True):
        checksum = 0
        for chunk in _chunks(whole):
            _require_finite(part, chunk)
            checksum = zlib.crc32(chunk, checksum)
            file.write(chunk)
        checksums.append(checksum)
    sha256 = file.close_durably()
    if not _holds(path, header, data()):
        raise CheckpointError(
            "E-CKPT-READ-BACK",
            f"the data read back from {path} differs from the data written",
            rule="a checkpoint counts as saved only after its files have been read back and compared",
            fix="check this disk; the last checkpoint is unchanged",
            path=str(path),
        )
    return FileEntry(bytes=file.bytes, sha256=sha256), checksums


def _holds(path: Path, header: bytes, data: Iterable[memoryview]) -> bool:
    """Return whether the file holds `header` and then `data`, and nothing else."""
    whole_chunk = bytearray(_CHUNK)
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # larger reads of the disk: a third of the time, a tenth of the processor time
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for whole in itertools.chain((memoryview(header),), data):
            for chunk in _chunks(whole):
                found = whole_chunk if len(chunk) == _CHUNK else bytearray(len(chunk))
                if file.readinto(found) != len(chunk) or found != chunk:  # a bytearray compares as fast as memory
                    return False
        return not file.read(1)


def _chunks(whole: memoryview) -> Iterator[memoryview]:
    return (whole[start : start + _CHUNK] for start in range(0, len(whole), _CHUNK))


class _HashedFile:
    """A file that counts and hashes the bytes written to it."""

    def __init__(self, path: Path):
        self._file = path.open("xb", buffering=0)
        self._sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._sha256.update(view)
        self.bytes += len(view)
        while len(view):
            view = view[self._file.write(view) :]

    def close_durably(self) -> str:
        """Flush to the disk and drop the cached pages, so that a later read reads the disk. Returns the SHA-256."""
        os.fsync(self._file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._file.close()
        return self._sha256.hexdigest()


def _require_finite(part: FilePart, data: memoryview) -> None:
    size = DTYPES[part.dtype][0]
    if part.dtype in ("float64", "float32"):
        values = np.frombuffer(data, f"f{size}")
        # Minimum and maximum reveal NaN and infinity, without a mask as large as the data.
        finite = np.isfinite(values.min()) and np.isfinite(values.max())
    elif exponent := _EXPONENTS.get(part.dtype):
        finite = not ((np.frombuffer(data, f"u{size}") & exponent) == exponent).any()
    else:
        finite = True
    if not finite:
        raise CheckpointError(
            "E-STATE-NOT-FINITE",
            f"tensor {part.key} holds NaN or infinity",
            rule="only finite weights and moments are saved, so that a run can continue from every checkpoint",
            fix="lower optim.lr or raise schedule.warmup_steps, and continue from the last checkpoint",
            tensor=part.key,
        )
