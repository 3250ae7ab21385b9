import dataclasses
import json
import random
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.expect import refused

from ingot.config import to_dict
from ingot.errors import CheckpointError
from ingot.schema.accepted import AcceptedChanges
from ingot.schema.checkpoint import BlockLayout, FileEntry, TensorEntry, pack_crc32, unpack_crc32
from ingot.storage import canonical_json, sha256_bytes, sha256_file, write_json
from ingot.trainer.checkpoint.manifest import (
    MANIFEST,
    adopted_hashes,
    is_finished,
    list_checkpoints,
    read_manifest,
    verify_checkpoint,
    write_manifest,
)
from ingot.trainer.checkpoint.message import pack_json, unpack_manifest

from .conftest import save


@pytest.fixture
def saved(folder, training):
    return save(folder, 40, *training).path


def forge(path, **changes):
    """A manifest with `changes`, and a right hash over them: damage by intent, not by accident."""
    write_manifest(path, dataclasses.replace(read_manifest(path), **changes))


def test_reads_back_what_was_written(saved):
    manifest = verify_checkpoint(saved)
    write_manifest(saved, manifest)
    assert read_manifest(saved) == manifest
    assert manifest.step == 40 and manifest.settings == {"optim.lr": 0.01}
    assert {t.dtype for t in manifest.tensors.values()} == {"float32"}


def test_no_manifest_is_written_below_a_mount_point_whose_mount_is_gone(saved, tmp_path):
    manifest = read_manifest(saved)
    with pytest.raises(FileNotFoundError):
        write_manifest(tmp_path / "unmounted" / ".saving-step-00000040", manifest)
    assert not (tmp_path / "unmounted").exists()


def test_a_manifest_arrives_on_other_ranks_as_it_was(saved):
    manifest = read_manifest(saved)
    changes = {"data.weights": ({}, {"a": 0.5}), "optim.lr": (1e-3, 2e-3)}
    accepted = AcceptedChanges(step=20, config_sha256="a", data_fingerprint="b", changes=changes)
    for own in (None, (), (accepted,)):
        sent = dataclasses.replace(manifest, accepted=own)
        assert unpack_manifest(pack_json(sent)) == sent
    old = dataclasses.replace(manifest, rng=("00",))
    assert unpack_manifest(pack_json(old)) == old


def test_every_bit_flip_in_the_manifest_is_found(saved):
    whole = bytearray((saved / MANIFEST).read_bytes())
    rng = random.Random(0)
    for position in rng.sample(range(len(whole)), 300):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << rng.randrange(8)
        (saved / MANIFEST).write_bytes(flipped)
        with pytest.raises(CheckpointError):
            read_manifest(saved)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "E-CKPT-MANIFEST"),
        (b"{", "E-CKPT-MANIFEST"),
        (b"[]", "E-CKPT-MANIFEST-HASH"),
        (b"null", "E-CKPT-MANIFEST-HASH"),
        (b"\xff\xfe", "E-CKPT-MANIFEST"),
        (b'{"step": 1}', "E-CKPT-MANIFEST-HASH"),
        (b"[" * 100_000, "E-CKPT-MANIFEST"),
        (b'{\n"sha256":' + b"[" * 9_000 + b"]" * 9_000 + b"\n}\n", "E-CKPT-MANIFEST"),  # a key that is read alone
        (b'{"sha256": ""}', "E-CKPT-MANIFEST-HASH"),
    ],
)
def test_garbage_instead_of_a_manifest_is_refused(saved, content, code):
    (saved / MANIFEST).write_bytes(content)
    with refused(code, path=str(saved)):
        read_manifest(saved)
    assert set(adopted_hashes(saved.parent).values()) == {""}


def test_a_truncated_manifest_is_refused(saved):
    text = (saved / MANIFEST).read_bytes()
    for length in range(0, len(text) - 2, 997):
        (saved / MANIFEST).write_bytes(text[:length])
        with pytest.raises(CheckpointError):
            read_manifest(saved)


