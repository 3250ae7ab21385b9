"""Files that belong to no checkpoint, on the disk and in the store, and those that have to stay."""

import json
import shutil

import numpy as np
import pytest
from tests.checkpoints import model_settings, write_checkpoint, write_weights
from tests.expect import refused

from ingot.cli.main import main
from ingot.schema.checkpoint import WEIGHTS, file_of
from ingot.storage import write_atomic
from ingot.trainer.checkpoint import pins
from ingot.trainer.checkpoint.manifest import MANIFEST, read_manifest, verify_checkpoint
from ingot.trainer.checkpoint.places import Places, name_run, with_hash
from ingot.trainer.launch.garbage import KILLED, SEGMENT, TEMPORARY, UNLISTED, UPLOAD, collect_garbage
from ingot.trainer.launch.stored import fetch_checkpoint, open_run, push_checkpoint
from ingot.trainer.loader.ledger import write_segment
from ingot.trainer.resilience.lock import RunLock

from .conftest import RUN_FILE


@pytest.fixture
def run(folder, tmp_path):
    """Two checkpoints on both tiers, and the weights of the second one."""
    folder.root.mkdir(parents=True)
    (tmp_path / "store").mkdir()
    folder.config.write_text(f'{RUN_FILE}[checkpoint.remote]\nurl = "file://{tmp_path}/store"\n')
    for step in (10, 20):
        write_checkpoint(folder, step, model_settings(folder))
        push_checkpoint(folder.root, step)
    write_weights(folder, 20, model_settings(folder))
    push_checkpoint(folder.root, 20, kind=WEIGHTS)
    return folder


def litter(run, store):
    """Leave what killed processes leave. Returns (place, name, what) of each."""
    left = []
    for name, what in (
        ("checkpoints/.saving-step-00000030.1/rank-00000.safetensors", KILLED),
        ("checkpoints/.removed-step-00000005/manifest.json", KILLED),
        ("weights/.saving-step-00000030.1/rank-00000.safetensors", KILLED),
        ("checkpoints/step-00000010/.manifest.json.77.tmp", TEMPORARY),
        ("ledger/.steps-00000021-00000030.i64.77.tmp", TEMPORARY),
        (".run.toml.77.tmp", TEMPORARY),
    ):
        (run.root / name).parent.mkdir(parents=True, exist_ok=True)
        (run.root / name).write_bytes(b"12345")
        parts = name.split("/")
        left.append(("disk", "/".join(parts[:2]) if what == KILLED else name, what))
    segment = write_segment(run.ledger, 11, 15, np.arange(5).reshape(5, 1))
    left.append(("disk", f"ledger/{segment.file}", SEGMENT))
    for name, what in (
        ("checkpoints/step-00000015/rank-00000-0123456789abcdef.safetensors", UPLOAD),
        ("ledger/steps-00000011-00000015-0123456789abcdef.i64", SEGMENT),
        ("weights/step-00000015/rank-00000-0123456789abcdef.safetensors", UPLOAD),
    ):
        if not (store / name).parents[1].exists():  # a store without weights: an upload that is older than none
            continue
        (store / name).parent.mkdir(exist_ok=True)
        (store / name).write_bytes(b"1234567")
        left.append((f"file://{store}", name, what))
    return left


def files(*folders):
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


def without_lease(found):
    return {path: data for path, data in found.items() if "lease" not in path.parts and "lock" not in path.name}


