"""The list of the checkpoints of both tiers, from manifests, listings and the event log."""

import json
import os
import shutil
from dataclasses import replace

import pytest
from tests.checkpoints import model_settings, write_checkpoint, write_weights
from tests.expect import refused

from ingot.cli import ckpt_ls
from ingot.cli.main import main
from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.checkpoint import FULL, WEIGHTS, Health
from ingot.stores.store import StoreUnreachable
from ingot.trainer.checkpoint.fence import Epoch, record_name, to_bytes
from ingot.trainer.checkpoint.manifest import read_manifest, write_manifest
from ingot.trainer.checkpoint.remote import RemoteTier
from ingot.trainer.checkpoint.stored import StoredCheckpoints
from ingot.trainer.launch.listing import NOT_ENDED, list_run
from ingot.trainer.launch.retain import pin_checkpoint
from ingot.trainer.launch.stored import fetch_checkpoint, open_run, push_checkpoint

from .conftest import RUN_FILE


@pytest.fixture
def run(folder, tmp_path):
    """Steps 10 and 20 are on both tiers, 30 on the disk alone, with its weights."""
    folder.root.mkdir(parents=True)
    (tmp_path / "store").mkdir()
    folder.config.write_text(f'{RUN_FILE}[checkpoint.remote]\nurl = "file://{tmp_path}/store"\n')
    settings = model_settings(folder) | {"train.seq_len": 100}
    for step in (10, 20, 30):
        write_checkpoint(folder, step, settings, layout={"dp_shard": 2, "tp": 2})
        if step < 30:
            push_checkpoint(folder.root, step)
    write_weights(folder, 30, settings, layout={"dp_shard": 2, "tp": 2})
    return folder


def by_step(run):
    listing = list_run(run.root)
    return {(save.step, save.kind): save for save in listing.saves}, listing


def test_one_table_for_both_tiers(run, capsys):
    pin_checkpoint(run.root, 10)
    shutil.rmtree(run.checkpoint(10))
    assert main(["ckpt", "ls", str(run.root)]) == 0
    header, *rows, states, health, store = capsys.readouterr().out.splitlines()
    assert states == "health    young: 10, 20, 30"
    assert health == "          step 30: 0 of the 8 steps after it that prove it"
    assert tuple(header.split()) == ckpt_ls.HEADER
    cells = [row.split() for row in rows]
    assert [(c[0], c[1], c[2], " ".join(c[3:7]), c[11], " ".join(c[12:])) for c in cells] == [
        ("10", "1k", "full", "dp 2 tp 2", "store", "pinned"),
        ("20", "2k", "full", "dp 2 tp 2", "both", ""),
        ("30", "3k", "full", "dp 2 tp 2", "disk", "resumes here"),
        ("30", "3k", "weights", "dp 2 tp 2", "disk", ""),
    ]
    assert store.startswith("store     file://")


def test_a_damaged_manifest_on_the_disk_hides_nothing_that_the_store_knows(run):
    (run.checkpoint(20) / "manifest.json").write_bytes(b"{")
    save = by_step(run)[0][20, "full"]
    assert save.disk.damage and save.tokens == 2000 and save.health is not None


