"""Any manifest, header of a tensor file and record of an attempt, also with hashes that fit, is read or refused with a
CheckpointError, on the disk and in a store, with little memory: never a crash, never an allocation of the size that a
number claims.

`make test` draws some hundred; the marker `nightly` draws many. All of a test are read in one forked process whose
address space is limited, so that an allocation outside of Python and a crash show as well.
"""

import json
import os
import random
import resource
import shutil
import traceback
import tracemalloc
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.expect import refused

from ingot.errors import CheckpointError
from ingot.schema.checkpoint import FileEntry, file_of
from ingot.schema.run import RemoteCheckpoints
from ingot.schema.run_folder import RunFolder
from ingot.schema.sealed import sealed
from ingot.storage import canonical_json, sha256_bytes, sha256_file
from ingot.stores.memory import MemoryStore
from ingot.stores.store import NotStored
from ingot.trainer.checkpoint.fence import Epoch, newest_local_epoch, record_name
from ingot.trainer.checkpoint.manifest import (
    MANIFEST,
    adopted_hashes,
    grade_of_doubt,
    is_finished,
    list_checkpoints,
    read_manifest,
    verify_checkpoint,
    write_manifest,
)
from ingot.trainer.checkpoint.places import with_hash
from ingot.trainer.checkpoint.reader import read_blocks, restore_random
from ingot.trainer.checkpoint.remote import RemoteTier
from ingot.trainer.checkpoint.state import StateBlock

GOLDEN = Path(__file__).parents[3] / "golden"
RUNS = ("dense-2-ranks", "experts-1-rank", "old/first", "old/layouts")  # old/first: version 1
FEW, MANY = 40, 6_000
# Beyond twice the checkpoint: buffers of reading, and for each byte of the manifest the objects of Python it becomes.
CONSTANT_BYTES, OBJECTS_PER_BYTE = 256 << 10, 24
NATIVE_BYTES = 64 << 20
DEEP = "@deep@"
RECORD = record_name(2)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "int64": torch.int64}


def deep(draw: random.Random) -> str:
    count = draw.choice([50, 300, 700, 900, 950, 980, 990, 1100, 5_000])
    return "[" * count + "]" * count


def strange(draw: random.Random) -> object:
    numbers = [0, -1, 1, 2, 3, 7, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, -(2**63), 10**4299, 10**4300 - 1]
    floats = [1e308, 5e-324, float("nan"), float("inf"), 1.0, 2.0, True, False, None]
    texts = [
        "",
        "\ud800",
        "\x00",
        "é" * 99,
        "../../etc/passwd",
        "rank-00000.safetensors",
        "x" * 5_000,
        "float64",
        "AAAA",
    ]
    others = [[], {}, [[]], [-1], [2**40, 2**40], {"a": 1}, [0] * 2_000, [[0]] * 300, ["0"] * 9, DEEP]
    return draw.choice(draw.choice([numbers, numbers, floats, texts, others]))


def places(values: object, prefix: tuple = ()) -> list[tuple]:
    """Return the paths of all values inside of `values`."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [place for key, value in pairs for place in ((*prefix, key), *places(value, (*prefix, key)))]


def changed(values: dict, draw: random.Random) -> dict:
    """Return a copy with one to three changes at random places."""
    values = json.loads(json.dumps(values))
    for _ in range(draw.randint(1, 3)):
        known = places(values)
        if not known:
            break
        # Half of the changes near the top: most places are deep inside of long lists.
        place = draw.choice([one for one in known if len(one) <= 2] if draw.random() < 0.5 else known)
        *above, last = place
        inside = values
        for key in above:
            inside = inside[key]
        act = draw.randrange(6)
        if act <= 2:
            inside[last] = strange(draw)
        elif act == 3:
            del inside[last]
        elif act == 4 and isinstance(inside[last], int | float):
            inside[last] = draw.choice([inside[last] + 1, inside[last] - 1, -inside[last], inside[last] * 2**40])
        elif isinstance(inside, dict):
            inside[draw.choice(["", "x", "\ud800", "rank-1_0.safetensors", *map(str, inside)])] = inside.pop(last)
        else:
            inside *= draw.choice([0, 2, 50])
    return values


def with_own_hash(values: dict, draw: random.Random) -> bytes:
    """Return the values as a manifest whose hash fits."""
    nested = deep(draw)
    text = canonical_json(values).replace(f'"{DEEP}"', nested)
    digest = sha256_bytes(text.encode("utf-8", "surrogatepass"))
    if draw.random() < 0.5:
        comma = "," if values else ""
        return f'{text[:-1]}{comma}"sha256":"{digest}"}}'.encode("utf-8", "surrogatepass")
    lines = [f"{canonical_json(key)}:{canonical_json(value)}" for key, value in (values | {"sha256": digest}).items()]
    whole = "{\n" + ",\n".join(lines) + "\n}\n"  # as it is written, so that single keys are read
    return whole.replace(f'"{DEEP}"', nested).encode("utf-8", "surrogatepass")


def with_noise(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes with some of them changed, left out or repeated."""
    noisy = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(noisy) + 1)
        end = min(len(noisy), at + draw.choice([1, 8, 100, 10_000]))
        noisy[at:end] = draw.choice([b"", draw.randbytes(end - at), noisy[at:end] * 2, b"[" * 2_000, b"\xff"])
    return bytes(noisy)


