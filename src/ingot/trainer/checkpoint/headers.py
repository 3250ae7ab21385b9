"""The headers of tensor files compared with the manifest, and a limit of the memory that JSON takes. No torch.

Python's objects take up to 25 times the bytes of the JSON that they are read from. So the memory is estimated from the
bytes, by counting, before anything is read from them: a small checkpoint cannot come with a manifest or a header that
takes more than LEAST_BYTES, and a large one with none that takes more than twice its files. The same holds in a store,
where the listing has the sizes of the files.
"""

import json
import zlib
from pathlib import Path

from ingot.errors import require
from ingot.schema.checkpoint import CheckpointManifest, unpack_crc32
from ingot.trainer.checkpoint.rules import DTYPES, damaged

LEAST_BYTES = 32 << 20
BlockNumber = tuple[str, int]  # name of the tensor, number of the block in its cut
_OBJECT_BYTES = {b"[": 96, b"{": 230, b",": 16, b":": 64, b'"': 26}  # a container, an entry, a string without its text
_MOST_PER_BYTE = 240
_CONSTANT_BYTES = 8 << 10
_DIGIT_BYTES = 11  # numbers above 256, of three digits, are objects
_WIDE_TEXT = 8  # a text with one wide character has four bytes for each; there are two copies at a time


def json_memory(text: bytes) -> int:
    """Return at least the memory that the values of the JSON `text` take while it is read [bytes]."""
    objects = sum(text.count(mark) * size for mark, size in _OBJECT_BYTES.items())
    digits = sum(text.count(b"%d" % digit) for digit in range(10))
    letters = len(text) * (1 if text.isascii() and b"\\u" not in text else _WIDE_TEXT)
    return _CONSTANT_BYTES + objects + digits * _DIGIT_BYTES + letters


def takes_too_much(text: bytes, file_bytes: int) -> bool:
    """Return whether the JSON `text` would take more memory than LEAST_BYTES and twice `file_bytes`."""
    most = _most_memory(file_bytes)
    return len(text) * _MOST_PER_BYTE > most and json_memory(text) > most


def most_text(file_bytes: int) -> int:
    """Return the longest JSON that is read beside files of `file_bytes` [bytes]: half of the memory that it may take,
    because a text that arrives in chunks is in memory twice when it is put together."""
    return _most_memory(file_bytes) // 2


def manifest_problem(text: bytes, file_bytes: int) -> str:
    """Return why a checkpoint of `file_bytes` may not have the manifest `text`: its memory; "" if it may."""
    if not takes_too_much(text, file_bytes):
        return ""
    return f"manifest.json needs {json_memory(text):,} bytes of memory, and all files have {file_bytes:,}"


def _most_memory(file_bytes: int) -> int:
    return max(LEAST_BYTES, 2 * file_bytes)


def check_header(folder: Path, path: Path, manifest: CheckpointManifest, name: str, blocks: list[BlockNumber]) -> None:
    """Raise CheckpointError unless the tensor file `path` has the blocks of `manifest`. name: of the file there."""
    safetensors = require("safetensors", "train")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            keys = set(file.keys())
            for tensor, number in blocks:
                chunk, dtype = manifest.chunk(tensor, number), manifest.tensors[tensor].dtype
                if chunk.key not in keys:
                    raise damaged(folder, f"{name} does not contain tensor {tensor}", "E-CKPT-HEADER", file=name)
                part = file.get_slice(chunk.key)
                if tuple(part.get_shape()) != chunk.sizes or part.get_dtype() != DTYPES[dtype][1]:
                    problem = f"{name} contains tensor {tensor} with another shape or dtype"
                    raise damaged(folder, problem, "E-CKPT-HEADER", file=name)
    except safetensors.SafetensorError as error:
        raise damaged(folder, f"{name} is not a safetensors file ({error})", "E-CKPT-HEADER", file=name) from None


def damaged_part(path: Path, manifest: CheckpointManifest, name: str, blocks: list[BlockNumber]) -> str:
    """Find the damaged tensor by the checksum of each block; if no block is damaged, name the header."""
    size = manifest.files[name].bytes
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            text = file.read(min(header_bytes, size))
            if takes_too_much(text, size):
                return "its header"
            header = json.loads(text)
            for tensor, number in blocks:
                first, end = header[manifest.chunk(tensor, number).key]["data_offsets"]
                file.seek(8 + header_bytes + first)
                expected = unpack_crc32(manifest.tensors[tensor].crc32)[number]
                if zlib.crc32(file.read(min(end - first, size))) != expected:
                    return f"tensor {tensor}"
    except (ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError):
        return "its header"
    return "its header or its random state"
