"""A changed bit of a record is refused, or changes nothing that it says."""

import shutil
from pathlib import Path

import pytest
from tests.expect import refused

from ingot.drill.damage import flip
from ingot.errors import DataError
from ingot.schema.checkpoint import FileEntry
from ingot.schema.guard_record import LOWER, Measure, read_measures, write_measures
from ingot.schema.quarantine_record import Quarantined, read_quarantine, write_quarantine
from ingot.schema.run_folder import RunFolder
from ingot.schema.sealed import sealed, unsealed
from ingot.storage import sha256_bytes, write_atomic, write_json
from ingot.stores.local import LocalStore
from ingot.trainer.checkpoint import places
from ingot.trainer.checkpoint.fence import Epoch, newest_local_epoch, record_name, to_bytes
from ingot.trainer.checkpoint.places import Places, name_run, with_hash

MEASURES = [Measure(action=LOWER, first=3, last=5, found=("a high loss",), lr_factor=0.5, lr_last=9, lr=3e-05)]
LEFT_OUT = (Quarantined(step=4, shard="web-00000", blocks_sha256="ab" * 32, begin=10, end=20, code="E-SHARD"),)


def flips(path: Path):
    """Yield after each change of one bit of the file, and undo it."""
    whole = path.read_bytes()
    for offset in range(len(whole)):
        for bit in range(8):
            flip(path, offset, bit)
            yield f"bit {bit} of byte {offset}"
            path.write_bytes(whole)


@pytest.mark.parametrize(
    ("write", "read", "values"),
    [(write_measures, read_measures, MEASURES), (write_quarantine, read_quarantine, LEFT_OUT)],
    ids=["guard", "quarantine"],
)
def test_every_bit_of_the_records_that_decide_about_data(tmp_path, write, read, values):
    path = tmp_path / "record.json"
    write(path, values)
    assert read(path) == values
    same = []
    for where in flips(path):
        try:
            same.append(where)
            assert read(path) == values, where
        except DataError:
            same.pop()
    assert len(same) <= 1  # 3e-05 and 3E-05 are one number


def test_records_of_earlier_versions_are_read(tmp_path):
    for write, read, values in (
        (write_measures, read_measures, MEASURES),
        (write_quarantine, read_quarantine, LEFT_OUT),
    ):
        write_json(tmp_path / "record.json", [vars(one) for one in values])
        assert read(tmp_path / "record.json") == values
        write(tmp_path / "record.json", ())
        assert not read(tmp_path / "record.json")


def test_every_bit_of_a_lease_makes_its_record_unknown(tmp_path):
    record = Epoch(epoch=3, run="r", holder="h", host="far", pid=7, started=1.5, adopted={"4": "ab"}, weights={})
    LocalStore(tmp_path).write(record_name(3), [to_bytes(record)])
    assert newest_local_epoch(tmp_path) == record
    for where in flips(tmp_path / record_name(3)):
        assert newest_local_epoch(tmp_path) == Epoch(epoch=3), where


def make_run(root: Path, disk: Path, data: bytes = b"weights") -> tuple[RunFolder, FileEntry]:
    """Return a run with one file of a checkpoint on `disk`."""
    run, entry = RunFolder(root), FileEntry(bytes=len(data), sha256=sha256_bytes(data))
    write_atomic(run.config, f'[checkpoint]\ndisks = ["{disk}"]\n')
    write_atomic(run.checkpoint(4) / "manifest.json", f'{{"sha256":"{entry.sha256}"}}')
    assert name_run(run) == ""
    own = Places(run.checkpoint(4)).own_folder(0)
    write_atomic(own / with_hash("rank-00000.safetensors", entry.sha256), data)
    return run, entry


def test_every_bit_of_the_names_on_disks(tmp_path, monkeypatch):
    """The files are found by their hashes, and nothing of them is removed later."""
    for name in ("GROUP_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    disk = tmp_path / "disk"
    disk.mkdir()
    make_run(tmp_path / "other", disk, b"of another run")
    run, entry = make_run(tmp_path / "run", disk)
    before = places._names(run.root)[0]
    for where in flips(run.root / "disks.json"):
        assert places._recorded(run.root)[:2] == (before, True), where
        assert Places(run.checkpoint(4)).find("rank-00000.safetensors", entry.sha256).is_file()
    flip(run.root / "disks.json", 20, 3)
    assert "disks.json is damaged" in name_run(run)
    assert name_run(run) == ""  # it has a new name
    assert Places(run.checkpoint(4)).find("rank-00000.safetensors", entry.sha256).is_file()
    shutil.rmtree(run.checkpoints)
    assert places.sweep(run, {}) == []


def test_names_that_other_nodes_found_are_kept_with_those_of_this_one(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    run, _ = make_run(tmp_path / "run", disk)
    (before,) = places._names(run.root)[0]
    flip(run.root / "disks.json", 20, 3)
    name_run(run, ["of-node-1", before])
    assert places._names(run.root)[0][1:] == [before, "of-node-1"]


def test_a_run_without_a_name_of_its_own_writes_to_no_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    run, _ = make_run(tmp_path / "run", disk)
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(run.root, copy.root)
    with refused("E-CKPT-DISK-NAME", path=str(copy.root / "disks.json")):
        Places(copy.checkpoint(8)).own_folder(0)


def test_a_record_without_its_hash_or_with_more_is_refused(tmp_path):
    record = sealed({"a": 1.5, "b": ["\ud800"]})
    assert unsealed(record, {"a", "b"}) == {"a": 1.5, "b": ["\ud800"]}
    for wrong in ([], {"a": 1.5}, record | {"c": 1}, record | {"a": 2.5}, record | {"sha256": ""}):
        with pytest.raises(ValueError):
            unsealed(wrong, {"a", "b"})
    write_json(tmp_path / "guard.json", sealed({"a": 1}))
    with refused("E-GUARD-READ"):
        read_measures(tmp_path / "guard.json")