def use(path: Path) -> None:
    """Do with a checkpoint what a run, a listing and an export do with it. Raises CheckpointError if it is refused."""
    assert is_finished(path) in (True, False) and grade_of_doubt(path) in (0, 1, 2)
    assert adopted_hashes(path.parent).keys() <= {str(int(path.name.removeprefix("step-")))}
    list_checkpoints(path.parent)
    manifest = verify_checkpoint(path)
    blocks = [
        StateBlock(name, entry.shape, (0,) * len(entry.shape), torch.empty(entry.shape, dtype=DTYPES[entry.dtype]))
        for name, entry in manifest.tensors.items()
        if entry.dtype in DTYPES
    ]
    read_blocks(path, manifest, blocks)
    for rank in range(manifest.world):
        restore_random(path, manifest, rank)


def stored(path: Path) -> MemoryStore:
    """Return a store with a checkpoint, its ledger and the record of the run, under the names that an upload gives."""
    run, store = path.parent.parent, MemoryStore()
    for file in (*path.iterdir(), *RunFolder(run).ledger.iterdir()):
        name = file.name if file.name == MANIFEST else with_hash(file.name, sha256_file(file))
        store.write(f"{file.parent.relative_to(run)}/{name}", [file.read_bytes()])
    if (run / RECORD).exists():
        store.write(RECORD, [(run / RECORD).read_bytes()])
    return store


def bring(store: MemoryStore, root: Path) -> None:
    """Do with a stored checkpoint what a listing and a start on an empty disk do with it. Raises CheckpointError and
    NotStored if it is refused."""
    shutil.rmtree(root, ignore_errors=True)
    folder = RunFolder(root)
    folder.checkpoints.mkdir(parents=True)
    tier = RemoteTier(folder, store, RemoteCheckpoints(url="s3://bucket/run"))
    tier._pace.workers = lambda: nullcontext(SimpleNamespace(map=map))  # no thread can begin with so little memory
    tier.stored()
    tier.retained()
    tier.fetch_newest()


def change_manifest(path: Path, draw: random.Random) -> None:
    whole = (path / MANIFEST).read_bytes()
    values = json.loads(whole)
    values.pop("sha256")
    data = with_noise(whole, draw) if draw.random() < 0.2 else with_own_hash(changed(values, draw), draw)
    (path / MANIFEST).write_bytes(data)


def change_header(path: Path, draw: random.Random) -> None:
    manifest = read_manifest(path)
    name = draw.choice(sorted(manifest.files))
    data = (path / name).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    if draw.random() < 0.2:
        header = with_noise(data[8:end], draw)
    else:
        header = json.dumps(changed(json.loads(data[8:end]), draw)).replace(f'"{DEEP}"', deep(draw)).encode()
    length = draw.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1]) if draw.random() < 0.1 else len(header)
    rest = draw.choice([data[end:], data[end:], data[end:-8], b""])
    (path / name).write_bytes(length.to_bytes(8, "little") + header + rest)
    if draw.random() < 0.7:  # the manifest lists this file, with its hash
        found = (path / name).read_bytes()
        entry = FileEntry(bytes=len(found), sha256=sha256_bytes(found))
        write_manifest(path, replace(manifest, files=manifest.files | {name: entry}))
    elif draw.random() < 0.5:  # of the same size, so that the damaged part is looked for
        entry = replace(manifest.files[name], bytes=(path / name).stat().st_size)
        write_manifest(path, replace(manifest, files=manifest.files | {name: entry}))


