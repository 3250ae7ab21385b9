"""The manifest of a checkpoint, and the check that the files contain exactly the bytes that were saved.

    checkpoints/step-00000400/
        rank-00000.safetensors    what one rank wrote; plain safetensors
        rank-00001.safetensors
        manifest.json             written last, contains a hash of itself

A cut is the division of a tensor into blocks, which tensors of equal shape may share. No torch: listing and verifying
work on machines that do not train. Nothing is ever unpickled.
"""

import json
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ingot.config import from_dict, to_dict
from ingot.errors import CheckpointError, ConfigError, IngotError, require
from ingot.schema.checkpoint import (
    BlockLayout,
    CheckpointManifest,
    FileEntry,
    file_of,
    key_of,
    pack_crc32,
    unpack_crc32,
)
from ingot.storage import canonical_json, sha256_bytes, sha256_file, write_atomic
from ingot.trainer.checkpoint.part import tiling_problem

MANIFEST = "manifest.json"
VERSION = 2
# torch's name of a dtype -> bytes per element, safetensors' name of the dtype.
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
_NEXT_OLDER = "delete or restore this folder; training then continues from the next older checkpoint"


@dataclass(frozen=True)
class ListedCheckpoint:
    """A folder with the name of a checkpoint. If it is damaged, `manifest` is None and `damage` is the reason."""

    path: Path
    step: int
    manifest: CheckpointManifest | None
    damage: str

    @property
    def bytes(self) -> int:
        return sum(f.bytes for f in self.manifest.files.values()) if self.manifest else 0


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest with one line per key, which people can read and `is_finished` can search."""
    values = to_dict(manifest)
    lines = [f"{canonical_json(k)}:{canonical_json(v)}" for k, v in (values | {"sha256": _hash(values)}).items()]
    write_atomic(folder / MANIFEST, "{\n" + ",\n".join(lines) + "\n}\n")


def _hash(values: dict) -> str:
    return sha256_bytes(canonical_json(values).encode("utf-8", "surrogatepass"))


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of checkpoint `folder`. Raises CheckpointError if it is missing, damaged or breaks a rule.

    Only the names and sizes of the tensor files are checked; `verify_checkpoint` reads the files.
    """
    values = _read_values(folder)
    try:
        manifest = from_dict(CheckpointManifest, upgraded(values) if values["version"] == 1 else values)
    except ConfigError as error:
        raise damaged(folder, f"manifest.json: {error.found}", "E-CKPT-MANIFEST") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, f"manifest.json of version 1: {error}", "E-CKPT-MANIFEST") from None
    _check_rules(folder, manifest)
    return manifest


def is_finished(folder: Path) -> bool:
    """Return whether `folder` has a manifest and all files have the sizes listed there. No hash is computed."""
    try:
        files = _read_key(folder, "files")
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def is_suspect(folder: Path) -> bool:
    """Return whether the weights of checkpoint `folder` were judged suspect. A damaged manifest is not: reading it will
    name the damage. No hash is computed."""
    try:
        return _read_key(folder, "health")["state"] == "suspect"
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _read_key(folder: Path, key: str) -> dict:
    """Read only one key of the manifest, which is one line."""
    mark = f'"{key}":'.encode()
    with (folder / MANIFEST).open("rb") as file:
        line = next((line for line in file if line.startswith(mark)), None)
        file.seek(-3, 2)
        if line is not None and file.read() == b"\n}\n":
            return json.loads(line.removeprefix(mark).rstrip(b",\n"))
    return _read_values(folder)[key]  # a manifest of an earlier version, or an incomplete manifest


def _read_values(folder: Path) -> dict:
    """Read the manifest, check its hash, and return the values without the hash. Raises CheckpointError."""
    try:
        values = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise damaged(folder, "it has no manifest.json, so it was never finished", "E-CKPT-UNFINISHED") from None
    except OSError as error:
        raise damaged(
            folder, f"manifest.json cannot be read ({error.strerror})", "E-CKPT-READ", file=MANIFEST
        ) from None
    except (ValueError, RecursionError):
        raise damaged(folder, "manifest.json is not JSON", "E-CKPT-MANIFEST") from None
    claimed = values.pop("sha256", "") if isinstance(values, dict) else ""
    if _hash(values) != claimed:
        raise damaged(folder, "manifest.json does not match its own hash", "E-CKPT-MANIFEST-HASH")
    if values.get("version") not in (1, VERSION):
        found = values.get("version")
        raise damaged(
            folder,
            f"its format is version {found!r}, but this version of ingot reads 1 to {VERSION}",
            "E-CKPT-VERSION",
            version=found if isinstance(found, int | str) else repr(found),
        )
    return values