def test_garbage_of_both_tiers_goes_and_nothing_else(run, tmp_path, capsys):
    store = tmp_path / "store"
    before = without_lease(files(run.root, store))
    left = litter(run, store)
    with_litter = without_lease(files(run.root, store))
    shown = collect_garbage(run.root, dry_run=True)
    assert {(one.place, one.name, one.what) for one in shown.garbage} == set(left)
    assert shown.bytes == sum(map(len, with_litter.values())) - sum(map(len, before.values()))
    assert without_lease(files(run.root, store)) == with_litter
    assert main(["ckpt", "gc", str(run.root), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (len(facts["garbage"]), facts["bytes"], facts["dry_run"]) == (len(left), shown.bytes, False)
    assert facts["garbage"][0].keys() == {"place", "name", "bytes", "what"}
    assert without_lease(files(run.root, store)) == before
    assert not list(run.checkpoints.glob(".*"))
    assert main(["ckpt", "gc", str(run.root)]) == 0
    assert capsys.readouterr().out == "removed   0 files and folders, 0 B\n"
    for step in (10, 20):
        verify_checkpoint(run.checkpoint(step))
        shutil.rmtree(run.checkpoint(step))
    shutil.rmtree(run.ledger)
    assert [fetch_checkpoint(run.root, step).step for step in (10, 20)] == [10, 20]


def test_nothing_is_removed_while_the_run_trains_or_a_command_uploads(run, tmp_path):
    litter(run, tmp_path / "store")
    before = without_lease(files(run.root, tmp_path / "store"))
    for lock in (run.lock, run.upload_lock):
        for dry_run in (True, False):
            with RunLock(lock), refused("E-RUN-BUSY"):
                collect_garbage(run.root, dry_run=dry_run)
    with RunLock(run.upload_lock), refused("E-RUN-BUSY"):
        push_checkpoint(run.root, 20)
    assert without_lease(files(run.root, tmp_path / "store")) == before


def test_what_a_checkpoint_may_need_stays(run, tmp_path, monkeypatch):
    """A damaged manifest may list any segment; a pinned folder gets its name back; a newer upload may go on."""
    segments = [write_segment(run.ledger, 11, last, np.zeros((last - 10, 1), np.int64)).file for last in (12, 14, 25)]
    write_checkpoint(run, 14, ledger=(*read_manifest(run.checkpoint(10)).ledger, *(
        one for one in [write_segment(run.ledger, 11, 14, np.ones((4, 1), np.int64))]
    )))  # fmt: skip
    run.checkpoint(14).rename(run.checkpoints / ".removed-step-00000014")
    monkeypatch.setattr(pins, "_PATIENCE_SECONDS", 0.05)  # with a removal that never ends
    pins.pin(run, 14)
    (run.checkpoint(10) / MANIFEST).write_text("torn")
    (run.ledger / "notes.txt").touch()
    newer = tmp_path / "store/checkpoints/step-00000030/rank-00000-0123456789abcdef.safetensors"
    write_atomic(newer, b"1")
    pinned = tmp_path / "store/checkpoints/step-00000015/rank-00000-0123456789abcdef.safetensors"
    write_atomic(pinned, b"1")
    open_run(run.root)[1].pins.mark(15)
    shown = collect_garbage(run.root, dry_run=True)
    found = collect_garbage(run.root, dry_run=False)
    assert found.garbage == shown.garbage
    assert [one.name for one in found.garbage] == [f"ledger/{segments[0]}", f"ledger/{segments[2]}"]
    verify_checkpoint(run.checkpoint(14))
    assert newer.exists() and pinned.exists() and (run.ledger / "notes.txt").exists()
    (run.checkpoint(20) / MANIFEST).write_text("torn")
    write_segment(run.ledger, 11, 12, np.zeros((2, 1), np.int64))
    assert collect_garbage(run.root, dry_run=False).garbage == ()


def test_a_damaged_manifest_in_the_store_keeps_its_samples(run, tmp_path):
    litter(run, tmp_path / "store")
    (tmp_path / "store/checkpoints/step-00000020/manifest.json").write_text("torn")
    kept = "ledger/steps-00000011-00000015-0123456789abcdef.i64"
    assert kept not in [one.name for one in collect_garbage(run.root, dry_run=False).garbage]
    assert (tmp_path / "store" / kept).exists()


def test_a_run_whose_checkpoints_vanished_keeps_its_ledger(run):
    write_segment(run.ledger, 21, 30, np.zeros((10, 1), np.int64))
    shutil.rmtree(run.checkpoints)
    with refused("E-CKPT-VANISHED"):
        collect_garbage(run.root, dry_run=False)
    assert len(list(run.ledger.iterdir())) == 3


def test_what_goes_from_the_disks_of_a_node_is_listed_first(run, tmp_path):
    """The tensors of step 20 are on a disk; those of step 10 too, whose removal had begun when it was pinned."""
    disk = tmp_path / "nvme"
    disk.mkdir()
    run.config.write_text(
        run.config.read_text().replace("[checkpoint.remote]", f'[checkpoint]\ndisks = ["{disk}"]\n[checkpoint.remote]')
    )
    name_run(run)
    for step in (10, 20):
        path = run.checkpoint(step)
        entry = read_manifest(path).files[file_of(0)]
        write_atomic(Places(path).own_folder(0) / with_hash(file_of(0), entry.sha256), (path / file_of(0)).read_bytes())
        (path / file_of(0)).unlink()
    pins.pin(run, 10)
    run.checkpoint(10).rename(run.checkpoint(10).with_name(pins.REMOVED + run.checkpoint(10).name))
    (own,) = disk.iterdir()
    (own / "step-00000030").mkdir()
    for name in (
        "step-00000030/rank-00000-0123456789abcdef.safetensors",
        "step-00000020/rank-00000-0000000000000000.safetensors",
    ):
        (own / name).write_bytes(b"12345")
    shown = collect_garbage(run.root, dry_run=True).garbage
    assert {(one.name, one.bytes, one.what) for one in shown} == {
        (str(own / "step-00000030"), 5, UNLISTED),
        (str(own / "step-00000020/rank-00000-0000000000000000.safetensors"), 5, UNLISTED),
    }
    assert collect_garbage(run.root, dry_run=False).garbage == shown
    assert collect_garbage(run.root, dry_run=True).garbage == ()
    for step in (10, 20):
        verify_checkpoint(run.checkpoint(step))


def test_saves_of_the_weights_stay(run):
    assert collect_garbage(run.root, dry_run=False).garbage == ()
    verify_checkpoint(run.weights.checkpoint(20))
    assert fetch_checkpoint(run.root, kind=WEIGHTS).bytes > 0
