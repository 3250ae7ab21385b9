"""Arrays larger than memory: files that grow, pieces of files, rows spread over partitions.

Files that are read from start to end use plain reads, not memory maps, whose pages count as memory of the process.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

PIECE = 1 << 20  # rows that are read or processed at a time
_HEADER_BYTES = 192
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class ArrayWriter:
    """An .npy file that grows. The file is readable only after the `with` block ends without an exception.

    shape: its one -1 is replaced by the size that follows from the number of items. rows: items appended so far.
    """

    def __init__(self, path: Path, dtype: np.dtype | str, shape: tuple[int, ...] = (-1,)):
        self.dtype, self.rows, self._shape = np.dtype(dtype), 0, shape
        self._file = path.open("wb")
        self._file.write(bytes(_HEADER_BYTES))

    def append(self, rows: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(rows, self.dtype).data)
        self.rows += rows.size

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, kind, value, traceback) -> None:
        with self._file:
            if kind is None:
                known = -math.prod(self._shape)
                shape = tuple(self.rows // known if size == -1 else size for size in self._shape)
                facts = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
                text = repr(facts).encode().ljust(_HEADER_BYTES - 11) + b"\n"
                self._file.seek(0)
                self._file.write(npy.magic(1, 0) + (_HEADER_BYTES - 10).to_bytes(2, "little") + text)


class ArrayFile:
    """An .npy file, read in pieces."""

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            if npy.read_magic(file) != (1, 0):
                raise ValueError(f"{path} is not an .npy file of version 1.0")
            self.shape, _, self.dtype = npy.read_array_header_1_0(file)
            self._start = file.tell()  # words: ok

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return items [start, stop) of the flattened array."""
        offset = self._start + start * self.dtype.itemsize
        return np.fromfile(self.path, self.dtype, count=stop - start, offset=offset)

    def pieces(self, start: int = 0, stop: int | None = None, rows: int = PIECE) -> Iterator[np.ndarray]:
        stop = int(np.prod(self.shape)) if stop is None else stop
        for first in range(start, stop, rows):
            yield self.read(first, min(first + rows, stop))


def partitions_for(rows: int, row_bytes: int, limit_bytes: int) -> int:
    """Return the number of partitions, a power of two, with which each takes about `limit_bytes` or less if the rows
    are spread evenly over them. row_bytes: memory per row."""
    return 1 << max(-(-rows * row_bytes // limit_bytes) - 1, 0).bit_length()


def by_hash(keys: np.ndarray, partitions: int) -> np.ndarray:
    """Return the number of each key's partition, uint32. Equal keys (uint64) share a partition; different keys are
    spread evenly."""
    shift = 65 - partitions.bit_length()
    return (keys * _SPREAD >> np.uint64(shift) if partitions > 1 else np.zeros(len(keys))).astype(np.uint32)


def sorted_set(values: np.ndarray) -> np.ndarray:
    """Return the distinct `values`, ascending. Much faster than numpy.unique, which hashes them."""
    values = np.sort(values)
    return values[starts(values)]


def starts(ascending: np.ndarray) -> np.ndarray:
    """Return bool [len(ascending)]: True where a value differs from the value before it."""
    new = np.ones(len(ascending), bool)
    np.not_equal(ascending[1:], ascending[:-1], out=new[1:])
    return new


class Partitions:
    """Rows spread over `count` partitions; each partition keeps the order in which its rows were appended.

    At most `spill_bytes` of rows are held in memory; above that, all are written to one file per partition in
    `folder`. A small number of rows never reaches the disk.
    """

    def __init__(self, folder: Path, count: int, dtype: np.dtype | str, spill_bytes: int = 64 << 20):
        self.count, self.dtype = count, np.dtype(dtype)
        self._folder, self._spill_bytes, self._waiting_bytes = folder, spill_bytes, 0
        self._waiting: list[list[np.ndarray]] = [[] for _ in range(count)]

    def append(self, rows: np.ndarray, partitions: np.ndarray) -> None:
        """Add `rows`. partitions [rows]: the number of each row's partition."""
        if self.count > 1:
            order = np.argsort(partitions, kind="stable")
            rows, partitions = rows[order], partitions[order]
        borders = np.searchsorted(partitions, np.arange(self.count + 1))
        for number in np.flatnonzero(np.diff(borders)).tolist():
            self._waiting[number].append(rows[borders[number] : borders[number + 1]])
        self._waiting_bytes += rows.nbytes
        if self._waiting_bytes > self._spill_bytes:
            self._spill()

    def _spill(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for number, waiting in enumerate(self._waiting):
            if waiting:
                with self._path(number).open("ab") as file:
                    file.writelines(np.ascontiguousarray(rows).data for rows in waiting)
                waiting.clear()
        self._waiting_bytes = 0

    def _path(self, number: int) -> Path:
        return self._folder / f"partition-{number:05d}"

    def take(self, number: int, rows: int = PIECE) -> Iterator[np.ndarray]:
        """Yield the rows of partition `number` in pieces of at most `rows`, and remove them."""
        path = self._path(number)
        if path.exists():
            with path.open("ab") as file:
                file.writelines(np.ascontiguousarray(rest).data for rest in self._waiting[number])
            self._waiting[number].clear()
            total = path.stat().st_size // self.dtype.itemsize
            for first in range(0, total, rows):  # fromfile allocates all `count` items, even past the end of the file
                yield np.fromfile(path, self.dtype, count=min(rows, total - first), offset=first * self.dtype.itemsize)
            path.unlink()
        if self._waiting[number]:
            rest = np.concatenate(self._waiting[number])
            self._waiting[number].clear()
            for first in range(0, len(rest), rows):
                yield rest[first : first + rows]

    def take_all(self, number: int) -> np.ndarray:
        """Return the rows of partition `number`, and remove them."""
        return np.concatenate([np.empty(0, self.dtype), *self.take(number)])

    def close(self) -> None:
        """Remove the folder, which must be empty: call this after every partition was taken."""
        if self._folder.exists():
            self._folder.rmdir()
