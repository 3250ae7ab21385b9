"""A checkpoint whose ledger or numbers cannot be right is named and passed over, although its manifest has the right
hash."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from tests.expect import refused

from ingot.cli.main import main
from ingot.schema.accepted import AcceptedChanges
from ingot.trainer.checkpoint.load import load_model, resume
from ingot.trainer.checkpoint.manifest import read_manifest, verify_checkpoint, write_manifest
from ingot.trainer.checkpoint.save import save_checkpoint
from ingot.trainer.loader.ledger import write_segment

from .conftest import facts, make_training, state_of

BATCH, SEQ_LEN = 4, 16
SETTINGS = {"train.global_batch": BATCH, "train.seq_len": SEQ_LEN}


@pytest.fixture
def run(folder, training):
    """Checkpoints of the steps 10, 20 and 30; the newest has three segments, of which it shares two with the others."""
    segments = []
    for step in (10, 20, 30):
        ids = np.arange((step - 10) * BATCH, step * BATCH).reshape(10, BATCH)
        segments.append(write_segment(folder.ledger, step - 9, step, ids))
        its = dataclasses.replace(facts(step), tokens=step * BATCH * SEQ_LEN, settings=SETTINGS)
        save_checkpoint(folder, its, state_of(*training), tuple(segments), keep=3)
    return folder


def resumed(folder) -> tuple[int, list[int]]:
    """The step that a run resumes from, and the steps of the checkpoints that it refuses."""
    steps = []
    manifest = resume(
        folder,
        state_of(*make_training(seed=5)),
        settings=SETTINGS,
        data_fingerprint="d" * 64,
        on_refused=lambda step, path, reason, again: steps.append(step),
    )
    return manifest.step, steps


def verified(folder, capsys, verb="verify") -> tuple[int, dict[int, str]]:
    """The exit code of `ingot ckpt verify RUN` (or ls), and why each damaged checkpoint is."""
    capsys.readouterr()
    code = main(["ckpt", verb, str(folder.root), "--json"])
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    if verb == "ls":
        return code, {c["step"]: c["disk"]["damage"] for c in listed if c["disk"]["damage"]}
    return code, {c["step"]: c["note"] for c in listed if c["state"] == "NO"}


def segment(number, **changes):
    def forge(manifest):
        ledger = list(manifest.ledger)
        ledger[number] = dataclasses.replace(ledger[number], **changes)
        return {"ledger": tuple(ledger)}

    return forge


LEDGERS = {
    "a file elsewhere": segment(1, file="../../../etc/passwd"),
    "an absolute path": segment(1, file="/etc/passwd"),
    "a file of other steps": segment(1, file="steps-00000001-00000010.i64"),
    "no hash": segment(1, sha256=""),
    "a gap": segment(1, first_step=12, file="steps-00000012-00000020.i64"),
    "a step twice": segment(1, first_step=10, file="steps-00000010-00000020.i64"),
    "backward": segment(2, last_step=20, file="steps-00000021-00000020.i64"),
    "no segment": lambda m: {"ledger": ()},
    "no first segment": lambda m: {"ledger": m.ledger[1:]},
    "no last segment": lambda m: {"ledger": m.ledger[:-1]},
    "a segment left out": lambda m: {"ledger": (m.ledger[0], m.ledger[2])},
    "swapped segments": lambda m: {"ledger": (m.ledger[1], m.ledger[0], m.ledger[2])},
    "a segment twice": lambda m: {"ledger": (m.ledger[0], m.ledger[0], *m.ledger[1:])},
    "a step too many": lambda m: {"ledger": (*m.ledger, dataclasses.replace(
        m.ledger[2], first_step=31, last_step=31, file="steps-00000031-00000031.i64"))},
}  # fmt: skip


def changes_at(*steps):
    return tuple(AcceptedChanges(step=step, config_sha256="", data_fingerprint="", changes={}) for step in steps)


NUMBERS = {
    "negative world": {"world": -5},
    "no world": {"world": 0},
    "more ranks than files": {"world": 2},
    "a world that would be counted out": {"world": 10**12},
    "too many tokens": {"tokens": 10**18},
    "a token too few": {"tokens": 30 * BATCH * SEQ_LEN - 1},
    "negative tokens": {"tokens": -1, "settings": {}},
    "a degree of 0": {"layout": {"dp_shard": 0}},
    "a random state too many": {"rng": ("00", "00")},
    "a change after its steps": {"accepted": changes_at(30)},
    "changes in the wrong order": {"accepted": changes_at(20, 10)},
    "two changes at a step": {"accepted": changes_at(10, 10)},
}
FORGED = [*((name, f, "E-CKPT-LEDGER") for name, f in LEDGERS.items()),
          *((name, lambda m, c=c: c, "E-CKPT-MANIFEST") for name, c in NUMBERS.items())]  # fmt: skip


@pytest.mark.parametrize(("change", "code"), [f[1:] for f in FORGED], ids=[f[0] for f in FORGED])
def test_a_resealed_manifest_is_refused(run, capsys, change, code):
    path = run.checkpoint(30)
    manifest = read_manifest(path)
    write_manifest(path, dataclasses.replace(manifest, **change(manifest)))
    with refused(code, path=str(path)):
        read_manifest(path)
    for verb in ("ls", "verify"):
        found, damaged = verified(run, capsys, verb)
        assert (found, list(damaged)) == (21, [30])
    assert resumed(run) == (20, [30])


def test_the_first_checkpoint_is_of_a_step(run):
    manifest = read_manifest(run.checkpoint(30))
    path = run.checkpoint(30).rename(run.checkpoint(0))
    write_manifest(path, dataclasses.replace(manifest, step=0, tokens=0, ledger=()))
    with refused("E-CKPT-MANIFEST"):
        read_manifest(path)


def flipped(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


@pytest.mark.parametrize(
    ("change", "code", "seen_by_ls"),
    [
        (lambda data: data[:-1], "E-CKPT-SIZE", True),
        (lambda data: data[: -8 * BATCH], "E-CKPT-SIZE", True),  # a step less
        (lambda data: data[:160], "E-CKPT-SIZE", True),  # half a batch per step
        (lambda data: b"", "E-CKPT-SIZE", True),
        (lambda data: data + data, "E-CKPT-SIZE", True),
        (flipped, "E-CKPT-HASH", False),
        (lambda data: data[8 * BATCH :] + data[: 8 * BATCH], "E-CKPT-HASH", False),  # steps in another order
        (None, "E-CKPT-FILE-MISSING", True),
    ],
    ids=["a byte", "a step", "half", "empty", "doubled", "a bit", "turned", "missing"],
)
def test_a_damaged_segment_is_refused(run, capsys, change, code, seen_by_ls):
    name = read_manifest(run.checkpoint(30)).ledger[2].file
    file = run.ledger / name
    file.write_bytes(change(file.read_bytes())) if change else file.unlink()
    with refused(code, path=str(run.checkpoint(30)), file=f"ledger/{name}") as caught:
        verify_checkpoint(run.checkpoint(30))
    assert "do not delete any" in caught.value.fix  # other checkpoints list the file too
    found, damaged = verified(run, capsys)
    assert (found, list(damaged)) == (21, [30]) and name in damaged[30]
    assert verified(run, capsys, "ls")[0] == (21 if seen_by_ls else 0)
    assert resumed(run) == (20, [30])
    load_model(run.checkpoint(30), make_training()[0])  # the weights are whole


def test_a_shared_segment_counts_for_every_checkpoint_that_lists_it(run, capsys):
    (run.ledger / "steps-00000011-00000020.i64").unlink()
    assert list(verified(run, capsys)[1]) == [20, 30]
    assert resumed(run) == (10, [30, 20])
    shutil.rmtree(run.ledger)
    with refused("E-CKPT-NONE-USABLE", checkpoints=3):
        resumed(run)


def test_earlier_segments_may_have_another_batch(run, capsys):
    """The global batch may be changed on the way, with consent."""
    first = write_segment(run.ledger, 1, 10, np.arange(20).reshape(10, 2))
    manifest = read_manifest(run.checkpoint(30))
    write_manifest(run.checkpoint(30), dataclasses.replace(manifest, ledger=(first, *manifest.ledger[1:])))
    assert verify_checkpoint(run.checkpoint(30)).ledger[0] == first


def test_a_copy_outside_a_run_says_what_is_not_checked(run, capsys, tmp_path):
    copy = shutil.copytree(run.checkpoint(30), tmp_path / "copies" / "step-00000030")
    assert main(["ckpt", "verify", str(copy), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert listed["state"] == "yes" and "outside a run" in listed["note"]
