"""Read a tensor from an archive as torch.save writes it, a part of a file, without unpickling.

    data.pkl      a pickle: how the bytes are a tensor (storage, shape, strides)
    data/0        the bytes
    byteorder     "little"

The rest (version, ids) is not read. An archive is read through a window of its file in small parts: a directory that
claims more than a tensor needs is refused before it takes memory. zipfile compares the CRC-32 of what it reads.
"""

import io
import struct
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from ingot.trainer.convert.pickled import PickledCall, PickledName, PickleRefused, Stored, numbers, read_pickle

# Storage class -> dtype. torch.save still names the class of before its untyped storages.
_STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
}
DTYPES = {str(dtype): dtype for dtype in _STORAGES.values()}
_REBUILD = "torch._utils._rebuild_tensor_v2"
_EXPECTED = {_REBUILD, "collections.OrderedDict", *_STORAGES}
ARCHIVE_BYTES = 64 << 10  # more than what an archive holds beside the tensor's bytes: 2 KB
_PICKLE_BYTES = 16 << 10
_MOST_DIMS = 8
_CHUNK = 1 << 17


class ArchiveRefused(ValueError):
    """An archive that is damaged, or is not that of one plain tensor."""


def read_archive(path: Path, offset: int, length: int, dtype: str, sizes: tuple[int, ...]) -> Tensor:
    """Return the tensor in the `length` bytes from `offset` on in the file `path`.

    dtype: its name, one of DTYPES. sizes: its shape. Raises ArchiveRefused or PickleRefused if there is anything else,
    OSError if the file cannot be read.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(_Window(file, offset, length)) as archive:
            return _tensor(archive, dtype, sizes, length)
    except (ArchiveRefused, PickleRefused):
        raise
    except (zipfile.BadZipFile, NotImplementedError, EOFError, KeyError, ValueError, struct.error) as error:
        raise ArchiveRefused(f"it is damaged, or not an archive of torch.save ({str(error)[:80]})") from None
    except RuntimeError as error:  # of zipfile, for an encrypted entry
        raise ArchiveRefused(str(error)[:80]) from None


class _Window(io.RawIOBase):
    """The bytes offset..offset+length of an open file, as a file of which only small parts are read at once."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int):
        self._file, self._first, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:  # words: ok
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if at < 0:
            raise ArchiveRefused("it is shorter than an archive")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._length - self._at, 0)
        size = left if size is None or size < 0 else min(size, left)
        if size > _CHUNK:
            raise ArchiveRefused(f"its directory has {size:,} bytes")
        self._file.seek(self._first + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data


def _tensor(archive: zipfile.ZipFile, dtype: str, sizes: tuple[int, ...], length: int) -> Tensor:
    entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if any(info.compress_type != zipfile.ZIP_STORED or info.file_size > length for info in entries.values()):
        raise ArchiveRefused("it is compressed, or claims more bytes than it has")
    if "byteorder" in entries and _read(archive, entries["byteorder"], 16) != b"little":
        raise ArchiveRefused("its bytes are in big-endian order")
    pickle = bytes(_read(archive, entries["data.pkl"], _PICKLE_BYTES))
    rebuilt = read_pickle(pickle, _EXPECTED, 1 << 20)
    if not isinstance(rebuilt, PickledCall) or rebuilt.name != _REBUILD or len(rebuilt.arguments) < 4:
        raise ArchiveRefused("it is not a plain tensor")
    storage, start, shape, strides = rebuilt.arguments[:4]
    reference = storage.key if isinstance(storage, Stored) else ()
    match reference:
        case ("storage", PickledName(text=kind), str(key), _, _) if kind in _STORAGES:
            pass
        case _:
            raise ArchiveRefused("its storage is of an unknown kind")
    shape, strides = numbers(shape, _MOST_DIMS), numbers(strides, _MOST_DIMS)
    (start,) = numbers((start,), 1)
    if (shape, str(_STORAGES[kind])) != (sizes, dtype) or len(strides) != len(shape):
        raise ArchiveRefused(f"it is {_STORAGES[kind]}{list(shape)}, but the metadata says {dtype}{list(sizes)}")
    flat = torch.frombuffer(_read(archive, entries[f"data/{key}"], length), dtype=_STORAGES[kind])
    last = start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if last >= len(flat):
        raise ArchiveRefused(f"its strides end at element {last:,} of {len(flat):,}")
    return flat.as_strided(shape, strides, start)


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, most: int) -> bytearray:
    """Return the bytes of an entry, at most `most`, after their checksum was compared."""
    if not 0 < entry.file_size <= most:
        raise ArchiveRefused(f"its entry {entry.filename[:60]!r} has {entry.file_size:,} bytes")
    data, filled = bytearray(entry.file_size), 0
    with archive.open(entry) as file:
        while chunk := file.read(_CHUNK):
            data[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
    if filled != len(data):
        raise ArchiveRefused(f"its entry {entry.filename[:60]!r} ends early")
    return data
