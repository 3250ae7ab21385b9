"""Write a file, and compare what the disk gives back while later bytes are still being written. No torch.

    this thread      write group 1    write group 2            write group 3            the end
    a second one                      flush, read, compare 1   flush, read, compare 2   flush, read, compare 3

A group is compared after it was flushed, with the memory from which it was written. Large files bypass the page
cache (O_DIRECT) in both directions where the file system allows it: memory for cached pages can take more processor
time than both hashes.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import numpy as np

from ingot.errors import CheckpointError

_CHUNK = 1 << 20  # bytes of one write or read; a multiple of all block sizes of disks
_GROUP = 32 << 20  # bytes between two flushes; smaller files take the page cache
_WAITING_GROUPS = 2  # groups that may wait for their comparison: their memory has to stay


@contextlib.contextmanager
def verified_file(path: Path, size: int) -> Iterator["VerifiedFile"]:
    """Yield the new file `path`, to be written in the block. At its end, all bytes are on the disk and were compared.

    size: roughly how many bytes will be written. Raises CheckpointError if the disk gives back other bytes, OSError if
    the file exists, or cannot be written.
    """
    with (
        path.open("xb", buffering=0) as file,
        path.open("rb", buffering=0) as back,
        ThreadPoolExecutor(1, "read back") as thread,
    ):
        verified = VerifiedFile(path, file, back, thread, size)
        yield verified
        verified.finish()


class VerifiedFile:
    """The file of `verified_file`. bytes: how many were written. verify_seconds: of reading back and comparing so far,
    in a second thread, so that most of them pass while later bytes are written."""

    def __init__(self, path: Path, file: FileIO, back: FileIO, thread: Executor, size: int):
        self._path, self._file, self._back, self._thread = path, file, back, thread
        direct = size >= _GROUP and _bypass_cache(back, True) and _bypass_cache(file, True)
        self._chunk = _CHUNK if direct else _CHUNK // 8  # little memory for a small file
        self._found = _aligned(self._chunk)
        # Direct writes need whole aligned chunks, which are gathered here; None while writes take the page cache.
        self._gathered = _aligned(self._chunk) if direct else None
        self.bytes, self.verify_seconds = 0, 0.0
        self._pieces: list[memoryview] = []  # written, not yet given to the comparison; each within one chunk
        self._comparisons: deque[Future[None]] = deque()

    def write(self, data: memoryview) -> None:
        """Write `data`, whose bytes must not change until the file is closed."""
        while data:
            begin = self.bytes % self._chunk
            piece, data = data[: self._chunk - begin], data[self._chunk - begin :]
            self._pieces.append(piece)
            self.bytes += len(piece)
            if self._gathered is None:
                self._write(piece)
            else:
                np.copyto(self._gathered[begin : begin + len(piece)], np.frombuffer(piece, np.uint8))
                if not self.bytes % self._chunk:
                    self._write_chunk(self._gathered)
            if not self.bytes % _GROUP:
                self._compare_group()

    def finish(self) -> None:
        """Write and compare the rest. Raises CheckpointError if the disk holds other bytes than were written."""
        if self._gathered is not None:
            _bypass_cache(self._file, False)  # the last chunk is no multiple of a block
            self._write(self._gathered.data[: self.bytes % self._chunk])
        self._compare_group()
        while self._comparisons:
            self._comparisons.popleft().result()
        if os.fstat(self._back.fileno()).st_size != self.bytes:
            raise self._differs()

    def _write_chunk(self, chunk: np.ndarray) -> None:
        try:
            self._write(chunk.data)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _bypass_cache(self._file, False)  # a file system that takes the flag, and then refuses the write
            self._write(chunk.data)

    def _write(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]

    def _compare_group(self) -> None:
        self._comparisons.append(self._thread.submit(self._flush_and_compare, self._pieces))
        self._pieces = []
        while len(self._comparisons) > _WAITING_GROUPS:
            self._comparisons.popleft().result()

    def _flush_and_compare(self, pieces: Sequence[memoryview]) -> None:
        """Flush the file, and compare what comes next in it with `pieces`."""
        os.fsync(self._file.fileno())
        began = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            # Without its cached pages, a file is read from the disk. Larger reads take a tenth of the processor time.
            os.posix_fadvise(self._back.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(self._back.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        begin = end = 0
        for piece in pieces:
            if begin == end:
                begin, end = 0, self._back.readinto(self._found.data)
            found = self._found[begin : min(begin + len(piece), end)]
            if not np.array_equal(found, np.frombuffer(piece, np.uint8)):
                raise self._differs()
            begin += len(piece)
        self.verify_seconds += time.perf_counter() - began

    def _differs(self) -> CheckpointError:
        return CheckpointError(
            "E-CKPT-READ-BACK",
            f"the data read back from {self._path} differs from the data written",
            rule="a checkpoint counts as saved only after its files have been read back and compared",
            fix="check this disk; the last checkpoint is unchanged",
            path=str(self._path),
        )


def _aligned(size: int) -> np.ndarray:
    """Return `size` bytes of memory, at an address that direct reads and writes accept."""
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def _bypass_cache(file: FileIO, on: bool) -> bool:
    """Let later reads and writes of `file` bypass the page cache, or not. Returns whether the file system does that."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
    try:
        fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | direct if on else flags & ~direct)
    except OSError:
        return False
    return direct != 0