def test_the_facts_have_stable_names(run, capsys):
    assert main(["ckpt", "ls", str(run.root), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts.keys() == {"checkpoints", "store", "exit_code"}
    first = facts["checkpoints"][0]
    assert first.keys() == {
        *("step", "kind", "tokens", "layout", "pinned", "doubt", "health", "resumes_here", "disk", "store")
    }  # fmt: skip
    assert first["disk"].keys() == {"bytes", "verified_at", "verified_by", "late", "damage", "absent", "lost"}
    assert (first["tokens"], first["layout"], first["store"]["late"]) == (1000, {"dp_shard": 2, "tp": 2}, False)


def test_the_time_of_the_verification_is_the_logged_one_or_that_of_the_manifest(run):
    os.utime(run.checkpoint(10) / "manifest.json", (5, 5))
    os.utime(run.checkpoint(20) / "manifest.json", (5, 5))
    log = EventLog(run.events)
    log.write(events.CHECKPOINT, step=20)
    log.write(events.WEIGHTS_SAVED, step=30)
    log.write(events.CHECKPOINT_STORED, step=10)
    log.write(events.CHECKPOINT_STORED, step=20, bytes=0)  # found there by a later attempt: not verified now
    saves, _ = by_step(run)
    ten, twenty, weights = saves[10, "full"], saves[20, "full"], saves[30, "weights"]
    assert (ten.disk.verified_at, ten.disk.verified_by) == (5.0, "manifest")
    assert twenty.disk.verified_at > 1e9 and twenty.disk.verified_by == weights.disk.verified_by == "events"
    assert (ten.store.verified_by, twenty.store.verified_by) == ("events", "manifest")
    fetch_checkpoint(run.root, 10)
    assert by_step(run)[0][10, "full"].disk.verified_by == "events"


def test_a_store_that_does_not_answer_leaves_the_disk_and_a_line(run, monkeypatch, capsys):
    def silent(*_):
        raise StoreUnreachable("E-STORE-UNREACHABLE", "file://x does not answer", rule="", fix="")

    monkeypatch.setattr(StoredCheckpoints, "stored", silent)
    assert main(["ckpt", "ls", str(run.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "10", "20", "30", "30", "health", "step", "store"]
    assert lines[-1] == "store     not listed: file://x does not answer"
    assert list_run(run.root).as_dict()["store"]["error"] == "E-STORE-UNREACHABLE"
    shutil.rmtree(run.checkpoints)
    shutil.rmtree(run.weights.checkpoints)
    with refused("E-STORE-UNREACHABLE"):
        list_run(run.root)


def test_damage_late_ones_and_half_uploads_are_marked(run, tmp_path, capsys):
    tier = open_run(run.root)[1]
    (tmp_path / "store/checkpoints/step-00000010/manifest.json").unlink()
    (lost,) = (tmp_path / "store/checkpoints/step-00000020").glob("rank-*")
    lost.unlink()
    write_manifest(run.checkpoint(30), replace(read_manifest(run.checkpoint(30)), epoch=1))
    adopted = Epoch(epoch=2, adopted={"10": "", "20": ""})
    (run.root / "lease").mkdir()
    (run.root / record_name(2)).write_bytes(to_bytes(adopted))
    saves, listing = by_step(run)
    ten, twenty, thirty = (saves[step, "full"] for step in (10, 20, 30))
    assert (ten.store.damage, ten.store.verified_at, ten.disk.damage) == (NOT_ENDED, None, "")
    assert twenty.store.damage == "rank-00000.safetensors is missing" and twenty.resumes_here
    assert thirty.disk.late and listing.exit_code == 21
    assert main(["ckpt", "ls", str(run.root)]) == 21
    out = capsys.readouterr().out
    assert "half upload" in out and "DAMAGED in" in out and "late      step 30, disk" in out
    tier.store.write(record_name(3), [to_bytes(Epoch(epoch=3, adopted={"10": ""}))])
    late = replace(read_manifest(run.checkpoint(20)), epoch=1)
    write_manifest(tmp_path / "store/checkpoints/step-00000020", late)
    assert by_step(run)[0][20, "full"].store.late


def test_only_manifests_and_listings_are_read(run, monkeypatch):
    """A checkpoint on both tiers costs no request: its local manifest serves for both."""
    read, tensors = [], run.checkpoint(20) / "rank-00000.safetensors"
    tensors.write_bytes(b"x" * tensors.stat().st_size)
    original = RemoteTier.manifest
    monkeypatch.setattr(RemoteTier, "manifest", lambda self, step: read.append(step) or original(self, step))
    assert by_step(run)[1].exit_code == 0 and read == []
    shutil.rmtree(run.checkpoint(10))
    saves, _ = by_step(run)
    assert read == [10] and saves[10, "full"].tokens == 1000


def test_commands_move_and_list_weights_and_training_resumes_from_none(run, capsys):
    EventLog(run.events).write(events.CHECKPOINT_STORED, step=30, what=WEIGHTS)
    with refused("E-CKPT-NONE"):
        fetch_checkpoint(run.root, kind=WEIGHTS)
    assert main(["ckpt", "push", str(run.root), "--weights"]) == 0
    shutil.rmtree(run.weights.checkpoint(30))
    write_weights(run, 40, model_settings(run), epoch=1)
    push_checkpoint(run.root, kind=WEIGHTS)
    assert fetch_checkpoint(run.root, 30, kind=WEIGHTS).step == 30
    shutil.rmtree(run.weights.checkpoints)
    assert main(["ckpt", "fetch", str(run.root), "--weights"]) == 0
    assert "fetched   weights of step 40" in capsys.readouterr().out
    saves, _ = by_step(run)
    assert saves[30, WEIGHTS].disk is None and saves[30, WEIGHTS].store.verified_by == "events"
    both = saves[40, WEIGHTS]
    assert (both.disk.verified_by, both.disk.late, both.store.damage) == ("events", False, "")
    assert saves[30, FULL].store is None and saves[30, FULL].resumes_here
    assert [step for (step, _), save in saves.items() if save.resumes_here] == [30]


def test_a_newer_checkpoint_of_the_store_is_where_training_resumes(run):
    push_checkpoint(run.root, 30)
    shutil.rmtree(run.checkpoint(30))
    saves, _ = by_step(run)
    assert [step for (step, _), save in saves.items() if save.resumes_here] == [30]
    write_manifest(
        run.checkpoint(20), replace(read_manifest(run.checkpoint(20)), health=Health(state="suspect", reason="a spike"))
    )
    assert by_step(run)[0][20, "full"].doubt == "a spike"
    write_checkpoint(run, 40, health=Health(state="suspect", reason="a spike"))
    push_checkpoint(run.root, 40)
    shutil.rmtree(run.checkpoint(40))
    assert [step for (step, _), save in by_step(run)[0].items() if save.resumes_here] == [30]


def test_other_folders_are_refused(tmp_path):
    with refused("E-RUN-NOT-FOUND"):
        list_run(tmp_path)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (None, "-"),
        ({"dp_shard": 1}, "1 rank"),
        ({"dp_shard": 4, "tp": 2}, "dp 4 tp 2"),
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 4, "cp": 2}, "dp 2x4 pp 2 cp 2"),
        ({"dp_replicate": 3, "dp_shard": 1}, "dp 3"),
    ],
)
def test_a_layout_is_named_by_its_degrees(layout, text):
    assert ckpt_ls.layout_text(layout) == text
