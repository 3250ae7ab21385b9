"""Write a safetensors file, hash it while it is written, and read it back from the disk.

The layout is that of safetensors (8 bytes header length, JSON header, raw little-endian data). The library's own writer
cannot hash the bytes while it writes them, and a hash of only the bytes read back would accept a bad write. Reading
uses the library.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ingot.errors import CheckpointError
from ingot.schema.checkpoint import FileEntry
from ingot.storage import sha256_file
from ingot.trainer.checkpoint.rules import DTYPES

_CHUNK = 64 << 20


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


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the module, like "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def write_tensors(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> tuple[FileEntry, list[int]]:
    """Write `tensors` (key, tensor on any device) to the new file `path`, durably, and verify it.

    Returns the file's entry and the CRC-32 of each tensor's bytes. Raises CheckpointError for a value that is not
    finite (a run could not continue from it), and if the data read back differs from the data written.
    """
    file = _HashedFile(path)
    file.write(_header(tensors))
    checksums = []
    for key, tensor in tensors:
        if tensor.is_floating_point() and not _finite(tensor):
            raise CheckpointError(
                "E-STATE-NOT-FINITE",
                f"tensor {key} holds NaN or infinity",
                rule="only finite weights and moments are saved, so that a run can continue from every checkpoint",
                fix="lower optim.lr or raise schedule.warmup_steps, and continue from the last checkpoint",
                tensor=key,
            )
        checksum = 0
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _CHUNK):
            part = data[start : start + _CHUNK]
            checksum = zlib.crc32(part, checksum)
            file.write(part)
        checksums.append(checksum)
    sha256 = file.close_durably()
    if sha256_file(path) != sha256:
        raise CheckpointError(
            "E-CKPT-READ-BACK",
            f"the data read back from {path} differs from the data written",
            rule="a checkpoint counts as saved only after its files have been read back and compared",
            fix="check this disk; the last checkpoint is unchanged",
            path=str(path),
        )
    return FileEntry(bytes=file.bytes, sha256=sha256), checksums


def _finite(tensor: Tensor) -> bool:
    # Minimum and maximum reveal NaN and infinity, without a mask as large as the tensor.
    return tensor.numel() == 0 or all(bool(torch.isfinite(x)) for x in torch.aminmax(tensor.detach()))


def _header(tensors: Sequence[tuple[str, Tensor]]) -> bytes:
    header: dict = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, tensor in tensors:
        end = position + tensor.numel() * tensor.element_size()
        kind = DTYPES[dtype_name(tensor.dtype)][1]
        header[key] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    return len(text).to_bytes(8, "little") + text
