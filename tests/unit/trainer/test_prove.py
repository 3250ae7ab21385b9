"""`ingot ckpt prove`: the ledger of a run against its order and its data, with every way to be wrong planted."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from tests.checkpoints import write_checkpoint

from ingot.cli.main import main
from ingot.config import to_toml
from ingot.errors import DataError, RunBusyError
from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.accepted import AcceptedChanges
from ingot.schema.checkpoint import file_of
from ingot.schema.quarantine_record import Quarantined
from ingot.schema.tokens import MANIFEST, read_token_manifest
from ingot.storage import sha256_bytes, write_atomic, write_json
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.manifest import read_manifest, write_manifest
from ingot.trainer.checkpoint.places import Places, name_run, with_hash
from ingot.trainer.checkpoint.resumable import ResumePoint, find_resume_point
from ingot.trainer.loader import order as order_module
from ingot.trainer.loader.ledger import write_segment
from ingot.trainer.loader.order import Order, quarantine_from
from ingot.trainer.resilience.lock import RunLock

STEPS, EVERY, BATCH = 24, 8, 64


def record(folder, orders, until=STEPS):
    """Write the ledger of a run of STEPS steps and its newest checkpoint. orders: step -> Order."""
    config = load_run(folder.config)
    ids = np.stack([orders(step).step(step, BATCH) for step in range(1, until + 1)])
    ledger = tuple(
        write_segment(folder.ledger, first, first + EVERY - 1, ids[first - 1 : first - 1 + EVERY])
        for first in range(1, until + 1, EVERY)
    )
    fingerprint = tokens_of(folder).fingerprint()
    write_checkpoint(folder, until, config.settings(), data_fingerprint=fingerprint, ledger=ledger)


def tokens_of(folder):
    return read_token_manifest((folder.root / load_run(folder.config).data.tokens).resolve())


def order_of(folder):
    config = load_run(folder.config)
    return Order(tokens_of(folder), config.train.seq_len, config.seed, config.data.weights)


@pytest.fixture
def run(make_run, token_folders, tmp_path):
    """A run of 24 steps with three ledger segments, which passed over its own copy of the data more than once."""
    shutil.copytree(token_folders, tmp_path / "tokens")
    folder = make_run(steps=STEPS, global_batch=BATCH, tokens="../tokens/train")
    order = order_of(folder)
    record(folder, lambda step: order)
    return folder


def proven(folder, capsys, *options) -> dict:
    """The object that `ingot ckpt prove RUN --json` prints."""
    capsys.readouterr()
    code = main(["ckpt", "prove", str(folder.root), "--json", *options])
    proof = json.loads(capsys.readouterr().out)
    assert (proof["exit_code"], proof["proved"]) == (code, code == 0)
    return proof


def test_a_sound_run_is_proven(run, capsys):
    proof = proven(run, capsys)
    windows = order_of(run).epoch_windows
    assert (proof["steps"], proof["checkpoint"], proof["segments"], proof["samples"]) == (24, 24, 3, STEPS * BATCH)
    assert proof["windows"] == {"": windows} and proof["epochs"][""] == STEPS * BATCH / windows > 2
    assert (proof["shards"], proof["counted_steps"], proof["changes"], proof["fault"]) == (2, 24, [], None)
    assert len(proof["unchecked"]) == 2 and len(proven(run, capsys, "--hashes")["unchecked"]) == 1
    assert main(["ckpt", "prove", str(run.root)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("proved ")


def rewrite(folder, number, change, *, sealed=False):
    """Change the ids of a segment; sealed: with the hash of the changed file in the manifest."""
    path = folder.checkpoint(STEPS)
    manifest = read_manifest(path)
    ledger = list(manifest.ledger)
    file = folder.ledger / ledger[number].file
    ids = np.fromfile(file, "<i8").reshape(EVERY, BATCH)
    data = change(ids).tobytes()
    file.write_bytes(data)
    if sealed:
        ledger[number] = dataclasses.replace(ledger[number], sha256=sha256_bytes(data))
        write_manifest(path, dataclasses.replace(manifest, ledger=tuple(ledger)))


def test_windows_in_quarantine_are_proven_with_those_in_their_place(run, capsys):
    """Every window of an epoch is counted once, although others were trained in the place of some, also twice."""
    shard = tokens_of(run).shards[0]
    left_out = Quarantined(
        step=5, shard=shard.name, blocks_sha256=shard.blocks_sha256, begin=0, end=2048, code="E-SHARD-HASH"
    )
    config = load_run(run.config)
    quarantine = quarantine_from([left_out], BATCH)
    order = Order(tokens_of(run), config.train.seq_len, config.seed, config.data.weights, quarantine=quarantine)
    record(run, lambda step: order)
    assert proven(run, capsys)["fault"]["code"] == "E-LEDGER-SAMPLE"  # nothing is recorded
    manifest = read_manifest(run.checkpoint(STEPS))
    write_manifest(run.checkpoint(STEPS), dataclasses.replace(manifest, quarantine=(left_out,)))
    proof = proven(run, capsys)
    assert proof["fault"] is None and proof["replaced"] > BATCH and proof["counted_steps"] == STEPS
    assert any("quarantine" in one for one in proof["unchecked"])


def one_id(ids):
    ids[4, 7] ^= 1
    return ids


def two_steps(ids):
    ids[[2, 5]] = ids[[5, 2]]
    return ids


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize(("change", "step", "sample"), [(one_id, 13, 7), (two_steps, 11, 0)])
def test_the_first_wrong_sample_is_named(run, capsys, change, step, sample, sealed):
    wanted = int(order_of(run).step(step, BATCH)[sample])
    rewrite(run, 1, change, sealed=sealed)
    found = int(np.fromfile(run.ledger / "steps-00000009-00000016.i64", "<i8").reshape(EVERY, BATCH)[step - 9, sample])
    proof = proven(run, capsys)
    assert proof["exit_code"] == 21 and proof["steps"] == step - 1
    assert proof["fault"]["code"] == "E-LEDGER-SAMPLE"
    facts = {"step": step, "sample": sample, "expected": wanted, "found": found}
    assert facts.items() <= proof["fault"]["facts"].items()
    assert main(["ckpt", "prove", str(run.root)]) == 21
    *_, fault, fix = capsys.readouterr().out.splitlines()
    assert fault.startswith("FAULT ") and "ckpt verify" in fix


@pytest.mark.parametrize("left", [8 * BATCH * (EVERY - 1), 8 * BATCH * EVERY // 2, 8 * BATCH * EVERY - 3, 0])
def test_a_truncated_segment_is_a_fault(run, capsys, left):
    file = run.ledger / "steps-00000009-00000016.i64"
    file.write_bytes(file.read_bytes()[:left])
    proof = proven(run, capsys)
    assert (proof["steps"], proof["segments"], proof["fault"]["code"]) == (8, 1, "E-LEDGER-HASH")


def test_a_missing_segment_is_a_fault(run, capsys):
    (run.ledger / "steps-00000001-00000008.i64").unlink()
    proof = proven(run, capsys)
    assert (proof["steps"], proof["fault"]["code"], proof["fault"]["facts"]["step"]) == (0, "E-LEDGER-READ", 1)


def test_a_manifest_that_leaves_a_segment_out_is_refused(run, capsys):
    manifest = read_manifest(run.checkpoint(STEPS))
    write_manifest(run.checkpoint(STEPS), dataclasses.replace(manifest, ledger=manifest.ledger[1:]))
    assert main(["ckpt", "prove", str(run.root), "--json"]) == 21
    assert json.loads(capsys.readouterr().out)["error"] == "E-CKPT-LEDGER"


def change_run_file(folder, **changes):
    config = load_run(folder.config)
    write_atomic(folder.config, to_toml(dataclasses.replace(config, **changes)))


def test_another_seed_in_the_run_file_is_a_fault(run, capsys):
    seed = load_run(run.config).seed
    change_run_file(run, seed=seed + 1)
    proof = proven(run, capsys)
    assert (proof["fault"]["code"], proof["steps"]) == ("E-LEDGER-SAMPLE", 0)
    assert [(d["key"], d["before"], d["after"]) for d in proof["differences"]] == [("seed", seed, seed + 1)]


def test_other_tokens_are_a_fault(run, capsys):
    path = run.root.parent / "tokens" / "train" / MANIFEST
    values = json.loads(path.read_text())
    write_json(path, values | {"seed": values["seed"] + 1})
    assert proven(run, capsys)["fault"]["code"] == "E-PROVE-TOKENS"


def test_shards_are_checked_as_far_as_asked(run, capsys):
    tokens = run.root.parent / "tokens" / "train"
    content = bytearray((tokens / "stone.tokens").read_bytes())
    content[100] ^= 1
    (tokens / "stone.tokens").write_bytes(content)
    assert proven(run, capsys)["fault"] is None
    assert proven(run, capsys, "--hashes")["fault"]["code"] == "E-SHARD-HASH"
    (tokens / "stone.tokens").write_bytes(content[:-2])
    assert proven(run, capsys)["fault"]["code"] == "E-SHARD-SIZE"
    (tokens / "stone.tokens").unlink()
    assert proven(run, capsys)["fault"]["code"] == "E-SHARD-MISSING"


def test_an_order_that_repeats_is_found_by_the_count(run, capsys, monkeypatch):
    """The ledger agrees with the order, but the order itself is wrong: two windows of the first epoch are equal."""
    right = order_module.Shuffle.take

    def wrong(self, first, last):
        ids = right(self, first, last)
        at = np.arange(first, last)
        ids[at == 40] = right(self, 5, 6)
        return ids

    monkeypatch.setattr(order_module.Shuffle, "take", wrong)
    order = order_of(run)
    record(run, lambda step: order)
    proof = proven(run, capsys)
    facts = {"step": 1, "sample": 40, "found": int(order.step(1, BATCH)[5]), "epoch": 1}
    assert proof["fault"]["code"] == "E-LEDGER-REPEAT" and facts.items() <= proof["fault"]["facts"].items()


def accept(folder, step, key, before, after):
    records = json.loads(folder.accepted.read_text()) if folder.accepted.exists() else []
    write_json(folder.accepted, [*records, {"step": step, "changes": {key: [before, after]}}])


def test_a_changed_mixture_is_part_of_the_proof(run, capsys):
    config, tokens = load_run(run.config), tokens_of(run)
    mixes = [{}, {"metal": 1.0, "stone": 1.0}, {"stone": 1.0}]
    orders = [
        Order(tokens, 16, config.seed, own, earlier=[(8 * (i + 1) * BATCH, w) for i, w in enumerate(mixes[:number])])
        for number, own in enumerate(mixes)
    ]
    change_run_file(run, data=dataclasses.replace(config.data, weights=mixes[2]))
    record(run, lambda step: orders[(step - 1) // 8])
    accept(run, 8, "data.weights", mixes[0], mixes[1])
    accept(run, 16, "data.weights", mixes[1], mixes[2])
    proof = proven(run, capsys)
    assert (proof["fault"], proof["counted_steps"]) == (None, STEPS)
    assert [(c["step"], c["after"]) for c in proof["changes"]] == [(9, mixes[1]), (17, mixes[2])]
    taken = {name: round(epochs * proof["windows"][name]) for name, epochs in proof["epochs"].items()}
    assert taken[""] == 8 * BATCH and taken["metal"] + taken["stone"] == 16 * BATCH and proof["epochs"]["stone"] > 1


def test_a_changed_seed_ends_the_count_but_not_the_comparison(run, capsys):
    seed = load_run(run.config).seed
    orders = [Order(tokens_of(run), 16, one) for one in (seed, seed + 1)]
    change_run_file(run, seed=seed + 1)
    record(run, lambda step: orders[step > 8])
    accept(run, 8, "seed", seed, seed + 1)
    proof = proven(run, capsys)
    assert (proof["fault"], proof["steps"], proof["counted_steps"]) == (None, STEPS, 8)
    assert "9 to 24" in proof["unchecked"][-1]


def test_steps_of_a_lost_checkpoint_are_named(run, capsys):
    """The run saved step 32, whose checkpoint is damaged or gone: the proof ends before, and says so."""
    assert not any("saved" in one for one in proven(run, capsys)["unchecked"])
    EventLog(run.events).write(events.CHECKPOINT, step=32, bytes=1, stall_seconds=0.1)
    assert "steps 25 to 32, which were saved" in proven(run, capsys)["unchecked"][0]
    write_checkpoint(run, 32)
    (run.checkpoint(32) / "manifest.json").write_text("torn")
    proof = proven(run, capsys)
    assert proof["checkpoint"] == 24 and "manifest.json is not JSON" in proof["unchecked"][0]


def test_a_checkpoint_can_be_named(run, capsys):
    manifest = read_manifest(run.checkpoint(STEPS))
    write_checkpoint(run, 16, manifest.settings, data_fingerprint=manifest.data_fingerprint, ledger=manifest.ledger[:2])
    assert main(["ckpt", "prove", str(run.checkpoint(16)), "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert (proof["checkpoint"], proof["steps"]) == (16, 16)
    assert "steps 17 to 24, which were saved" in proof["unchecked"]


@pytest.mark.parametrize("event", [{}, {"from_step": "x", "layout": 3}, {"from_step": 4}])
def test_an_odd_start_in_the_log_does_no_harm(run, capsys, event):
    EventLog(run.events).write(events.RUN_STARTED, **event)
    assert proven(run, capsys)["changes"] == []


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-9])])
def test_damaged_segments_are_written_again(run, capsys, damage):
    files = [run.ledger / f"steps-{first:08d}-{first + 7:08d}.i64" for first in (1, 9, 17)]
    contents = [file.read_bytes() for file in files]
    damage(files[1])
    assert main(["ckpt", "verify", str(run.root)]) == 21
    assert "steps-00000009-00000016.i64" in capsys.readouterr().out
    assert main(["ckpt", "repair", str(run.root), "--json"]) == 0
    repair = json.loads(capsys.readouterr().out)
    assert (repair["written"], repair["sound"], repair["left"]) == (["steps-00000009-00000016.i64"], [24], {})
    assert [file.read_bytes() for file in files] == contents
    assert main(["ckpt", "verify", str(run.root)]) == 0


def test_only_the_lost_bits_are_written(run, capsys):
    """The order of another seed gives other samples: nothing is written."""
    file = run.ledger / "steps-00000009-00000016.i64"
    file.unlink()
    change_run_file(run, seed=load_run(run.config).seed + 1)
    assert main(["ckpt", "repair", str(run.root), "--json"]) == DataError.exit_code
    error = json.loads(capsys.readouterr().out)
    assert (error["error"], error["facts"]["step"]) == ("E-LEDGER-REPAIR", 9)
    assert not file.exists()


@pytest.fixture
def went_back(run):
    """The run trained 24 steps with all windows, had to continue from step 8, took other weights, and saved step 16:
    the second segment is that of step 16."""
    config = load_run(run.config)
    manifest = read_manifest(run.checkpoint(STEPS))
    change = AcceptedChanges(
        step=8, config_sha256="", data_fingerprint="", changes={"data.weights": ({}, {"stone": 1.0})}
    )
    change_run_file(run, data=dataclasses.replace(config.data, weights={"stone": 1.0}))
    order = Order(tokens_of(run), 16, config.seed, {"stone": 1.0}, earlier=[(8 * BATCH, {})])
    again = write_segment(run.ledger, 9, 16, np.stack([order.step(step, BATCH) for step in range(9, 17)]))
    write_checkpoint(
        run,
        16,
        load_run(run.config).settings(),
        data_fingerprint=manifest.data_fingerprint,
        ledger=(manifest.ledger[0], again),
        accepted=(change,),
    )
    return run


def repaired(run, capsys):
    capsys.readouterr()
    assert main(["ckpt", "repair", str(run.root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return found["written"], found["sound"], {step: why["code"] for step, why in found["left"].items()}


def test_a_segment_that_another_checkpoint_needs_stays(went_back, capsys):
    content = (went_back.ledger / "steps-00000009-00000016.i64").read_bytes()
    assert repaired(went_back, capsys) == ([], [16], {"24": "E-LEDGER-OTHERS"})
    assert (went_back.ledger / "steps-00000009-00000016.i64").read_bytes() == content


def test_of_two_segments_of_a_name_that_of_the_sound_checkpoint_is_written(went_back, capsys):
    file = went_back.ledger / "steps-00000009-00000016.i64"
    content = file.read_bytes()
    file.unlink()
    (went_back.checkpoint(24) / "rank-00000.safetensors").write_bytes(b"x")
    assert repaired(went_back, capsys) == ([file.name], [16], {})
    assert file.read_bytes() == content


def test_files_on_disks_of_other_nodes_are_named_and_stop_no_repair(went_back, tmp_path, capsys):
    """Step 16 has its tensors on another node. Those of step 24 are on this one, and damaged."""
    file = went_back.ledger / "steps-00000009-00000016.i64"
    content = file.read_bytes()
    file.unlink()
    (tmp_path / "nvme").mkdir()
    rules = load_run(went_back.config).checkpoint
    change_run_file(went_back, checkpoint=dataclasses.replace(rules, disks=(str(tmp_path / "nvme"),)))
    name_run(went_back)
    entry = read_manifest(went_back.checkpoint(24)).files[file_of(0)]
    for step in (16, 24):
        (went_back.checkpoint(step) / file_of(0)).unlink()
    folder = Places(went_back.checkpoint(24)).own_folder(0)
    write_atomic(folder / with_hash(file_of(0), entry.sha256), b"x" * entry.bytes)
    assert repaired(went_back, capsys) == ([file.name], [16], {})
    assert file.read_bytes() == content
    assert main(["ckpt", "repair", str(went_back.root)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("unchecked")]
    assert line.startswith("unchecked step 16: 1 tensor files are on no disk of this node") and file_of(0) in line


def test_after_a_repair_no_checkpoint_counts_as_refused(run, capsys):
    file = run.ledger / "steps-00000009-00000016.i64"
    file.unlink()
    refusal = {"step": 24, "path": "x", "reason": f"checkpoint x: ledger/{file.name} is missing"}
    EventLog(run.events).write(events.CHECKPOINT_REFUSED, **refusal)
    assert find_resume_point(run).step == 0
    repaired(run, capsys)
    assert find_resume_point(run) == ResumePoint(24, 24, "")


def test_a_refused_checkpoint_that_was_loaded_later_is_sound(run):
    """The reading was refused, not the bytes."""
    log = EventLog(run.events)
    log.write(events.CHECKPOINT_REFUSED, step=24, path="x", reason="checkpoint x: it cannot be read")
    assert find_resume_point(run).step == 0
    log.write(events.RUN_STARTED, from_step=24, layout={})
    assert find_resume_point(run).step == 24


def test_a_run_in_training_is_not_repaired(run, capsys):
    with RunLock(run.lock):
        assert main(["ckpt", "repair", str(run.root), "--json"]) == RunBusyError.exit_code
    assert json.loads(capsys.readouterr().out)["error"] == "E-RUN-BUSY"


def test_a_path_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["ckpt", "prove", str(tmp_path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == "E-RUN-NOT-FOUND"
