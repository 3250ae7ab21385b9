"""The rules that a manifest fulfils even if it matches its own hash, and the error for a checkpoint that breaks one.

The rules keep a reader from opening a foreign file, allocating without bound, loading a tensor with a hole, or trusting
a ledger that lacks a step. No torch.
"""

import math
import re
from collections import Counter
from pathlib import Path

from ingot.errors import CheckpointError
from ingot.schema.checkpoint import (
    WEIGHTS,
    BlockLayout,
    CheckpointManifest,
    TensorEntry,
    file_of,
    key_of,
    pack_crc32,
    segment_file,
    unpack_crc32,
)
from ingot.schema.run_folder import CHECKPOINTS
from ingot.trainer.checkpoint.part import tiling_problem

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
FOLDER = re.compile(r"step-(\d{8,})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LEDGER = (
    "ingot ckpt repair RUN writes this file again from the order of samples; or restore it from a copy. Every later "
    "checkpoint lists it too: do not delete any, their weights may be sound"
)
_NEXT_OLDER = "delete or restore this folder; training then continues from the next older checkpoint"


def tensor_bytes(entry: TensorEntry) -> int:
    """Return the size of a tensor of a checkpoint, without what its files add."""
    return math.prod(entry.shape) * DTYPES[entry.dtype][0]


def check_rules(folder: Path | str, manifest: CheckpointManifest) -> None:
    """Raise CheckpointError unless the manifest of `folder` fulfils every rule. No file is opened.

    folder: for the error, the folder of the checkpoint or its place in a store.
    """
    named = FOLDER.fullmatch(str(folder).rpartition("/")[2])
    if named and int(named[1]) != manifest.step:
        raise damaged(folder, f"its manifest is for step {manifest.step}", "E-CKPT-STEP", step=manifest.step)
    holds = str(folder).split("/")[-2:-1]  # the folder of a run that this one is in
    if holds in ([CHECKPOINTS], [WEIGHTS]) and (holds == [WEIGHTS]) != (manifest.kind == WEIGHTS):
        what = "the weights alone" if manifest.kind == WEIGHTS else "a full checkpoint"
        raise damaged(folder, f"it is a save of {what}, in the folder {holds[0]}", "E-CKPT-KIND", kind=manifest.kind)
    if problem := _number_problem(manifest):
        raise damaged(folder, f"manifest.json: {problem}", "E-CKPT-MANIFEST")
    _check_ledger(folder, manifest)
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


def _number_problem(manifest: CheckpointManifest) -> str:
    """Return which number of the manifest is out of bounds, or which two contradict each other; "" if none."""
    step, world = manifest.step, manifest.world
    if step < 1:
        return f"step is {step}, but the first checkpoint is saved after step 1"
    if world < 1 or world != len(manifest.rng or manifest.files):
        return f"world is {world}, but it lists {len(manifest.rng or manifest.files)} ranks"
    names = {file_of(rank) for rank in range(world)}
    if foreign := manifest.files.keys() - names:
        return f"it lists {min(foreign)!r}, which is not a file of its {world} ranks"
    if not manifest.rng and (missing := names - manifest.files.keys()):  # in version 1 some ranks wrote no file
        return f"it does not list {min(missing)}"
    if any(size < 1 for size in manifest.layout.values()):
        return f"layout is {manifest.layout}, but a degree is at least 1"
    steps = [0, *(one.step for one in manifest.accepted or ()), step]
    if steps != sorted(set(steps)):
        return f"its accepted changes are of the steps {steps[1:-1]}"
    per_step = tokens_per_step(manifest)
    if manifest.tokens < 0 or (per_step and manifest.tokens != step * per_step):
        return f"tokens is {manifest.tokens}, but {step} steps of {per_step or 'any'} tokens were trained"
    return ""


def tokens_per_step(manifest: CheckpointManifest) -> int:
    """Return the number of tokens of a step by the settings of the manifest; 0 if they do not name it."""
    return global_batch(manifest) * _count(manifest, "train.seq_len")


def global_batch(manifest: CheckpointManifest) -> int:
    """Return the number of samples of a step by the settings of the manifest; 0 if they do not name it."""
    return _count(manifest, "train.global_batch")