def test_a_folder_without_manifest_was_never_finished(saved):
    (saved / MANIFEST).unlink()
    with refused("E-CKPT-UNFINISHED"):
        read_manifest(saved)


def test_a_newer_format_is_refused_by_name(saved):
    forge(saved, version=3)
    with refused("E-CKPT-VERSION"):
        read_manifest(saved)


def test_weights_alone_are_no_checkpoint(saved):
    """A save of either kind is refused in the folder of the other one."""
    forge(saved, kind="weights", ledger=())
    with refused("E-CKPT-KIND", kind="weights"):
        read_manifest(saved)
    moved = saved.parent.with_name("weights") / saved.name
    shutil.copytree(saved, moved)
    assert read_manifest(moved).kind == "weights"
    forge(moved, kind="full")
    with refused("E-CKPT-KIND", kind="full"):
        read_manifest(moved)


def test_a_renamed_folder_is_refused(saved):
    moved = saved.with_name("step-00000099")
    saved.rename(moved)
    with refused("E-CKPT-STEP"):
        read_manifest(moved)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "manifest.json", "rank-0.safetensors", "a/b"])
def test_a_foreign_file_name_is_refused(saved, name):
    entry = next(iter(read_manifest(saved).files.values()))
    forge(saved, files={name: entry})
    with refused("E-CKPT-MANIFEST"):
        read_manifest(saved)


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes"),
    [
        ((10**12,), (0,), (10**12,)),  # larger than its file: would be allocated
        ((4,), (2,), (4,)),  # beyond the end
        ((4,), (-1,), (4,)),
        ((4,), (0, 0), (4, 1)),  # another number of dimensions
        ((4,), (0,), (3,)),  # a hole
    ],
)
def test_blocks_must_tile_their_tensor(saved, shape, offsets, sizes):
    manifest = read_manifest(saved)
    cuts = (*manifest.cuts, BlockLayout(ranks=(0,), offsets=(offsets,), sizes=(sizes,)))
    x = TensorEntry(dtype="float32", shape=shape, cut=len(cuts) - 1, crc32=pack_crc32([0]))
    forge(saved, cuts=cuts, tensors=manifest.tensors | {"x": x})
    with refused("E-CKPT-MANIFEST"):
        read_manifest(saved)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"cut": 99}, "a cut that is not there"),
        ({"cut": -1}, "a cut that is not there"),
        ({"crc32": ""}, "one checksum per block"),
        ({"crc32": "not base64"}, "one checksum per block"),
        ({"crc32": "AAA="}, "one checksum per block"),  # two bytes
    ],
)
def test_a_tensor_has_a_cut_and_a_checksum_per_block(saved, change, what):
    tensors = read_manifest(saved).tensors
    forge(saved, tensors=tensors | {"model.0.weight": dataclasses.replace(tensors["model.0.weight"], **change)})
    with refused("E-CKPT-MANIFEST"):
        read_manifest(saved)


@pytest.mark.parametrize("change", [{"ranks": (0, 0)}, {"ranks": ()}, {"ranks": (7,)}, {"ranks": (-1,)}, {"sizes": ()}])
def test_a_cut_lies_in_the_files(saved, change):
    manifest = read_manifest(saved)
    forge(saved, cuts=tuple(dataclasses.replace(cut, **change) for cut in manifest.cuts))
    with refused("E-CKPT-MANIFEST"):
        read_manifest(saved)


def version_1(path) -> dict:
    """The manifest of `path` as version 1 wrote it: each block in full, random states as text."""
    manifest = read_manifest(path)
    values = to_dict(manifest) | {"version": 1, "rng": [bytes(5056).hex()] * manifest.world}
    for left_out in ("cuts", "world"):
        values.pop(left_out)
    for name, entry in manifest.tensors.items():
        sums = unpack_crc32(entry.crc32)
        chunks = [to_dict(c) | {"crc32": crc} for c, crc in zip(manifest.chunks(name), sums, strict=True)]
        values["tensors"][name] = {"dtype": entry.dtype, "shape": list(entry.shape), "chunks": chunks}
    return values


