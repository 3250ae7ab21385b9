import errno
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import torch
from tests.expect import refused

import ingot.storage as storage
from ingot.schema.checkpoint import Health
from ingot.trainer.checkpoint.folders import remove_leftovers
from ingot.trainer.checkpoint.load import resume
from ingot.trainer.checkpoint.manifest import list_checkpoints, read_manifest, verify_checkpoint, write_manifest
from ingot.trainer.checkpoint.verified_file import VerifiedFile

from .conftest import make_training, save, state_of, train_one, values


def make_small():
    model = torch.nn.Linear(6, 2, bias=False)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def load(folder, into=None):
    model, optimizer = into or make_training(seed=9, steps=0)
    manifest = resume(
        folder,
        state_of(model, optimizer),
        settings={"optim.lr": 0.01},
        data_fingerprint="d" * 64,
        on_refused=lambda step, path, reason, again: None,
    )
    return manifest, values(model, optimizer)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def steps(folder) -> list[int]:
    return [c.step for c in list_checkpoints(folder.checkpoints)]


def test_a_save_says_how_large_and_how_long(folder, training):
    saved = save(folder, 3, *training)
    assert saved.path == folder.checkpoint(3)
    assert saved.bytes == sum(p.stat().st_size for p in saved.path.glob("*.safetensors"))
    assert 0 < saved.stall_seconds < 30


def test_keeps_the_newest(folder, training):
    for step in (10, 20, 30, 40):
        save(folder, step, *training, keep=2)
    assert steps(folder) == [40, 30]
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["step-00000030", "step-00000040"]


def test_damaged_ones_do_not_count_as_kept(folder, training):
    for step in (10, 20, 30):
        save(folder, step, *training, keep=3)
    (folder.checkpoint(30) / "manifest.json").unlink()
    save(folder, 40, *training, keep=2)
    assert steps(folder) == [40, 30, 20]


def suspect(folder, step):
    manifest = read_manifest(folder.checkpoint(step))
    health = Health(state="suspect", reason="a spike", by="a judge")
    write_manifest(folder.checkpoint(step), replace(manifest, health=health))


def test_suspect_ones_do_not_count_as_kept(folder, training):
    for step in (10, 20):
        save(folder, step, *training, keep=2)
    suspect(folder, 20)
    save(folder, 30, *training, keep=2)
    assert steps(folder) == [30, 20, 10]
    save(folder, 40, *training, keep=2)
    assert steps(folder) == [40, 30]


def test_suspect_ones_do_not_fill_the_disk(folder, training):
    save(folder, 10, *training, keep=2)
    for step in (20, 30, 40, 50):
        save(folder, step, *training, keep=2)
        suspect(folder, step)
    save(folder, 60, *training, keep=2)
    assert steps(folder) == [60, 50, 40, 10]


def test_a_refused_later_one_does_not_push_out_what_can_be_used(folder, training):
    for step in (10, 20):
        save(folder, step, *training)
    damaged = folder.checkpoint(20) / "rank-00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")  # of the right size: only its hash differs
    save(folder, 15, *training, keep=1)  # resumed from 10
    assert verify_checkpoint(folder.checkpoint(15)).step == 15
    assert steps(folder) == [20, 15]


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_made_again(folder, training):
    save(folder, 10, *training)
    (folder.checkpoint(10) / "rank-00000.safetensors").write_bytes(b"")
    save(folder, 10, *training)
    assert verify_checkpoint(folder.checkpoint(10)).step == 10
    assert len(list(folder.checkpoints.iterdir())) == 1


def test_weights_that_are_not_finite_are_refused_and_the_last_good_stays(folder, training):
    model, optimizer = training
    save(folder, 10, model, optimizer)
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with refused("E-STATE-NOT-FINITE"):
        save(folder, 20, model, optimizer)
    assert steps(folder) == [10]
    assert remove_leftovers(folder) == [".saving-step-00000020"]


def test_no_space_is_said_before_anything_is_written(folder, training, monkeypatch):
    save(folder, 10, *training)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1000))
    with refused("E-DISK-SPACE"):
        save(folder, 20, *training)
    assert [p.name for p in folder.checkpoints.iterdir()] == ["step-00000010"]


