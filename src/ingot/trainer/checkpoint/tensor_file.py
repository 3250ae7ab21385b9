"""Write a safetensors file, hash it while it is written, and compare what the disk gives back. No torch.

The layout is that of safetensors (8 bytes header length, JSON header, raw little-endian data). The library's own writer
cannot hash the bytes while it writes them, and a hash of only the bytes read back would accept a bad write. Reading
uses the library.

A second thread hashes while the first one writes. The bytes read back (verified_file.py) are compared with those in
memory, from which the hash was made: a second hash would find the same differences and take half as much processor time
as the whole write.
"""

import hashlib
import json
import math
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.errors import CheckpointError
from ingot.schema.checkpoint import FileEntry
from ingot.trainer.checkpoint.rules import DTYPES
from ingot.trainer.checkpoint.verified_file import verified_file

STATE_NOT_FINITE = "E-STATE-NOT-FINITE"
_CHUNK = 1 << 20  # stays in a processor's cache from one hash to the next
_HASHING_PARTS = 4  # parts that may wait for their hash: their memory has to stay
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
    path: Path, parts: Sequence[FilePart], data: Iterable[memoryview]
) -> tuple[FileEntry, list[int], float]:
    """Write the tensors `parts` to the new file `path`, durably.

    data: yields the bytes of each part, in the same order; they stay the same meanwhile. A few parts are in use at a
    time.

    Returns the file's entry, the CRC-32 of each tensor's bytes, and the seconds of reading back and comparing, most of
    which pass during the write. Raises CheckpointError for a value that is not
    finite (a run could not continue from it), and if the data read back differs from the data written.
    """
    header = header_of(parts)
    size = len(header) + sum(part.bytes for part in parts)
    sha256 = hashlib.sha256(header)

    def hashed(part: FilePart, whole: memoryview) -> int:
        checksum = 0
        for chunk in (whole[start : start + _CHUNK] for start in range(0, len(whole), _CHUNK)):
            _require_finite(part, chunk)
            checksum = zlib.crc32(chunk, checksum)
            sha256.update(chunk)
        return checksum

    checksums: list[int] = []
    hashing: deque[Future[int]] = deque()
    with verified_file(path, size) as file, ThreadPoolExecutor(1, "hash") as thread:
        file.write(memoryview(header))
        for part, whole in zip(parts, data, strict=True):
            hashing.append(thread.submit(hashed, part, whole))
            file.write(whole)
            if len(hashing) > _HASHING_PARTS:
                checksums.append(hashing.popleft().result())
        checksums += [one.result() for one in hashing]
    return FileEntry(bytes=file.bytes, sha256=sha256.hexdigest()), checksums, file.verify_seconds


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
            STATE_NOT_FINITE,
            f"tensor {part.key} holds NaN or infinity",
            rule="only finite weights and moments are saved, so that a run can continue from every checkpoint",
            fix="lower optim.lr or raise schedule.warmup_steps, and continue from the last checkpoint",
            tensor=part.key,
        )
