"""AdamW's moments in one raw file per rank."""

import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ingot.errors import ResourceError

KINDS = ("exp_avg", "exp_avg_sq")


class MomentFile:
    """Zeros at first; blocks like those of `values`, one after the other, each at a multiple of the page size.

    The file has no name in its folder. So a killed process leaves nothing behind, and nothing of it can be taken for a
    saved state: that comes from checkpoints alone. Its whole size is taken at once; raises ResourceError without room.
    """

    def __init__(self, folder: Path, values: Mapping[str, Tensor]):
        self.folder, self.values = folder, values
        self.positions: dict[tuple[str, str], int] = {}
        size = 0
        for name, value in values.items():
            for kind in KINDS:
                self.positions[name, kind] = size
                size += -(-value.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size_bytes = max(size, mmap.PAGESIZE)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  (closed by close)
            os.posix_fallocate(self.file.fileno(), 0, self.size_bytes)
        except OSError as error:
            raise ResourceError(
                f"{folder} does not take {self.size_bytes / 2**30:.2f} GiB of optimizer state: {error.strerror}",
                rule="offload to files needs 8 bytes per parameter and rank (16 in float64) before the first step",
                fix="free space there, name another parallel.offload_folder, or use more ranks",
            ) from error
        self.map = mmap.mmap(self.file.fileno(), self.size_bytes)

    def __str__(self) -> str:
        return f"the file of moments in {self.folder}"

    def tensor(self, name: str, kind: str) -> Tensor:
        """The block, mapped: reading it reads the file, through pages that the system may drop at any time."""
        value = self.values[name]
        position = self.positions[name, kind]
        return torch.frombuffer(self.map, dtype=value.dtype, count=value.numel(), offset=position).view(value.shape)

    def read(self, name: str, kind: str, start: int, into: Tensor) -> None:
        """Elements of the block from `start` on; `into`: contiguous, in host memory."""
        view, position = self._bytes(into), self._position(name, kind, start)
        try:
            while view:
                count = os.preadv(self.file.fileno(), [view], position)
                if not count:
                    raise OSError(0, "the file ends early")
                view, position = view[count:], position + count
        except OSError as error:
            raise self._failed("read", error) from error

    def write(self, name: str, kind: str, start: int, elements: Tensor) -> None:
        view, position = self._bytes(elements), self._position(name, kind, start)
        try:
            while view:
                count = os.pwrite(self.file.fileno(), view, position)
                view, position = view[count:], position + count
        except OSError as error:
            raise self._failed("written", error) from error

    def release_pages(self) -> None:
        """Memory in which `tensor` mapped what was looked at is given back; the file keeps what was written."""
        self.map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """The space is free when the last mapped tensor is gone, too."""
        self.file.close()
        del self.map

    def _position(self, name: str, kind: str, start: int) -> int:
        return self.positions[name, kind] + start * self.values[name].itemsize

    def _bytes(self, tensor: Tensor) -> memoryview:
        return tensor.numpy().data.cast("B")

    def _failed(self, what: str, error: OSError) -> ResourceError:
        return ResourceError(
            f"{self} could not be {what}: {error.strerror}",
            rule="optimizer state in files needs a working disk with room",
            fix="free space, or name another parallel.offload_folder; the run goes on from its newest checkpoint",
        )