def proven_steps(manifest: CheckpointManifest) -> int:
    """Return the steps that have to follow a checkpoint before its weights count as sound; 0 for weights alone."""
    return 0 if manifest.kind == WEIGHTS else _count(manifest, "guard.proven_steps")


def _count(manifest: CheckpointManifest, key: str) -> int:
    value = manifest.settings.get(key, 0)
    return value if type(value) is int and value > 0 else 0


def _check_ledger(folder: Path | str, manifest: CheckpointManifest) -> None:
    """Raise CheckpointError unless the segments cover the steps 1 to `step` without a gap, in files of the ledger.

    The manifest lists every segment with its hash, and its own hash covers the list. So a segment that was exchanged,
    left out or repeated is noticed without a reference from each segment to the one before.
    """
    if manifest.kind == WEIGHTS and not manifest.ledger:
        return
    expected = 1
    for segment in manifest.ledger:
        first, last = segment.first_step, segment.last_step
        if first != expected or last < first:
            what = f"its ledger continues with the steps {first} to {last} instead of step {expected}"
            raise damaged(folder, what, "E-CKPT-LEDGER", step=expected, first_step=first, last_step=last)
        if segment.file != segment_file(first, last) or not _SHA256.fullmatch(segment.sha256):
            what = f"its ledger lists {segment.file!r} for the steps {first} to {last}, not {segment_file(first, last)}"
            raise damaged(folder, what, "E-CKPT-LEDGER", step=first, file=segment.file)
        expected = last + 1
    if expected != manifest.step + 1:
        what = f"its ledger ends with step {expected - 1}, but the checkpoint is of step {manifest.step}"
        raise damaged(folder, what, "E-CKPT-LEDGER", step=expected - 1, expected=manifest.step)


def _check_tensors(folder: Path | str, manifest: CheckpointManifest) -> None:
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


def check_size(folder: Path, path: Path, name: str, expected: int) -> None:
    """Raise CheckpointError unless `path`, the file `name` of checkpoint `folder`, has `expected` bytes."""
    size = size_of(folder, path, name)
    if size != expected:
        raise wrong_size(folder, name, size, expected)


def size_of(folder: Path, path: Path, name: str) -> int:
    """Return the size of `path` in bytes, which checkpoint `folder` names `name`. Raises CheckpointError."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise damaged(folder, f"{name} is missing", "E-CKPT-FILE-MISSING", file=name) from None
    except OSError as error:
        raise damaged(folder, f"{name} cannot be read ({error.strerror})", "E-CKPT-READ", file=name) from None


def elsewhere(folder: Path, name: str) -> CheckpointError:
    """Return the error for a file that is not on this node, of a checkpoint whose files are on disks of nodes."""
    return CheckpointError(
        "E-CKPT-ELSEWHERE",
        f"checkpoint {folder}: {name} is not on the disks of this node",
        rule="with checkpoint.disks, the file of a rank is on a disk of the node of that rank",
        fix="run the command on that node; or, if the run has a store, fetch the checkpoint: ingot ckpt fetch RUN",
        path=str(folder),
        file=name,
    )


def wrong_size(folder: Path | str, name: str, size: int, expected: int) -> CheckpointError:
    """Return the error for a file of another size than was saved."""
    what = f"{name} has {size:,} bytes, but {expected:,} were saved"
    return damaged(folder, what, "E-CKPT-SIZE", file=name, bytes=size, expected=expected)


def damaged(folder: Path | str, what: str, code: str = "E-CKPT-DAMAGED", **facts: object) -> CheckpointError:
    """Return the error for a checkpoint that cannot be used. what: the damage. facts: the facts of the error."""
    return CheckpointError(
        code,
        f"checkpoint {folder}: {what}",
        rule="a checkpoint is used only if every byte is as it was saved",
        fix=_LEDGER if str(facts.get("file", "")).startswith("ledger/") else _NEXT_OLDER,
        path=str(folder),
        **facts,
    )


def upgraded(values: dict) -> dict:
    """Convert the values of a version 1 manifest, which lists file, key, offsets and sizes of each block, to version 2.

    Raises ValueError, KeyError, TypeError, AttributeError or OverflowError for values that version 1 never wrote.
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
