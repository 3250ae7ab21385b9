import json
import os
import random

import pytest
import torch
from safetensors.torch import load_file
from tests.expect import refused

from ingot.storage import sha256_file
from ingot.trainer.checkpoint.manifest import read_manifest, verify_checkpoint
from ingot.trainer.checkpoint.tensors import write_tensors

from .conftest import save

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def test_the_library_reads_what_was_written(tmp_path):
    torch.manual_seed(0)
    tensors = [(f"t.{dtype}", (torch.randn(3, 4) * 9).to(dtype)) for dtype in DTYPES]
    tensors += [("scalar", torch.tensor(3.5)), ("transposed", torch.randn(4, 2).T), ("slice", torch.arange(9)[2:7])]
    entry, checksums, verify_seconds = write_tensors(tmp_path / "x.safetensors", tensors)
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], value) and loaded[name].dtype == value.dtype for name, value in tensors)
    assert entry.bytes == (tmp_path / "x.safetensors").stat().st_size
    assert entry.sha256 == sha256_file(tmp_path / "x.safetensors")
    assert len(checksums) == len(tensors) and verify_seconds > 0


def test_a_file_is_never_overwritten(tmp_path):
    write_tensors(tmp_path / "x", [("a", torch.zeros(2))])
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "x", [("a", torch.ones(2))])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_not_saved(tmp_path, value):
    tensor = torch.zeros(3, 3)
    tensor[1, 2] = value
    with refused("E-STATE-NOT-FINITE"):
        write_tensors(tmp_path / "x", [("model.w", tensor)])


@pytest.mark.parametrize("place", [8, 70, (1 << 20) - 1, -1, None])
def test_a_disk_that_lies_is_noticed(tmp_path, monkeypatch, place):
    """A byte of the header, of the first and the last tensor, or a byte too many, is not what was written."""
    tensors = [("a", torch.arange(1 << 18, dtype=torch.float32)), ("b", torch.ones(3, dtype=torch.uint8))]
    flush = os.fsync

    def damage_and_flush(fd):
        content = bytearray((tmp_path / "x").read_bytes())
        if place is not None:
            content[place] ^= 1
        (tmp_path / "x").write_bytes(content + b"\0" * (place is None))
        flush(fd)

    monkeypatch.setattr(os, "fsync", damage_and_flush)
    with refused("E-CKPT-READ-BACK"):
        write_tensors(tmp_path / "x", tensors)


def test_every_bit_flip_is_found_and_its_tensor_named(folder, training):
    path = save(folder, 1, *training).path
    manifest = read_manifest(path)
    file = path / "rank-00000.safetensors"
    whole = file.read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    random_begins = header_bytes + json.loads(whole[8:header_bytes])["random.cpu"]["data_offsets"][0]
    rng = random.Random(1)
    for position in [0, 7, 8, header_bytes - 1, header_bytes, len(whole) - 1, *rng.sample(range(len(whole)), 200)]:
        flipped = bytearray(whole)
        flipped[position] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        with refused("E-CKPT-HASH", path=str(path), file=file.name) as caught:
            verify_checkpoint(path)
        # A flip in the header may move a tensor's place; then that tensor is named, as it should be.
        if header_bytes <= position < random_begins:
            assert caught.value.facts["part"].removeprefix("tensor ") in manifest.tensors
        else:
            assert caught.value.facts["part"]
    file.write_bytes(whole)
    assert verify_checkpoint(path) == manifest


def test_the_named_tensor_is_the_damaged_one(folder, training):
    path = save(folder, 1, *training).path
    file = path / "rank-00000.safetensors"
    whole = bytearray(file.read_bytes())
    place = whole.find(training[0][2].weight.detach().numpy().tobytes())
    whole[place + 5] ^= 4
    file.write_bytes(whole)
    with refused("E-CKPT-HASH", part="tensor model.2.weight"):
        verify_checkpoint(path)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        ("truncated", "E-CKPT-SIZE"),
        ("empty", "E-CKPT-SIZE"),
        ("longer", "E-CKPT-SIZE"),
        ("missing", "E-CKPT-FILE-MISSING"),
        ("folder", "E-CKPT-SIZE"),
    ],
)
def test_a_damaged_file_is_refused_by_name(folder, training, damage, code):
    path = save(folder, 1, *training).path
    file = path / "rank-00000.safetensors"
    whole = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage != "missing":
        file.write_bytes({"truncated": whole[:-1], "empty": b"", "longer": whole + b"\0"}[damage])
    with refused(code, path=str(path), file=file.name):
        verify_checkpoint(path)
