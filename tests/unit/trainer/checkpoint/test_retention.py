"""The rule of retention, and pins that are set while another process removes checkpoints."""

import itertools
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.checkpoints import write_checkpoint, write_weights
from tests.expect import refused
from tests.own_time import own_time

from ingot.cli.main import main
from ingot.schema.checkpoint import WEIGHTS
from ingot.schema.guard import Guard
from ingot.schema.launch import Launch
from ingot.schema.run import Checkpoint, RemoteCheckpoints
from ingot.schema.run_folder import RunFolder
from ingot.stores.memory import MemoryStore
from ingot.stores.store import StoreUnreachable
from ingot.trainer.checkpoint import folders, pins
from ingot.trainer.checkpoint.folders import prune, remove_leftovers
from ingot.trainer.checkpoint.manifest import candidate_folders, verify_checkpoint
from ingot.trainer.checkpoint.remote import RemoteTier
from ingot.trainer.checkpoint.retention import retained
from ingot.trainer.launch import retain, stored
from ingot.trainer.resilience.lock import RunLock


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.config.write_text("name = 'run'\n")
    for step in (10, 20, 30, 40):
        write_checkpoint(folder, step)
    return folder


def steps(folder):
    return [int(path.name.removeprefix("step-")) for path in candidate_folders(folder.checkpoints)]


def tier_of(folder, store, **rules):
    return RemoteTier(folder, store, RemoteCheckpoints(url="s3://bucket/run", **rules))


def stored_tier(folder, store=None, **rules):
    tier = tier_of(folder, store or MemoryStore(), **rules)
    for step in (10, 20, 30, 40):
        tier.push(step)
    return tier


def decided(keep=1, keep_every=0, pinned=(), unsound=(), suspect=(), back_to=(), proven_steps=0):
    reasons = retained(
        range(10, 60, 10),
        keep=keep,
        keep_every=keep_every,
        pinned=set(pinned),
        is_sound=lambda step: step not in unsound,
        is_suspect=lambda step: step in suspect,
        back_to=back_to,
        proven_steps=proven_steps,
    )
    return [step for step, reason in reasons.items() if reason]


def test_what_the_rules_keep():
    assert decided() == [50]
    assert decided(keep=0) == [50, 40, 30, 20, 10]
    assert decided(keep_every=20) == [50, 40, 20]
    assert decided(pinned=[10]) == [50, 10]
    assert decided(keep=2, suspect=[50, 40, 30]) == [50, 40, 20, 10]
    assert decided(unsound=[50, 40]) == [50, 40, 30]
    assert decided(back_to=[29]) == decided(back_to=[20]) == [50, 20]
    assert decided(back_to=[20], unsound=[20]) == [50, 10] and decided(back_to=[9]) == [50]
    assert decided(proven_steps=9) == [50, 40] and decided(proven_steps=10) == [50, 40, 30]  # 40 is the next one
    assert decided(proven_steps=9, suspect=[40]) == [50, 30] and decided(proven_steps=49) == [50, 10]
    assert decided(proven_steps=8, suspect=[40, 50]) == [50, 30, 20]
    assert decided(proven_steps=19, back_to=[15, 45]) == [50, 40, 30, 10]


@pytest.mark.parametrize(
    ("every", "keep", "proven_steps"),
    [(8, 1, 8), (4, 1, 8), (4, 2, 8), (2, 3, 8), (20, 3, 100), (50, 3, 100), (1, 1, 8)],
)
def test_a_run_always_has_a_proven_checkpoint_to_go_back_to(every, keep, proven_steps):
    """Save by save: for trouble in any step, one is left whose steps follow before the step before that."""
    kept: list[int] = []
    for save in range(every, 1000, every):
        rules = {"keep": keep, "keep_every": 0, "pinned": set(), "proven_steps": proven_steps}
        reasons = retained([*kept, save], is_sound=lambda _: True, is_suspect=lambda _: False, **rules)
        kept = sorted(step for step, reason in reasons.items() if reason)
        for first in range(save + 1, save + every + 1):
            limit = first - 2 - proven_steps
            assert limit < every or kept[0] <= limit, (save, first, kept)
        assert len(kept) <= keep + 2