def change_record(path: Path, draw: random.Random) -> None:
    record = path.parent.parent / RECORD
    record.parent.mkdir()
    step = int(path.name.removeprefix("step-"))
    values = asdict(Epoch(epoch=2, holder="a", adopted={str(step - 1): "", "1": ""}, weights={"1": ""}))
    if draw.random() < 0.2:
        record.write_bytes(with_noise(json.dumps(sealed(values)).encode(), draw))
        return
    if draw.random() < 0.3:
        key = draw.choice(["9" * draw.choice([9, 18, 19, 5_000]), "-1", "²", "٣", "\ud800"])
        values["adopted"][key] = ""
    values = changed(values, draw)
    text = json.dumps(values if draw.random() < 0.3 else sealed(values))  # earlier versions wrote no hash
    record.write_text(text.replace(f'"{DEEP}"', deep(draw)))
    if draw.random() < 0.5:  # of the attempt before, so that it counts only if the record has it
        write_manifest(path, replace(read_manifest(path), epoch=1))


def peak_bytes(path: Path, store: MemoryStore) -> int:
    """Return the most memory that Python has at a time while the checkpoint is used, in bytes.

    Names of files are in the interpreter's table of strings (sys.intern, by pathlib), 3.8 MB in one piece, which it
    makes anew after every 120,000 of them: the second measurement of an example does not have it.
    """
    tracemalloc.start()
    try:
        newest_local_epoch(path.parent.parent)
        with suppress(CheckpointError):
            use(path)
        with suppress(CheckpointError, NotStored):
            bring(store, path.parents[2] / "other")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def read_all(change, root: Path, first: int, count: int) -> None:
    """Read the drawn examples `first` to `first + count`; the number of an example draws it alone."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    for number in range(first, first + count):
        draw = random.Random(f"{change.__name__} {number}")
        run = root / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(root / draw.choice(RUNS), run)
        (path,) = (run / "checkpoints").iterdir()
        change(path, draw)
        store = stored(path)
        # For each example anew: the process grows by some 10 KB with each, for a reason that was not found.
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + NATIVE_BYTES, hard))
        size = sum(one.stat().st_size for one in path.iterdir())
        texts = [one.stat().st_size for one in (path / MANIFEST, run / RECORD) if one.exists()]
        most = 2 * size + CONSTANT_BYTES + OBJECTS_PER_BYTE * sum(texts)
        try:
            peak = peak_bytes(path, store)
            if peak > most:  # again, because of the interpreter's own table of names, which some example makes anew
                peak = peak_bytes(path, store)
        except BaseException as error:
            raise AssertionError(f"example {number} of {change.__name__}") from error
        assert peak <= most, f"example {number} of {change.__name__}: {peak:,} bytes for {size:,}"


def in_a_child(change, root: Path, first: int, count: int) -> None:
    """Run `read_all` in a forked process, and fail with what it printed unless it ends well."""
    for run in RUNS:
        shutil.copytree(GOLDEN / run, root / run, dirs_exist_ok=True)
    report = root / "report.txt"
    child = os.fork()
    if not child:
        code = 1
        with suppress(BaseException):
            try:
                read_all(change, root, first, count)
                code = 0
            except BaseException:
                report.write_text(traceback.format_exc(), errors="backslashreplace")
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"exit code {code}\n{report.read_text() if report.exists() else ''}"


@pytest.mark.parametrize(
    ("run", "change"),
    [
        ("dense-2-ranks", {"random.cpu": np.zeros(10, np.uint8)}),
        ("dense-2-ranks", {"random.cpu": np.zeros(5056, np.int8)}),
        ("old/first", {"rng": "00"}),
        ("old/first", {"rng": "no hex"}),
    ],
)
def test_a_random_state_that_is_none_is_refused(run, change, tmp_path):
    shutil.copytree(GOLDEN / run, tmp_path / "run")
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    manifest = read_manifest(path)
    if "rng" in change:
        manifest = replace(manifest, rng=(change["rng"],) * manifest.world)
    else:
        save_file(load_file(path / file_of(0)) | change, path / file_of(0))
    with refused("E-CKPT-RANDOM", rank=0):
        restore_random(path, manifest, 0)


@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_checksum_beyond_its_bits_is_refused(number, tmp_path):
    shutil.copytree(GOLDEN / "old/first", tmp_path / "run")
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    values = json.loads((path / MANIFEST).read_bytes())
    values.pop("sha256")
    next(iter(values["tensors"].values()))["chunks"][0]["crc32"] = number
    (path / MANIFEST).write_bytes(with_own_hash(values, random.Random(0)))
    with refused("E-CKPT-MANIFEST"):
        read_manifest(path)


CHANGES = pytest.mark.parametrize("change", [change_manifest, change_header, change_record])


@CHANGES
def test_any_checkpoint_is_read_or_refused(change, tmp_path):
    torch.set_num_threads(1)
    in_a_child(change, tmp_path, 0, FEW)


@pytest.mark.nightly
@CHANGES
def test_many_checkpoints_are_read_or_refused(change, tmp_path):
    torch.set_num_threads(1)
    in_a_child(change, tmp_path, FEW, MANY)