def _check_rules(folder: Path, manifest: CheckpointManifest) -> None:
    # The rules keep a reader from opening a foreign file, allocating without bound, or leaving a hole.
    named = _FOLDER.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise damaged(folder, f"its manifest is for step {manifest.step}", "E-CKPT-STEP", step=manifest.step)
    for name, entry in manifest.files.items():
        if not _FILE.fullmatch(name):
            raise damaged(folder, f"manifest.json lists {name!r}, not a file name", "E-CKPT-MANIFEST", file=name)
        _check_size(folder, name, entry)
    for cut in manifest.cuts:
        if not len(cut.ranks) == len(cut.offsets) == len(cut.sizes):
            raise damaged(folder, "a cut lists different numbers of ranks, offsets and sizes", "E-CKPT-MANIFEST")
    _check_tensors(folder, manifest)
    stored: Counter[int] = Counter()
    for (number, dtype), tensors in Counter((t.cut, t.dtype) for t in manifest.tensors.values()).items():
        cut = manifest.cuts[number]
        for rank, sizes in zip(cut.ranks, cut.sizes, strict=True):
            stored[rank] += tensors * math.prod(sizes) * DTYPES[dtype][0]
    for rank, total in stored.items():
        if total > manifest.files[file_of(rank)].bytes:
            raise damaged(
                folder,
                f"the tensors in {file_of(rank)} are larger than the file",
                "E-CKPT-MANIFEST",
                file=file_of(rank),
            )


def _check_tensors(folder: Path, manifest: CheckpointManifest) -> None:
    problems: dict[tuple[int, tuple[int, ...]], str] = {}  # thousands of tensors share few cuts
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in DTYPES:
            raise damaged(
                folder, f"tensor {name} has the unknown dtype {tensor.dtype!r}", "E-CKPT-MANIFEST", tensor=name
            )
        if not 0 <= tensor.cut < len(manifest.cuts):
            raise damaged(folder, f"tensor {name} names a cut that does not exist", "E-CKPT-MANIFEST", tensor=name)
        cut, kind = manifest.cuts[tensor.cut], (tensor.cut, tensor.shape)
        if kind not in problems:
            problems[kind] = _cut_problem(manifest, cut, tensor.shape)
        if problems[kind]:
            problem = problems[kind].format(name=f"tensor {name}")
            raise damaged(folder, problem, "E-CKPT-MANIFEST", tensor=name)
        try:
            complete = len(unpack_crc32(tensor.crc32)) == len(cut.ranks)
        except ValueError:
            complete = False
        if not complete:
            raise damaged(folder, f"tensor {name} does not have one checksum per block", "E-CKPT-MANIFEST", tensor=name)


def _cut_problem(manifest: CheckpointManifest, cut: BlockLayout, shape: tuple[int, ...]) -> str:
    blocks = list(zip(cut.offsets, cut.sizes, strict=True))
    if not all(_inside(*block, shape) for block in blocks) or not {*map(file_of, cut.ranks)} <= manifest.files.keys():
        return "{name} has a block outside the tensor or its files"
    problem = tiling_problem(shape, blocks)
    return problem and f"the blocks of {{name}} {problem}"


def _inside(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if not len(offsets) == len(sizes) == len(shape):
        return False
    return all(o >= 0 and s >= 0 and o + s <= whole for o, s, whole in zip(offsets, sizes, shape, strict=True))


def _check_size(folder: Path, name: str, entry: FileEntry) -> None:
    try:
        size = (folder / name).stat().st_size
    except FileNotFoundError:
        raise damaged(folder, f"{name} is missing", "E-CKPT-FILE-MISSING", file=name) from None
    except OSError as error:
        raise damaged(folder, f"{name} cannot be read ({error.strerror})", "E-CKPT-READ", file=name) from None
    if size != entry.bytes:
        raise damaged(
            folder,
            f"{name} has {size:,} bytes, but {entry.bytes:,} were saved",
            "E-CKPT-SIZE",
            file=name,
            bytes=size,
            expected=entry.bytes,
        )


_BlockNumber = tuple[str, int]  # name of the tensor, number of the block in its cut


def verify_files(folder: Path, manifest: CheckpointManifest, names: Iterable[str]) -> None:
    """Read the files `names` and compare them with the manifest. Raises CheckpointError naming file and tensor."""
    names = sorted(names)
    blocks = _blocks_by_file(manifest, set(names))
    for name in names:
        _verify_file(folder, manifest, name, blocks[name])


def _blocks_by_file(manifest: CheckpointManifest, names: set[str]) -> dict[str, list[_BlockNumber]]:
    """Return file -> its blocks, only for the files `names`, which are the ones that this rank verifies."""
    tensors = defaultdict(list)
    for name, entry in manifest.tensors.items():
        tensors[entry.cut].append(name)
    blocks: dict[str, list[_BlockNumber]] = {name: [] for name in names}
    for number, cut in enumerate(manifest.cuts):
        for i, rank in enumerate(cut.ranks):
            if (file := file_of(rank)) in blocks:
                blocks[file] += [(name, i) for name in tensors[number]]
    return blocks


def _verify_file(folder: Path, manifest: CheckpointManifest, name: str, blocks: list[_BlockNumber]) -> None:
    entry = manifest.files[name]
    _check_size(folder, name, entry)
    try:
        same = sha256_file(folder / name) == entry.sha256
    except OSError as error:
        raise damaged(folder, f"{name} cannot be read ({error.strerror})", "E-CKPT-READ", file=name) from None
    if not same:
        part = _damaged_part(folder, manifest, name, blocks)
        raise damaged(
            folder,
            f"{name} differs from the bytes that were saved (damaged: {part})",
            "E-CKPT-HASH",
            file=name,
            part=part,
        )
    _check_header(folder, manifest, name, blocks)


def _check_header(folder: Path, manifest: CheckpointManifest, name: str, blocks: list[_BlockNumber]) -> None:
    safetensors = require("safetensors", "train")
    try:
        with safetensors.safe_open(folder / name, framework="np") as file:
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


def _damaged_part(folder: Path, manifest: CheckpointManifest, name: str, blocks: list[_BlockNumber]) -> str:
    """Find the damaged tensor by the checksum of each block; if no block is damaged, name the header."""
    try:
        with (folder / name).open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(header_bytes, manifest.files[name].bytes)))
            for tensor, number in blocks:
                first, end = header[manifest.chunk(tensor, number).key]["data_offsets"]
                file.seek(8 + header_bytes + first)
                if zlib.crc32(file.read(min(end - first, manifest.files[name].bytes))) != _crc32(
                    manifest, tensor, number
                ):
                    return f"tensor {tensor}"
    except (ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError):
        return "its header"
    return "its header or its random state"