def test_the_newest_sound_checkpoint_always_stays():
    numbers = (10, 20, 30, 40, 50)
    sets = [set(c) for n in range(6) for c in itertools.combinations(numbers, n)]
    for unsound, suspect in itertools.product(sets, sets):
        stays = decided(unsound=unsound, suspect=suspect)
        for sound in (set(numbers) - unsound, set(numbers) - unsound - suspect):
            assert not sound or max(sound) in stays


def test_a_pinned_checkpoint_and_multiples_stay_on_the_disk(folder):
    assert pins.pin(folder, 10)
    prune(folder, 40, keep=1, keep_every=20)
    assert steps(folder) == [40, 20, 10]
    assert pins.unpin(folder, 10) and not pins.unpin(folder, 10)
    prune(folder, 40, keep=1)
    assert steps(folder) == [40]


def test_a_pin_during_a_removal_brings_the_checkpoint_back(folder, monkeypatch):
    """The pin comes after the writer has decided and renamed the folder; a kill there loses nothing, either."""
    aside = folder.checkpoint(10).with_name(pins.REMOVED + folder.checkpoint(10).name)
    folder.checkpoint(10).rename(aside)
    monkeypatch.setattr(pins, "_PATIENCE_SECONDS", 1.0)
    own_time(monkeypatch, pins, sleep=lambda seconds: remove_leftovers(folder))
    assert pins.pin(folder, 10)
    verify_checkpoint(folder.checkpoint(10))
    folder.checkpoint(10).rename(aside)
    (aside / "manifest.json").unlink()  # a removal that was killed half-way
    assert not pins.pin(folder, 10)
    assert not aside.exists() and steps(folder) == [40, 30, 20]


def test_a_pin_between_the_decision_and_the_removal_is_seen(folder, monkeypatch):
    decide = folders.remove_leftovers

    def pinned_meanwhile(run):
        pins.write_atomic(run.checkpoints / "pinned" / "step-00000020", b"")
        return decide(run)

    monkeypatch.setattr(folders, "remove_leftovers", pinned_meanwhile)
    prune(folder, 40, keep=1)
    assert steps(folder) == [40, 20]


def test_a_pinned_checkpoint_stays_in_the_store(folder):
    tier = stored_tier(folder, keep=1, keep_every=20)
    assert tier.pins.pin(10, lambda: True)
    assert pins.pin(folder, 30)  # of the run folder only: it goes to the store
    assert tier.prune() == []
    assert tier.steps() == [40, 30, 20, 10] and tier.pins.pinned() == {10, 30}
    shutil.rmtree(folder.checkpoints)
    assert tier_of(folder, tier.store, keep=1).prune() == [20]


def test_a_pin_during_a_removal_in_the_store_is_seen_by_one_of_both(folder):
    class Pinning(MemoryStore):
        def write(self, name, data, *, new=False):
            super().write(name, data, new=new)
            if name == "checkpoints/removing/step-00000010":
                super().write("checkpoints/pinned/step-00000010", [b"\n"])

    tier = stored_tier(folder, Pinning(), keep=1)
    assert tier.prune() == [30, 20]
    assert tier.steps() == [40, 10] and tier.store.list("checkpoints/removing") == []


def test_a_pin_waits_for_a_removal_in_the_store(folder, monkeypatch):
    tier = stored_tier(folder, keep=2)
    assert tier.pins.begin_removal(10)

    def finish_removal(seconds):
        for one in tier.store.list("checkpoints/step-00000010"):
            tier.store.remove(one.name)
        tier.pins.end_removals()

    own_time(monkeypatch, pins, sleep=finish_removal)
    assert not tier.pins.pin(10, lambda: 10 in tier.steps())


def test_a_damaged_manifest_in_the_store_does_not_count(folder):
    store = stored_tier(folder).store
    store.write("checkpoints/step-00000040/manifest.json", [b"{}"])
    tier = RemoteTier(folder, store, RemoteCheckpoints(url="s3://bucket/run", keep=1))
    assert tier.prune() == [20, 10]
    assert tier.steps() == [40, 30]


class Silent(MemoryStore):
    def list(self, prefix=""):
        raise StoreUnreachable("E-STORE-UNREACHABLE", "no answer")


