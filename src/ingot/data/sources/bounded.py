"""Size limits for inputs, and random access to a file without mapping it into memory."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ingot.ranges import PositiveBytes, PositiveCount

_FIRST_STEP = 16 << 10
_STEP = 1 << 20
_OVERLAP = 4096  # longer than any match of the patterns that callers search for


@dataclass(frozen=True)
class Limits:
    """Size limits. A record, row or file beyond a limit becomes one dropped document with a reason.

    block_bytes: size of a record, line or row after the file is decompressed. body_bytes: size of the decoded body of a
    page, or of a text file. header_bytes: size of the headers of a WARC record, an HTTP response or a tar member.
    file_bytes: size of a source code file (longer files are data).

    ratio: the largest allowed ratio of unpacked to packed size. The limit applies above `ratio_floor_bytes`, because
    short repetitive pages reach ratios of several hundred.
    """

    block_bytes: PositiveBytes = 32 << 20
    body_bytes: PositiveBytes = 64 << 20
    header_bytes: PositiveBytes = 64 << 10
    file_bytes: PositiveBytes = 1 << 20
    ratio: PositiveCount = 200
    ratio_floor_bytes: PositiveBytes = 4 << 20


class Window:
    """A file opened for reading at any offset, without a current position. Every method can raise OSError.

    The file is not mapped into memory: a mapped file that shrinks kills the process, and its pages count as memory.
    """

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, *_) -> None:
        os.close(self._fd)

    def at(self, offset: int, count: int) -> bytes:
        """Return up to `count` bytes from `offset` on; fewer at the end of the file."""
        return os.pread(self._fd, count, offset) if offset < self.size else b""

    def search(self, pattern: re.Pattern[bytes], offset: int, end: int | None = None) -> Iterator[int]:
        """Yield the offsets from `offset` on (and before `end`) at which `pattern` matches, in ascending order.

        A lookbehind of one byte in `pattern` sees the byte before `offset`.
        """
        end = self.size if end is None else min(end, self.size)
        step = _FIRST_STEP
        while offset < end:
            before = min(offset, 1)
            piece = self.at(offset - before, before + step + _OVERLAP)
            for match in pattern.finditer(piece, before):
                if match.start() - before >= min(step, end - offset):
                    break
                yield offset + match.start() - before
            offset += step
            step = min(step * 4, _STEP)
