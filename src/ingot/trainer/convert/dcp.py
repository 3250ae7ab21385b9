"""Read tensors of a folder in the format of torch.distributed.checkpoint (DCP), without unpickling.

    .metadata       a pickle: for every tensor its dtype, shape and blocks; for every block its file, offset and length
    __0_0.distcp    blocks one after another, each a zip archive as torch.save writes it (dcp_block.py)

The pickles are read as plain data (pickled.py). Nothing in the format protects a tensor except the CRC-32 of the
archives, which is compared. Memory: a tensor needs its own bytes and those of one block, and the bytes of all blocks
are in the folder once, so nothing that a folder claims can take more memory than twice its size.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ingot.trainer.checkpoint.part import Block, slices, tiling_problem
from ingot.trainer.convert.dcp_block import ARCHIVE_BYTES, DTYPES, ArchiveRefused, read_archive
from ingot.trainer.convert.dcp_folder import METADATA, refused_folder, require_metadata
from ingot.trainer.convert.pickled import (
    MAX_BYTES,
    Pairs,
    PickledCall,
    PickledName,
    PickleRefused,
    numbers,
    read_pickle,
)

_LEAST_MEMORY = 64 << 20  # for the objects of the metadata of a small folder
_OF_METADATA = "torch.distributed.checkpoint.metadata."
_TENSOR, _BYTES = f"{_OF_METADATA}TensorStorageMetadata", f"{_OF_METADATA}BytesStorageMetadata"
_METADATA, _CHUNK = f"{_OF_METADATA}Metadata", f"{_OF_METADATA}ChunkStorageMetadata"
_PROPERTIES, _INDEX = f"{_OF_METADATA}TensorProperties", f"{_OF_METADATA}MetadataIndex"
_PLACE, _SIZE = "torch.distributed.checkpoint.filesystem._StorageInfo", "torch.Size"
_OTHER_DTYPES = {  # of tensors that are not weights
    f"torch.{name}"
    for name in (
        *("float64", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool", "complex64"),
        *("complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
_EXPECTED = {
    *(_METADATA, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _INDEX, _PLACE, _SIZE, *DTYPES, *_OTHER_DTYPES),
    *(f"{_OF_METADATA}StorageMeta", f"{_OF_METADATA}_MEM_FORMAT_ENCODING"),
    *("torch.serialization._get_layout", "pathlib.PosixPath", "pathlib._local.PosixPath"),
}
_MOST_DIMS = 8
_MOST_FIELDS = 16  # of an object; more would only make looking them up slow


@dataclass(frozen=True)
class DcpPlace:
    """`length` bytes from `offset` on in `file`, a name in the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class DcpTensor:
    """A tensor of a folder. dtype: torch's name, as "torch.bfloat16". places: by the offsets of the blocks."""

    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    places: dict[tuple[int, ...], DcpPlace]

    @property
    def bytes(self) -> int:
        """The size of the tensor; 0 for a dtype that is not read."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 0


class DcpFolder:
    """The tensors in `folder`. others: the names of entries that are no tensors, such as step counters.

    Raises CheckpointError if the metadata is damaged, contains what metadata does not need, or points outside of the
    folder. No tensor is read before `read`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.others: list[str] = []
        self.tensors: dict[str, DcpTensor] = {}
        self._sizes: dict[str, int] = {}
        try:
            metadata = read_pickle(self._read_metadata(), _EXPECTED, self._most_memory())
            self._take(_state(metadata, _METADATA, most=64))
        except PickleRefused as error:
            self._refuse("E-DCP-PICKLE", f"{METADATA}: {error}", reason=str(error))
        self._require_apart()

    def _read_metadata(self) -> bytes:
        path = self.folder / METADATA
        require_metadata(self.folder)
        if path.stat().st_size > MAX_BYTES:
            raise PickleRefused(f"it has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are read")
        try:
            with path.open("rb") as file:
                return file.read(MAX_BYTES)
        except OSError as error:
            self._refuse("E-DCP-READ", f"{METADATA} cannot be read ({error.strerror})", file=METADATA)

    def _most_memory(self) -> int:
        """Return a limit for the objects of the metadata: twice the folder."""
        return max(_LEAST_MEMORY, 2 * sum(one.stat().st_size for one in self.folder.iterdir() if one.is_file()))

    def _take(self, metadata: Pairs) -> None:
        places: dict[str, dict[tuple[int, ...], DcpPlace]] = defaultdict(dict)
        for index, place in _pairs(metadata.get("storage_data")):
            fields = _state(index, _INDEX)
            name, offset = _text(fields.get("fqn")), fields.get("offset")
            if offset is not None:  # entries without offsets are no tensors
                at = _numbers(offset)
                if at in places[name]:
                    self._refuse("E-DCP-BLOCKS", f"{METADATA} lists the block of {name} at {list(at)} twice", name=name)
                places[name][at] = self._place(name, _state(place, _PLACE))
        for key, entry in _pairs(metadata.get("state_dict_metadata")):
            name = _text(key)
            if isinstance(entry, PickledCall) and entry.name == _BYTES:
                self.others.append(name)
            elif name in self.tensors:
                self._refuse("E-DCP-BLOCKS", f"{METADATA} lists {name} twice", name=name)
            else:
                self.tensors[name] = _tensor(_state(entry, _TENSOR), places.get(name, {}))

    def _place(self, name: str, fields: Pairs) -> DcpPlace:
        file = fields.get("relative_path")
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".distcp") or "\0" in file:
            shown = str(file)[:120] if isinstance(file, str) else "something that is not text"
            found = f"{METADATA} points to {shown!r}, which is not the name of a .distcp file in the folder"
            self._refuse("E-DCP-PATH", found, name=name, file=shown)
        if fields.get("transform_descriptors"):
            self._refuse("E-DCP-FORM", f"{name} is stored compressed or transformed", name=name)
        offset, length = _numbers((fields.get("offset"), fields.get("length")))
        return DcpPlace(file, offset, length)

    def _require_apart(self) -> None:
        """Refuse a folder in which two blocks have bytes in common: a small file could stand for any amount of data."""
        ranges = sorted(
            (place.file, place.offset, place.offset + place.length, name)
            for name, tensor in self.tensors.items()
            for place in tensor.places.values()
        )
        for before, after in pairwise(ranges):
            if before[0] == after[0] and after[1] < before[2]:
                found = f"blocks of {before[3]} and {after[3]} share bytes of {after[0]}"
                self._refuse("E-DCP-BLOCKS", found, name=after[3], file=after[0])

    def read(self, name: str) -> Tensor:
        """Return the whole tensor `name`. Raises CheckpointError for blocks with holes or overlaps, outside of their
        file, damaged, or in a form that is not read."""
        entry = self.tensors[name]
        if entry.dtype not in DTYPES:
            found = f"{name} is {entry.dtype}; weights are read as {', '.join(sorted(DTYPES))}"
            self._refuse("E-DCP-DTYPE", found, name=name, dtype=entry.dtype)
        blocks = list(self._blocks(name, entry))
        whole = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        for (offsets, sizes), place in blocks:
            found = self._read_block(name, entry.dtype, tuple(sizes), place)
            whole[slices((offsets, sizes), (0,) * whole.dim())] = found
        return whole

    def _blocks(self, name: str, entry: DcpTensor) -> Iterator[tuple[Block, DcpPlace]]:
        """Yield the blocks of a tensor, after a check that they hold each element once, in bytes that exist."""
        for offsets, sizes in entry.blocks:
            if tuple(offsets) not in entry.places:
                found = f"{METADATA} has no place for the block of {name} at {list(offsets)}"
                self._refuse("E-DCP-BLOCKS", found, name=name)
            place = entry.places[tuple(offsets)]
            self._require_bytes(name, place)
            held = math.prod(sizes) * DTYPES[entry.dtype].itemsize
            if not held <= place.length <= held + ARCHIVE_BYTES:
                found = f"a block of {name} with {held:,} bytes is stored in {place.length:,}"
                self._refuse("E-DCP-BLOCKS", found, name=name)
        if problem := tiling_problem(entry.shape, entry.blocks):
            self._refuse("E-DCP-BLOCKS", f"the blocks of {name} {problem}", name=name)
        for offsets, sizes in entry.blocks:
            yield (offsets, sizes), entry.places[tuple(offsets)]

    def _require_bytes(self, name: str, place: DcpPlace) -> None:
        if place.file not in self._sizes:
            path = self.folder / place.file
            self._sizes[place.file] = path.stat().st_size if path.is_file() else -1
        size = self._sizes[place.file]
        if size < 0:
            self._refuse("E-DCP-READ", f"{place.file} is missing", file=place.file, name=name)
        if place.offset + place.length > size:
            found = (
                f"a block of {name} ends at byte {place.offset + place.length:,} of {place.file}, which has {size:,}"
            )
            self._refuse("E-DCP-READ", found, file=place.file, name=name)

    def _read_block(self, name: str, dtype: str, sizes: tuple[int, ...], place: DcpPlace) -> Tensor:
        try:
            return read_archive(self.folder / place.file, place.offset, place.length, dtype, sizes)
        except PickleRefused as error:
            self._refuse("E-DCP-PICKLE", f"{name} in {place.file}: {error}", name=name, reason=str(error))
        except ArchiveRefused as error:
            found = f"the block of {name} at byte {place.offset:,} of {place.file}: {error}"
            self._refuse("E-DCP-ARCHIVE", found, name=name, file=place.file)
        except OSError as error:
            self._refuse("E-DCP-READ", f"{place.file} cannot be read ({error.strerror})", file=place.file, name=name)

    def _refuse(self, code: str, found: str, **facts: object) -> NoReturn:
        raise refused_folder(self.folder, code, found, **facts)