def write_version_1(path, values) -> None:
    write_json(path / MANIFEST, values | {"sha256": sha256_bytes(canonical_json(values).encode())})


def test_a_manifest_of_version_1_is_read(saved):
    now, old = read_manifest(saved), version_1(saved)
    write_version_1(saved, old)
    read = verify_checkpoint(saved)
    numbered = {"cuts": now.cuts, "tensors": now.tensors}  # the same cuts in another order
    assert dataclasses.replace(read, **numbered) == dataclasses.replace(now, rng=tuple(old["rng"]))
    for name, entry in now.tensors.items():
        assert (read.chunks(name), read.tensors[name].crc32) == (now.chunks(name), entry.crc32)
    assert is_finished(saved)
    (saved / "rank-00000.safetensors").write_bytes(b"short")
    assert not is_finished(saved)


@pytest.mark.parametrize(
    "change", [{"file": "../x"}, {"file": "rank-1.safetensors"}, {"key": "other"}, {"crc32": None}, {"offsets": None}]
)
def test_a_manifest_of_version_1_that_it_never_wrote_is_refused(saved, change):
    values = version_1(saved)
    values["tensors"]["model.0.weight"]["chunks"][0] |= change
    write_version_1(saved, values)
    with refused("E-CKPT-MANIFEST"):
        read_manifest(saved)


def test_a_torn_manifest_is_not_finished(saved):
    text = (saved / MANIFEST).read_bytes()
    assert is_finished(saved)
    for length in range(len(text) - 1):  # the last byte is a line end
        (saved / MANIFEST).write_bytes(text[:length])
        assert not is_finished(saved)


def test_every_file_of_a_finished_checkpoint_has_its_size(saved):
    files = read_manifest(saved).files
    forge(saved, files=files | {"rank-00001.safetensors": FileEntry(bytes=4, sha256="")})
    for content, finished in ((None, False), (b"four", True), (b"the", False)):
        if content is not None:
            (saved / "rank-00001.safetensors").write_bytes(content)
        assert is_finished(saved) == finished


def test_an_unknown_dtype_is_refused(saved):
    tensors = dict(read_manifest(saved).tensors, x=TensorEntry(dtype="object", shape=(), cut=0, crc32=""))
    forge(saved, tensors=tensors)
    with refused("E-CKPT-MANIFEST"):
        read_manifest(saved)


def test_a_hash_that_fits_does_not_make_another_file_right(saved):
    """File and manifest agree, but the tensors inside are not those that the manifest describes."""
    manifest = read_manifest(saved)
    path = saved / "rank-00000.safetensors"
    save_file({"other": np.zeros(path.stat().st_size // 4, np.float32)}, path)
    entry = FileEntry(bytes=path.stat().st_size, sha256=sha256_file(path))
    write_manifest(saved, dataclasses.replace(manifest, files={path.name: entry}))
    with refused("E-CKPT-HEADER"):
        verify_checkpoint(saved)


def test_lists_newest_first_and_names_the_damage(folder, training):
    for step in (9, 10, 100):
        save(folder, step, *training, keep=5)
    (folder.checkpoint(10) / "rank-00000.safetensors").unlink()
    (folder.checkpoints / ".saving-step-00000101").mkdir()
    (folder.checkpoints / "notes").mkdir()
    listed = list_checkpoints(folder.checkpoints)
    assert [c.step for c in listed] == [100, 10, 9]
    assert [bool(c.manifest) for c in listed] == [True, False, True]
    assert "rank-00000.safetensors is missing" in listed[1].damage


def test_an_empty_run_lists_nothing(tmp_path):
    assert list_checkpoints(tmp_path / "none") == []


def test_the_manifest_is_plain_json(saved):
    values = json.loads((saved / MANIFEST).read_text())
    assert values.pop("sha256") and values == to_dict(read_manifest(saved))
