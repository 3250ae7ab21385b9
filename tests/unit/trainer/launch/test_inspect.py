import json
import shutil
from dataclasses import replace

import pytest
from tests.expect import refused

from ingot.cli.main import main
from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.checkpoint import Health
from ingot.trainer.checkpoint import resumable
from ingot.trainer.checkpoint.manifest import parse_manifest, read_manifest, write_manifest
from ingot.trainer.checkpoint.resumable import RollBackChoice, resume_step, roll_back_choice
from ingot.trainer.launch.inspect import RESUMES_HERE, WEIGHTS_ALONE, inspect_checkpoints

from .conftest import write_checkpoint


@pytest.fixture
def three(folder, config):
    for step in (10, 20, 30):
        write_checkpoint(folder, step, config, "d" * 64)
    (folder.checkpoint(30) / "manifest.json").write_text("torn")
    return folder


def test_names_the_damage_and_where_training_resumes(three):
    inspected = inspect_checkpoints(three.root, hash_files=True)
    assert [(c.step, c.state) for c in inspected.checkpoints] == [(10, "yes"), (20, "yes"), (30, "NO")]
    assert [c.note for c in inspected.checkpoints] == ["", RESUMES_HERE, "manifest.json is not JSON"]
    assert inspected.exit_code == 21


def test_training_resumes_where_no_one_doubts_the_weights(three):
    """The order in which a resume tries them: suspect ones last; what the ranks refused is damaged until it is read."""
    manifest = read_manifest(three.checkpoint(20))
    write_manifest(three.checkpoint(20), replace(manifest, health=Health(state="suspect", reason="a spike", by="x")))
    notes = [c.note for c in inspect_checkpoints(three.root, hash_files=True).checkpoints]
    assert notes[0] == RESUMES_HERE and "a spike" in notes[1] and resume_step(three) == 10
    manifest = read_manifest(three.checkpoint(10))
    write_manifest(three.checkpoint(10), replace(manifest, health=Health(state="suspect", reason="older", by="x")))
    assert resume_step(three) == 20  # of suspect ones the newest, whatever the reasons are
    write_manifest(three.checkpoint(10), manifest)
    log = EventLog(three.events)
    log.write(events.CHECKPOINT_REFUSED, step=10, path="x", reason="checkpoint x: a bit flipped")
    (ten, twenty, _) = inspect_checkpoints(three.root, hash_files=False).checkpoints
    assert ten.state == "NO" and "a bit flipped" in ten.note and twenty.note.endswith(RESUMES_HERE)
    assert resume_step(three) == 20
    assert inspect_checkpoints(three.root, hash_files=True).checkpoints[0].note == RESUMES_HERE


def test_saves_of_the_weights_are_listed_and_named(three, config):
    for step in (20, 25, 35):
        write_checkpoint(three, step, config, "d" * 64)
        moved = three.weights.checkpoint(step)
        moved.parent.mkdir(exist_ok=True)
        if step == 20:
            shutil.copytree(three.checkpoint(step), moved)
        else:
            three.checkpoint(step).rename(moved)
        full = parse_manifest("", (moved / "manifest.json").read_bytes())
        write_manifest(moved, replace(full, kind="weights", ledger=()))
    (three.weights.checkpoint(25) / "rank-00000.safetensors").write_bytes(b"x")
    rows = inspect_checkpoints(three.root, hash_files=True).checkpoints
    assert [(c.step, c.kind, c.state) for c in rows] == [
        *[(10, "full", "yes"), (20, "full", "yes"), (20, "weights", "yes")],
        *[(25, "weights", "NO"), (30, "full", "NO"), (35, "weights", "yes")],
    ]
    assert [c.step for c in rows if c.note == RESUMES_HERE] == [20]
    assert [c.step for c in rows if c.note == WEIGHTS_ALONE] == [20, 35]
    (row,) = inspect_checkpoints(three.weights.checkpoint(35), hash_files=True).checkpoints
    assert (row.kind, row.note) == ("weights", WEIGHTS_ALONE)


def test_training_resumes_from_the_newest_that_loads(three):
    def load(saves):
        assert [save.step for save in saves] == [20, 10]
        return {saves[0].path: "a tensor is missing", saves[1].path: ""}

    ten, twenty, _ = inspect_checkpoints(three.root, hash_files=True, load=load).checkpoints
    assert (ten.state, ten.note) == ("yes", RESUMES_HERE)
    assert (twenty.state, twenty.note) == ("NO", "a tensor is missing")


def test_one_checkpoint_can_be_asked_for(three):
    assert inspect_checkpoints(three.checkpoint(20), hash_files=True).exit_code == 0
    (damaged,) = inspect_checkpoints(three.checkpoint(30), hash_files=False).checkpoints
    assert (damaged.step, damaged.state) == (30, "NO")


def test_other_folders_are_refused(tmp_path):
    with refused("E-RUN-NOT-FOUND"):
        inspect_checkpoints(tmp_path, hash_files=False)
    (tmp_path / "events.jsonl").touch()
    with refused("E-CKPT-NONE"):
        inspect_checkpoints(tmp_path, hash_files=False)


def test_the_verb_prints_a_table_or_json(three, capsys):
    assert main(["ckpt", "verify", str(three.root)]) == 21
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "when", "size", "where", "verified", "note"]
    assert lines[2].endswith(RESUMES_HERE) and "disk   NO" in lines[3] and len(lines) == 4
    (three.checkpoint(20) / "rank-00000.safetensors").write_bytes(b"x" * 16)
    assert main(["ckpt", "verify", str(three.root)]) == 21
    lines = capsys.readouterr().out.splitlines()
    damage = inspect_checkpoints(three.checkpoint(20), hash_files=True).checkpoints[0].note
    assert lines[2].split()[-4:] == ["disk", "NO", "see", "below"] and f"step 20, disk: {damage}" in lines
    assert main(["ckpt", "verify", str(three.checkpoint(10)), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["checkpoints"][0]["step"] == 10 and facts["exit_code"] == 0
    assert main(["ckpt", "verify", str(three.root / "nothing")]) == 2


def test_a_folder_that_cannot_be_read_costs_a_roll_back_its_reason(folder, monkeypatch):
    """The state is loaded on all ranks then: an error on rank 0 would leave the others waiting for it."""

    def fails(folder):
        raise OSError("Input/output error")

    monkeypatch.setattr(resumable, "list_checkpoints", fails)
    assert roll_back_choice(folder, 4) == RollBackChoice("", ())