def test_a_disk_that_vanished_is_named(folder, training, monkeypatch):
    save(folder, 1, *training)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: fails(errno.EIO, path))
    with refused("E-CKPT-WRITE", path=str(folder.checkpoints)):
        save(folder, 2, *training)


def test_an_old_checkpoint_that_cannot_be_removed_costs_no_new_one(folder, training, monkeypatch, capsys):
    save(folder, 1, *training)
    with monkeypatch.context() as patched:
        patched.setattr("ingot.trainer.checkpoint.files.prune", lambda folder, *_: fails(errno.EIO, folder))
        assert save(folder, 2, *training, keep=1).path == folder.checkpoint(2)
    assert "old checkpoints were not removed" in capsys.readouterr().err and steps(folder) == [2, 1]
    save(folder, 3, *training, keep=1)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-00000003"]


def fails(number: int, path) -> None:
    raise OSError(number, os.strerror(number), str(path))


def test_a_disk_that_fills_up_while_writing_costs_nothing_else(folder, training, monkeypatch):
    save(folder, 10, *training)
    before = load(folder)[1]
    write, calls = VerifiedFile._write, []

    def full(self, data):
        calls.append(data)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, data)

    monkeypatch.setattr(VerifiedFile, "_write", full)
    with refused("E-CKPT-WRITE"):
        save(folder, 20, *training)
    monkeypatch.undo()
    manifest, after = load(folder)
    assert manifest.step == 10 and same(before, after)


KILL_POINTS = [
    (VerifiedFile, "_write"),
    (os, "fsync"),
    (os, "mkdir"),
    (os, "rename"),
    (os, "replace"),
    (os, "unlink"),
    (os, "rmdir"),
]


def die_at(number: int) -> None:
    """Let this process die by SIGKILL at the `number`-th thing it does to the disk."""
    done = 0

    def deadly(function):
        def call(*args, **kwargs):
            nonlocal done
            done += 1
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for place, name in KILL_POINTS:
        setattr(place, name, deadly(getattr(place, name)))


def test_a_kill_at_any_write_leaves_a_whole_newest_checkpoint(folder):
    """Steps 10 and 20 are there; saving 30 prunes both. Whatever is newest afterwards is loaded whole."""
    states = {}
    model, optimizer = make_small()
    for step in (10, 20, 30):
        train_one(model, optimizer)
        states[step] = values(model, optimizer)
        if step < 30:
            save(folder, step, model, optimizer, keep=2)
    pristine = folder.root.with_name("pristine")
    shutil.copytree(folder.root, pristine)
    outcomes = []
    for number in range(1, 200):
        shutil.rmtree(folder.root)
        shutil.copytree(pristine, folder.root)
        child = os.fork()
        if child == 0:
            die_at(number)
            save(folder, 30, model, optimizer, keep=1)
            os._exit(0)
        survived = os.waitpid(child, 0)[1] == 0
        manifest, state = load(folder, make_small())
        assert manifest.step in (20, 30) and same(state, states[manifest.step])
        outcomes.append(manifest.step)
        remove_leftovers(folder)
        assert all(p.name.startswith("step-") for p in folder.checkpoints.iterdir())
        assert load(folder, make_small())[0].step == manifest.step
        if survived:
            break
    assert outcomes[0] == 20 and outcomes[-1] == 30 and len(outcomes) > 15
    assert outcomes == sorted(outcomes)  # once the new one counts, it counts for good


def test_leftovers_of_killed_saves_are_named(folder):
    for name in (".saving-step-00000007", ".removed-step-00000003"):
        (folder.checkpoints / name).mkdir(parents=True)
        Path(folder.checkpoints / name / "rank-00000.safetensors").write_bytes(b"half")
    (folder.weights.checkpoints / ".saving-step-00000005").mkdir(parents=True)
    folder.ledger.mkdir()
    samples = folder.ledger / "steps-00000001-00000003.i64"
    samples.write_bytes(b"whole")
    (folder.ledger / ".steps-00000004-00000007.i64.123.tmp").write_bytes(b"half")
    assert remove_leftovers(folder) == [
        ".saving-step-00000007",
        ".removed-step-00000003",
        ".saving-step-00000005",
        ".steps-00000004-00000007.i64.123.tmp",
    ]
    assert not list(folder.checkpoints.iterdir())
    assert list(folder.ledger.iterdir()) == [samples]