def _tensor(fields: Pairs, places: dict[tuple[int, ...], DcpPlace]) -> DcpTensor:
    properties = fields.get("properties")
    if (
        not isinstance(properties, PickledCall)
        or properties.name != _PROPERTIES
        or not isinstance(properties.state, tuple)
    ):
        raise PickleRefused("a tensor has no properties")
    dtype = properties.state[0] if properties.state else None
    shape, chunks = _numbers(fields.get("size")), fields.get("chunks")
    if not isinstance(dtype, PickledName) or not isinstance(chunks, list) or isinstance(chunks, Pairs):
        raise PickleRefused("a tensor has no dtype or no blocks")
    blocks = []
    for chunk in chunks:
        own = _state(chunk, _CHUNK)
        offsets, sizes = _numbers(own.get("offsets")), _numbers(own.get("sizes"))
        inside = len(offsets) == len(sizes) == len(shape)
        if not inside or any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            raise PickleRefused(f"a block at {list(offsets)} is outside of its tensor of shape {list(shape)}")
        if math.prod(sizes):
            blocks.append((offsets, sizes))
    return DcpTensor(dtype.text, shape, tuple(blocks), places)


def _pairs(value: Any) -> Pairs:
    if not isinstance(value, Pairs):
        raise PickleRefused("a dict is missing")
    return value


def _state(value: Any, name: str, most: int = _MOST_FIELDS) -> Pairs:
    """Return the fields of an object of the class `name`."""
    if not isinstance(value, PickledCall) or value.name != name:
        raise PickleRefused(f"an object is not a {name.rpartition('.')[2]}")
    fields = _pairs(value.state)
    if len(fields) > most:
        raise PickleRefused(f"a {name.rpartition('.')[2]} has {len(fields):,} fields")
    return fields


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise PickleRefused("a name is not text")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    """Return a torch.Size, or a tuple, of a few numbers that are not negative."""
    if isinstance(value, PickledCall) and value.name == _SIZE and len(value.arguments) == 1:
        value = value.arguments[0]
    return numbers(value, _MOST_DIMS)
