"""Files that grow while they are read: whole lines, from where the last look ended."""

import json
import os
from pathlib import Path

LONGEST_BYTES = 8 << 20  # of a line: the loads of 128 layers of 1,024 experts are 3 MB
_LINES_AT_ONCE = 1000


class GrowingFile:
    """A file of lines that another process appends to. most_bytes: that a look reads at most, or one line; lines of
    LONGEST_BYTES and more are left out. newest: begin with the lines within so many bytes before the end; None: with
    the first. position: the bytes that were read. size: of the file at the last look. left_bytes: of these, those after
    what that look read. too_long: the lines that it left out. problem: why it could not read a file that is there; "":
    it could, or none is there."""

    def __init__(self, path: Path, most_bytes: int, newest: int | None = None):
        self._newest = newest
        self.path, self.position, self.size, self.left_bytes, self._most = path, 0, 0, 0, most_bytes
        self.problem, self.too_long = "", 0
        self._is_within = False  # a line that is left out
        self._file: tuple[int, int] | None = None

    def read_lines(self) -> list[bytes] | None:
        """Return the whole lines that were added since the last look; [] without any. Return None if the file was
        replaced, or is shorter than it was: nothing that was read of it holds, and the next look begins anew. A look
        within a line that is left out returns no lines, but moves `position`."""
        self.too_long = 0
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                own = (found.st_dev, found.st_ino)
                if self._file not in (None, own) or found.st_size < self.position:
                    self._file, self.position, self.size, self.left_bytes = None, 0, 0, 0
                    self._is_within = False
                    return None
                begins = self._file is None
                self._file, self.size = own, found.st_size
                if begins and self._newest is not None and self._newest < self.size:
                    self.position, self._is_within = self.size - self._newest, True
                file.seek(self.position)
                if self._is_within:
                    rest = file.readline(self._most)
                    self.position += len(rest)
                    self._is_within = not rest.endswith(b"\n")
                added = b"" if self._is_within else file.read(self._most)
                if len(added) == self._most and b"\n" not in added:
                    added += file.readline(LONGEST_BYTES - len(added))
        except OSError as error:  # of a mount that fails too: the next look may succeed
            self.left_bytes = 0
            is_absent = isinstance(error, FileNotFoundError | NotADirectoryError)
            self.problem = "" if is_absent else error.strerror or type(error).__name__
            return []
        self.problem = ""
        self.left_bytes = max(self.size - self.position - len(added), 0)
        lines = added[: added.rfind(b"\n") + 1]
        self.position += len(lines)
        if not lines and len(added) >= LONGEST_BYTES:
            self.position += len(added)
            self.too_long, self._is_within = 1, True
        return lines.splitlines()


def parsed(lines: list[bytes]) -> list:
    """Return the JSON values of lines, without those that have none."""
    found = []
    for begin in range(0, len(lines), _LINES_AT_ONCE):
        some = lines[begin : begin + _LINES_AT_ONCE]
        try:  # at once, which takes half the time
            values = json.loads(b"[" + b",".join(some) + b"]")
        except (ValueError, RecursionError):
            values = [value for line in some if (value := _parsed(line)) is not None]
        found += values
    return found


def _parsed(line: bytes):
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