def _crc32(manifest: CheckpointManifest, tensor: str, number: int) -> int:
    return unpack_crc32(manifest.tensors[tensor].crc32)[number]


def verify_checkpoint(path: Path) -> CheckpointManifest:
    """Read and hash every byte of checkpoint `path`. Raises CheckpointError at the first damaged file."""
    manifest = read_manifest(path)
    verify_files(path, manifest, manifest.files)
    return manifest


def candidate_folders(checkpoints: Path) -> list[Path]:
    """Return the folders that have the name of a checkpoint, newest first, without opening them."""
    if not checkpoints.is_dir():
        return []
    found = [p for p in checkpoints.iterdir() if _FOLDER.fullmatch(p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


def list_checkpoints(checkpoints: Path) -> list[ListedCheckpoint]:
    """List the checkpoints in `checkpoints`, newest first. Reads the manifests, but only the sizes of tensor files."""
    listed = []
    for path in candidate_folders(checkpoints):
        step = int(path.name.removeprefix("step-"))
        try:
            listed.append(ListedCheckpoint(path, step, read_manifest(path), ""))
        except IngotError as error:
            listed.append(ListedCheckpoint(path, step, None, error.found.partition(": ")[2] or error.found))
    return listed


def damaged(folder: Path, what: str, code: str = "E-CKPT-DAMAGED", **facts: object) -> CheckpointError:
    """Return the error for a checkpoint that cannot be used. what: the damage. facts: the facts of the error."""
    return CheckpointError(
        code,
        f"checkpoint {folder}: {what}",
        rule="a checkpoint is used only if every byte is as it was saved",
        fix=_NEXT_OLDER,
        path=str(folder),
        **facts,
    )


def upgraded(values: dict) -> dict:
    """Convert the values of a version 1 manifest, which lists file, key, offsets and sizes of each block, to version 2.

    Raises ValueError, KeyError, TypeError or AttributeError for values that version 1 never wrote.
    """
    numbers: dict[tuple, int] = {}
    tensors = {}
    for name, entry in values["tensors"].items():
        rows, checksums = [], []
        for chunk in entry["chunks"]:
            rank = int(chunk["file"].removeprefix("rank-").removesuffix(".safetensors"))
            if chunk["file"] != file_of(rank) or chunk["key"] != key_of(name, chunk["offsets"]):
                raise ValueError(f"tensor {name} has a block {chunk['key']!r} in {chunk['file']!r}")
            rows.append((tuple(chunk["offsets"]), tuple(chunk["sizes"]), rank))
            checksums.append(chunk["crc32"])
        tensors[name] = {
            "dtype": entry["dtype"],
            "shape": entry["shape"],
            "cut": numbers.setdefault(tuple(rows), len(numbers)),
            "crc32": pack_crc32(checksums),
        }
    cuts = [
        {"offsets": [row[0] for row in rows], "sizes": [row[1] for row in rows], "ranks": [row[2] for row in rows]}
        for rows in numbers
    ]
    return values | {"version": 2, "world": len(values["rng"]), "cuts": cuts, "tensors": tensors}