@pytest.fixture
def rules(folder, tmp_path, monkeypatch):
    (tmp_path / "s").mkdir()
    remote = RemoteCheckpoints(url=f"file://{tmp_path}/s", keep=2)
    run = SimpleNamespace(checkpoint=Checkpoint(keep=1, remote=remote), launch=Launch(), guard=Guard(proven_steps=0))
    monkeypatch.setattr(stored, "recorded_run", lambda path: run)
    monkeypatch.setattr(retain, "recorded_run", lambda path: run)
    for step in (10, 20, 30, 40):
        stored.push_checkpoint(folder.root, step)
    return run


def test_commands_pin_and_prune_both_tiers(folder, rules, capsys):
    url = rules.checkpoint.remote.url
    assert retain.pin_checkpoint(folder.root, 10).places == ("disk", url)
    with refused("E-CKPT-STEP-UNKNOWN", step=15, steps=[10, 20, 30, 40]):
        retain.pin_checkpoint(folder.root, 15)
    tier = stored.open_run(folder.root)[1]
    assert pins.pinned_steps(folder) == tier.pins.pinned() == {10}
    with RunLock(folder.lock):
        shown = retain.prune_checkpoints(folder.root, dry_run=True)
        with refused("E-RUN-BUSY"):
            retain.prune_checkpoints(folder.root, dry_run=False)
    goes = [(one.place, one.step) for one in shown if not one.reason]
    assert goes == [("disk", 30), ("disk", 20), (url, 20)]
    assert (steps(folder), tier.steps()) == ([40, 30, 20, 10], [40, 30, 20, 10])
    assert main(["ckpt", "prune", str(folder.root)]) == 0
    assert (steps(folder), tier.steps()) == ([40, 10], [40, 30, 10])
    assert main(["ckpt", "unpin", str(folder.root), "10"]) == 0
    with refused("E-CKPT-NOT-PINNED", step=10):
        retain.unpin_checkpoint(folder.root, 10)
    retain.prune_checkpoints(folder.root, dry_run=False)
    assert (steps(folder), tier.steps()) == ([40], [40, 30])
    assert main(["ckpt", "pin", str(folder.root), "30"]) == 0  # in the store alone
    out = capsys.readouterr().out
    assert "removed" in out and "not in the store" not in out
    write_checkpoint(folder, 50)
    assert main(["ckpt", "pin", str(folder.root), "50"]) == 0
    assert f"not in the store {url}: ingot ckpt push {folder.root} --step 50" in capsys.readouterr().out


def test_weights_are_pruned_by_their_own_number_on_both_tiers(folder, rules):
    rules.checkpoint = replace(rules.checkpoint, weights_keep=1)
    for step in (10, 20, 30):
        write_weights(folder, step)
        stored.push_checkpoint(folder.root, step, kind=WEIGHTS)
    retain.pin_checkpoint(folder.root, 10)  # the checkpoint, not the weights of its step
    found = retain.prune_checkpoints(folder.root, dry_run=False)
    places = ("disk", rules.checkpoint.remote.url)
    assert [(one.place, one.step) for one in found if one.kind == WEIGHTS and not one.reason] == [
        (place, step) for place in places for step in (20, 10)
    ]
    assert steps(folder.weights) == stored.open_run(folder.root, kind=WEIGHTS)[1].steps() == [30]
    assert steps(folder) == [40, 10]


def test_a_damaged_newest_one_does_not_displace_a_sound_one(folder, rules):
    (folder.checkpoint(40) / "manifest.json").write_text("torn")
    retain.prune_checkpoints(folder.root, dry_run=False)
    assert steps(folder) == [40, 30]


def test_without_an_answer_of_the_store_the_disk_is_pinned(folder, rules, monkeypatch):
    silent = tier_of(folder, Silent())
    monkeypatch.setattr(retain, "open_run", lambda path: (folder, silent))
    assert retain.pin_checkpoint(folder.root, 20).waits == "no answer"
    with refused("E-STORE-UNREACHABLE"):
        retain.pin_checkpoint(folder.root, 15)
    assert pins.pinned_steps(folder) == {20}
