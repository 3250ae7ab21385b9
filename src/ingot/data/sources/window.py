"""Random access to a file without mapping it: a mapped file that shrinks kills the process, and counts as memory."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

_FIRST_STEP = 16 << 10
_STEP = 1 << 20
_OVERLAP = 4096  # longer than any match of the patterns that are searched for


class Window:
    """A file that is open for reading; `at` and `search` leave no position behind. Raises OSError."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, *_) -> None:
        os.close(self._fd)

    def at(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset` on; fewer at the end of the file."""
        return os.pread(self._fd, count, offset) if offset < self.size else b""

    def search(self, pattern: re.Pattern[bytes], offset: int, end: int | None = None) -> Iterator[int]:
        """Where `pattern` matches at or behind `offset` (and before `end`), in order. A look-behind of one byte is
        seen across the start."""
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
