"""What makes a folder a checkpoint: its manifest, and files that hold exactly the bytes the manifest names.

    checkpoints/step-00000400/
        rank-00000.safetensors    what one rank wrote; plain safetensors
        rank-00001.safetensors
        manifest.json             written last, carries a hash of itself

No torch here: listing and verifying must work where nothing is trained. Nothing is ever unpickled.
"""

import json
import math
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from ingot.checkpoint.blocks import tiling_problem
from ingot.config import from_dict, to_dict
from ingot.errors import CheckpointError, ConfigError, IngotError, require
from ingot.schema.checkpoint import CheckpointManifest, Chunk, FileEntry
from ingot.storage import canonical_json, sha256_bytes, sha256_file, write_json

MANIFEST = "manifest.json"
VERSION = 1
# Bytes per element, by torch's name and safetensors' name of the type.
DTYPES = {
    "float64": (8, "F64"),
    "float32": (4, "F32"),
    "bfloat16": (2, "BF16"),
    "float16": (2, "F16"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "int64": (8, "I64"),
    "int32": (4, "I32"),
    "int16": (2, "I16"),
    "int8": (1, "I8"),
    "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
}
_FOLDER = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_NEXT_OLDER = "delete or restore this folder; training falls back to the next older checkpoint by itself"


@dataclass(frozen=True)
class Listed:
    """A folder named like a checkpoint. `manifest` is None and `damage` says why when it cannot be one."""

    path: Path
    step: int
    manifest: CheckpointManifest | None
    damage: str

    @property
    def bytes(self) -> int:
        return sum(f.bytes for f in self.manifest.files.values()) if self.manifest else 0


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    values = to_dict(manifest)
    write_json(folder / MANIFEST, values | {"sha256": _hash(values)})


def _hash(values: dict) -> str:
    return sha256_bytes(canonical_json(values).encode("utf-8", "surrogatepass"))


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of checkpoint `folder`. Raises CheckpointError when it is missing, damaged or breaks a rule.

    Tensor files are looked at by name and size only; `verify_checkpoint` reads them.
    """
    values = _read_values(folder)
    try:
        manifest = from_dict(CheckpointManifest, values)
    except ConfigError as error:
        raise _damaged(folder, f"manifest.json: {error.found}") from None
    _check_rules(folder, manifest)
    return manifest


def is_finished(folder: Path) -> bool:
    """Whether `folder` has a manifest that matches its own hash, and files of the sizes it names. A quick look."""
    try:
        files = _read_values(folder)["files"]
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (CheckpointError, OSError, KeyError, TypeError, AttributeError):
        return False


def _read_values(folder: Path) -> dict:
    """The manifest's values, without its own hash, which was right. Raises CheckpointError."""
    try:
        values = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise _damaged(folder, "it has no manifest.json, so it was never finished") from None
    except OSError as error:
        raise _damaged(folder, f"manifest.json cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise _damaged(folder, "manifest.json is not JSON") from None
    claimed = values.pop("sha256", "") if isinstance(values, dict) else ""
    if _hash(values) != claimed:
        raise _damaged(folder, "manifest.json does not match its own hash")
    if values.get("version") != VERSION:
        raise _damaged(folder, f"its format is version {values.get('version')!r}, this ingot reads {VERSION}")
    return values


def _check_rules(folder: Path, manifest: CheckpointManifest) -> None:
    # Everything that could make a reader open a foreign file, allocate without bound, or leave a hole.
    named = _FOLDER.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise _damaged(folder, f"its manifest is of step {manifest.step}")
    for name, entry in manifest.files.items():
        if not _FILE.fullmatch(name):
            raise _damaged(folder, f"manifest.json names the file {name!r}")
        _check_size(folder, name, entry)
    stored = dict.fromkeys(manifest.files, 0)
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in DTYPES:
            raise _damaged(folder, f"tensor {name} has the unknown type {tensor.dtype!r}")
        for chunk in tensor.chunks:
            if chunk.file not in stored or not _inside(chunk, tensor.shape):
                raise _damaged(folder, f"tensor {name} has a block outside the tensor or its files")
            stored[chunk.file] += math.prod(chunk.sizes) * DTYPES[tensor.dtype][0]
        if problem := tiling_problem(tensor.shape, [(c.offsets, c.sizes) for c in tensor.chunks]):
            raise _damaged(folder, f"the blocks of tensor {name} {problem}")
    for name, total in stored.items():
        if total > manifest.files[name].bytes:
            raise _damaged(folder, f"the tensors in {name} are larger than the file")


def _inside(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        return False
    return all(
        o >= 0 and s >= 0 and o + s <= whole for o, s, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )


def _check_size(folder: Path, name: str, entry: FileEntry) -> None:
    try:
        size = (folder / name).stat().st_size
    except FileNotFoundError:
        raise _damaged(folder, f"{name} is missing") from None
    except OSError as error:
        raise _damaged(folder, f"{name} cannot be read ({error.strerror})") from None
    if size != entry.bytes:
        raise _damaged(folder, f"{name} has {size:,} bytes, {entry.bytes:,} were saved")


def verify_file(folder: Path, manifest: CheckpointManifest, name: str) -> None:
    """Read file `name` and hold it against the manifest. Raises CheckpointError naming the file and the tensor."""
    entry = manifest.files[name]
    _check_size(folder, name, entry)
    try:
        same = sha256_file(folder / name) == entry.sha256
    except OSError as error:
        raise _damaged(folder, f"{name} cannot be read ({error.strerror})") from None
    if not same:
        raise _damaged(
            folder, f"{name} does not hold the bytes that were saved ({_where_it_differs(folder, manifest, name)})"
        )
    _check_header(folder, manifest, name)


def _blocks_of(manifest: CheckpointManifest, name: str) -> list[tuple[str, str, Chunk]]:
    return [(t, entry.dtype, c) for t, entry in manifest.tensors.items() for c in entry.chunks if c.file == name]


def _check_header(folder: Path, manifest: CheckpointManifest, name: str) -> None:
    safetensors = require("safetensors", "train")
    blocks = _blocks_of(manifest, name)
    try:
        with safetensors.safe_open(folder / name, framework="np") as file:
            keys = set(file.keys())
            for tensor, dtype, chunk in blocks:
                if chunk.key not in keys:
                    raise _damaged(folder, f"{name} does not hold tensor {tensor}")
                part = file.get_slice(chunk.key)
                if tuple(part.get_shape()) != chunk.sizes or part.get_dtype() != DTYPES[dtype][1]:
                    raise _damaged(folder, f"{name} holds tensor {tensor} in another shape or type")
    except safetensors.SafetensorError as error:
        raise _damaged(folder, f"{name} is not a safetensors file ({error})") from None


def _where_it_differs(folder: Path, manifest: CheckpointManifest, name: str) -> str:
    """The tensor that was damaged, by the checksum of each block; the header itself may be the damage."""
    try:
        with (folder / name).open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(header_bytes, manifest.files[name].bytes)))
            for tensor, _, chunk in _blocks_of(manifest, name):
                first, end = header[chunk.key]["data_offsets"]
                file.seek(8 + header_bytes + first)
                if zlib.crc32(file.read(min(end - first, manifest.files[name].bytes))) != chunk.crc32:
                    return f"tensor {tensor}"
    except (ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError):
        return "its header"
    return "its header"


def verify_checkpoint(path: Path) -> CheckpointManifest:
    """Read and hash every byte of checkpoint `path`. Raises CheckpointError at the first file that does not verify."""
    manifest = read_manifest(path)
    for name in sorted(manifest.files):
        verify_file(path, manifest, name)
    return manifest


def candidate_folders(checkpoints: Path) -> list[Path]:
    """Folders named like checkpoints, newest first. Says nothing about what is in them."""
    if not checkpoints.is_dir():
        return []
    found = [p for p in checkpoints.iterdir() if _FOLDER.fullmatch(p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


def list_checkpoints(checkpoints: Path) -> list[Listed]:
    """Every checkpoint below `checkpoints`, newest first: manifests are read, tensor files only measured."""
    listed = []
    for path in candidate_folders(checkpoints):
        step = int(path.name.removeprefix("step-"))
        try:
            listed.append(Listed(path, step, read_manifest(path), ""))
        except IngotError as error:
            listed.append(Listed(path, step, None, error.found.partition(": ")[2] or error.found))
    return listed


def _damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {folder}: {what}",
        rule="a checkpoint is used only if every byte is what was saved",
        fix=_NEXT_OLDER,
    )
