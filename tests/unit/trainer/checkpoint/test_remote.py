"""The remote tier, on stores in memory: what a killed upload or a lying store can do to it, and what comes back."""

import itertools
import json
import shutil
import tracemalloc
from functools import partial
from types import SimpleNamespace

import pytest
from tests.checkpoints import write_checkpoint, write_weights
from tests.expect import refused

from ingot.events import EventLog, read_events
from ingot.schema import events
from ingot.schema.checkpoint import FULL, WEIGHTS, Health
from ingot.schema.launch import Launch
from ingot.schema.run import RemoteCheckpoints
from ingot.schema.run_folder import RunFolder
from ingot.storage import canonical_json, sha256_bytes
from ingot.stores.local import LocalStore
from ingot.stores.memory import MemoryStore
from ingot.stores.store import StoreRefused, StoreUnreachable, read_object
from ingot.trainer.checkpoint import uploader
from ingot.trainer.checkpoint.headers import LEAST_BYTES
from ingot.trainer.checkpoint.manifest import list_checkpoints, verify_checkpoint
from ingot.trainer.checkpoint.pace import Pace
from ingot.trainer.checkpoint.remote import NotYetStored, RemoteTier
from ingot.trainer.checkpoint.tiers import fetch_instead, fetch_newest, require_empty
from ingot.trainer.checkpoint.vanished import require_checkpoints
from ingot.trainer.launch import stored as commands
from ingot.trainer.resilience.lock import RunLock

RULES = RemoteCheckpoints(url="s3://bucket/run")
FILE, MANIFEST = "checkpoints/step-00000020/rank-00000.safetensors", "checkpoints/step-00000020/manifest.json"


class Killed(BaseException):
    """The death of the process that uses the store."""


class DyingStore(MemoryStore):
    """A store whose user dies at the operation number `dies_at`, after it was done or half done.

    done: what was done, for the table of crash points.
    """

    def __init__(self, dies_at=10**9):
        super().__init__()
        self.dies_at, self.done = dies_at, []

    def write(self, name, data, *, new=False):
        self._at(f"before write {name}")
        super().write(name, data, new=new)
        self._at(f"after write {name}")

    def list(self, prefix=""):
        self._at(f"list {prefix}")
        return super().list(prefix)

    def stream(self, name):
        self._at(f"read {name}")
        return super().stream(name)

    def remove(self, name):
        self._at(f"before remove {name}")
        super().remove(name)
        self._at(f"after remove {name}")

    def _at(self, point):
        self.done.append(point)
        if len(self.done) == self.dies_at:
            raise Killed(point)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.config.write_text("name = 'run'\n")
    return folder


def tier_of(folder, store, **rules):
    return RemoteTier(folder, store, RemoteCheckpoints(url="s3://bucket/run", **rules))


def empty_node(tmp_path, name="new"):
    folder = RunFolder(tmp_path / name)
    folder.checkpoints.mkdir(parents=True)
    return folder


def steps(folder):
    return [c.step for c in list_checkpoints(folder.checkpoints)]


def test_what_went_up_comes_back_verified(folder, tmp_path):
    store = MemoryStore()
    for step in (10, 20):
        write_checkpoint(folder, step)
        assert tier_of(folder, store).push(step) > 0
    other = empty_node(tmp_path)
    fetched = tier_of(other, store).fetch_newest()
    assert (fetched.step, steps(other)) == (20, [20])
    verify_checkpoint(other.checkpoint(20))
    assert (other.ledger / "steps-00000001-00000020.i64").read_bytes()
    assert tier_of(other, store).fetch_newest() is None
    assert tier_of(folder, store).push(20) == 0
    assert sorted(p.name for p in other.checkpoints.iterdir()) == ["step-00000020"]


def test_a_segment_goes_up_once(folder):
    store = DyingStore()
    tier = tier_of(folder, store)
    write_checkpoint(folder, 10)
    tier.push(10)
    ledger = list_checkpoints(folder.checkpoints)[0].manifest.ledger
    store.done.clear()
    write_checkpoint(folder, 20, ledger=(*ledger, *next_segment(folder)))
    tier_of(folder, store).push(20)
    written = [point for point in store.done if "ledger" in point and "after" in point]
    assert [point.rpartition("-")[0] for point in written] == ["after write ledger/steps-00000011-00000020"]


def next_segment(folder):
    import numpy as np

    from ingot.trainer.loader.ledger import write_segment

    return (write_segment(folder.ledger, 11, 20, np.arange(10).reshape(10, 1)),)


def test_killed_at_every_operation_of_an_upload_the_store_never_shows_a_torn_checkpoint(folder, tmp_path):
    """The upload of step 20 and the removal of step 5, killed at each operation; then the upload is repeated."""
    for step in (5, 10, 20):
        write_checkpoint(folder, step)
    for dies_at in itertools.count(1):
        store = DyingStore()
        tier_of(folder, store).push(5)
        tier_of(folder, store).push(10)
        store.done.clear()
        store.dies_at, point = dies_at, "none"
        try:
            tier = tier_of(folder, store, keep=2)
            tier.push(20)
            tier.prune()
        except Killed as killed:
            point = str(killed)
        store.dies_at = 10**9
        committed = f"after write {MANIFEST}" in store.done
        other = empty_node(tmp_path, f"node{dies_at}")
        assert tier_of(other, store).fetch_newest().step == (20 if committed else 10), point
        verify_checkpoint(other.checkpoint(steps(other)[0]))
        for step in (whole := tier_of(other, store)).steps():
            assert whole.fetch(step) > 0, point
        again = tier_of(folder, store, keep=2)
        again.push(20)
        again.prune()
        assert again.steps() == [20, 10], point
        assert {one.name.split("/")[1] for one in store.list("checkpoints")} == {"step-00000010", "step-00000020"}
        if point == "none":
            break
    assert dies_at > 18


class EmptiedStore(MemoryStore):
    """A store that is emptied once, after a file of step 20 was written."""

    was_emptied = False

    def write(self, name, data, *, new=False):
        super().write(name, data, new=new)
        if "step-00000020/rank" in name and not self.was_emptied:
            self.was_emptied = True
            for one in self.list():
                self.remove(one.name)


def test_a_checkpoint_whose_objects_vanish_while_it_goes_up_gets_no_manifest(folder, tmp_path):
    store = EmptiedStore()
    tier = tier_of(folder, store)
    for step in (10, 20):
        write_checkpoint(folder, step)
    tier.push(10)
    with refused("E-TIER-EMPTIED", step=20):
        tier.push(20)
    assert tier.steps() == [] and tier.push(20) > 0
    other = empty_node(tmp_path)
    assert tier_of(other, store).fetch_newest().step == 20
    verify_checkpoint(other.checkpoint(20))


def stored_as(store, name):
    """Return the name of the object with the file `name`: it contains the hash of the content."""
    stem = name.partition(".")[0]
    return next(one.name for one in store.list() if one.name.startswith(stem))


@pytest.mark.parametrize("name", [FILE, MANIFEST, "ledger/steps-00000001-00000020.i64"])
@pytest.mark.parametrize("place", [0.0, 0.5, 0.99])
def test_a_flipped_bit_in_the_store_is_named_and_the_next_older_checkpoint_comes(folder, tmp_path, name, place):
    store = MemoryStore()
    for step in (10, 20):
        write_checkpoint(folder, step)
        tier_of(folder, store).push(step)
    name = stored_as(store, name)
    data = bytearray(read_object(store, name))
    data[int(place * len(data))] ^= 1
    store.write(name, [data])
    other, lines, logged = empty_node(tmp_path), [], []
    fetch_newest(other, tier_of(other, store), lambda kind, **facts: logged.append((kind, facts["step"])), lines.append)
    assert logged == [(events.CHECKPOINT_REFUSED, 20), (events.CHECKPOINT_FETCHED, 10)]
    assert "step-00000020" in lines[0]
    assert steps(other) == [10]


class EndlessStore(MemoryStore):
    """A store whose manifest of step 20 is without end, whatever the listing says of its size. read: its chunks."""

    CHUNK, read = b" " * (8 << 20), 0

    def stream(self, name):
        if name != MANIFEST:
            yield from super().stream(name)
            return
        while self.read < 16:
            self.read += 1
            yield self.CHUNK


@pytest.mark.parametrize("kind", [MemoryStore, EndlessStore])
def test_a_manifest_in_the_store_takes_no_more_memory_than_its_checkpoint_permits(folder, tmp_path, kind):
    """Such a manifest is refused by name, and a start takes the next older checkpoint. The hash of the first fits, and
    in memory the values would be 20 times as large."""
    store = kind()
    for step in (10, 20):
        write_checkpoint(folder, step)
        tier_of(folder, store).push(step)
    values = json.loads(read_manifest_of(store))
    values["callbacks"] = {"x": [{}] * (LEAST_BYTES // 128)}
    text = canonical_json({key: value for key, value in values.items() if key != "sha256"})
    store.write(MANIFEST, [f'{text[:-1]},"sha256":"{sha256_bytes(text.encode())}"}}'.encode()])
    del values, text
    other, logged = empty_node(tmp_path), []

    def log(kind, **facts):
        logged.append((kind, facts["step"]))

    tracemalloc.start()
    try:
        damage = {one.step: one.damage for one in tier_of(other, store).stored()}
        fetch_newest(other, tier_of(other, store), log, lambda line: None)
        tier_of(folder, store).push(10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not damage[10] and damage[20].startswith("manifest.json ") and "all files have" in damage[20]
    assert logged == [(events.CHECKPOINT_REFUSED, 20), (events.CHECKPOINT_FETCHED, 10)]
    assert peak < LEAST_BYTES // 4 and getattr(store, "read", 0) <= 10
    with refused("E-CKPT-MANIFEST"):
        tier_of(empty_node(tmp_path, "by name"), store).fetch(20)


def read_manifest_of(store):
    """Return the manifest of step 20 that was uploaded, also where the store gives another one."""
    return b"".join(MemoryStore.stream(store, MANIFEST))


def test_a_file_that_grew_or_is_gone_is_refused(folder, tmp_path):
    store = MemoryStore()
    write_checkpoint(folder, 20)
    tier_of(folder, store).push(20)
    name = stored_as(store, FILE)
    whole = read_object(store, name)
    for change, code in ((whole + b"x" * 10**6, "E-CKPT-SIZE"), (whole[:-1], "E-CKPT-SIZE"), (None, "E-STORE-MISSING")):
        store.remove(name) if change is None else store.write(name, [change])
        other = empty_node(tmp_path, code + str(len(change or "")))
        with refused(code):
            tier_of(other, store).fetch_newest()
        assert list(other.checkpoints.iterdir()) == []


def test_a_damaged_local_file_does_not_go_up(folder):
    write_checkpoint(folder, 20)
    (folder.checkpoint(20) / "rank-00000.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"{}     ?")
    store = MemoryStore()
    with refused("E-CKPT-HASH", file="rank-00000.safetensors"):
        tier_of(folder, store).push(20)
    assert store.list("checkpoints") == []


def test_a_checkpoint_that_is_removed_during_its_upload_still_goes_up(folder, tmp_path):
    class Slow(MemoryStore):
        def list(self, prefix=""):
            shutil.rmtree(folder.checkpoint(20), ignore_errors=True)
            return super().list(prefix)

    store = Slow()
    write_checkpoint(folder, 20)
    tier_of(folder, store).push(20)
    other = empty_node(tmp_path)
    assert tier_of(other, store).fetch_newest().step == 20
    with refused("E-TIER-REMOVED", step=20):
        tier_of(folder, store).push(20)


def test_a_damaged_manifest_in_the_store_stops_no_upload(folder):
    store = MemoryStore()
    for step in (10, 20):
        write_checkpoint(folder, step)
    tier_of(folder, store).push(10)
    store.write("checkpoints/step-00000010/manifest.json", [b"{}"])
    assert tier_of(folder, store).push(20) > 0


def test_the_place_of_another_run_is_refused(folder, tmp_path):
    store, other = MemoryStore(), RunFolder(tmp_path / "other")
    write_checkpoint(folder, 20)
    tier_of(folder, store).push(20)
    other.root.mkdir()
    other.config.write_text("")
    write_checkpoint(other, 20, data_fingerprint="another")
    with refused("E-TIER-OTHER"):
        tier_of(other, store).push(20)
    with refused("E-TIER-NOT-EMPTY", step=20):
        require_empty(other, tier_of(other, store))


def test_a_listing_that_is_late_lets_nobody_replace_a_checkpoint(folder, tmp_path):
    class Late(MemoryStore):
        def list(self, prefix=""):
            return []

    store, other = Late(), RunFolder(tmp_path / "other")
    write_checkpoint(folder, 20)
    assert tier_of(folder, store).push(20) == tier_of(folder, store).push(20) > 0
    text = read_object(store, MANIFEST)
    other.root.mkdir()
    other.config.write_text("")
    write_checkpoint(other, 20, data_fingerprint="another")
    with refused("E-TIER-OTHER"):
        tier_of(other, store).push(20)
    assert read_object(store, MANIFEST) == text


def test_a_listing_that_lacks_a_manifest_removes_no_checkpoint(folder):
    class Late(MemoryStore):
        def list(self, prefix=""):
            return [one for one in super().list(prefix) if one.name != MANIFEST]

    store = Late()
    for step in (20, 30):
        write_checkpoint(folder, step)
        tier_of(folder, store).push(step)
    assert tier_of(folder, store, keep=1).prune() == []
    store.__class__ = MemoryStore
    assert tier_of(folder, store).steps() == [30, 20]
    assert tier_of(folder, store).fetch(20) > 0


def test_a_listing_that_shows_a_removed_checkpoint_leads_to_the_next_older(folder, tmp_path):
    class Late(MemoryStore):
        def list(self, prefix=""):
            return self.listed

    store = Late()
    store.listed = []
    for step in (10, 20):
        write_checkpoint(folder, step)
        tier_of(folder, store).push(step)
    store.listed = MemoryStore.list(store)
    store.remove(MANIFEST)
    refused = []
    fetched = tier_of(empty_node(tmp_path), store).fetch_newest(lambda step, error: refused.append(step))
    assert (fetched.step, refused) == (10, [20])


def test_suspect_checkpoints_displace_no_others(folder):
    store = MemoryStore()
    suspect = Health(state="suspect", reason="a spike", by="test")
    for step in (10, 20, 30, 40, 50):
        write_checkpoint(folder, step, **({"health": suspect} if step > 30 else {}))
        tier_of(folder, store, keep=0).push(step)
    tier_of(folder, store, keep=0).prune()
    assert tier_of(folder, store).steps() == [50, 40, 30, 20, 10]
    tier = tier_of(folder, store, keep=1, keep_every=20)
    assert tier.prune() == [10]
    assert tier.steps() == [50, 40, 30, 20]


def test_the_local_disk_wins_unless_the_store_is_newer(folder):
    store = MemoryStore()
    for step in (10, 20):
        write_checkpoint(folder, step)
        tier_of(folder, store).push(step)
    assert tier_of(folder, store).fetch_newest() is None
    (folder.checkpoint(20) / "rank-00000.safetensors").unlink()
    assert tier_of(folder, store).fetch_newest().step == 20
    assert [c.damage for c in list_checkpoints(folder.checkpoints)] == ["", ""]


def test_a_damaged_local_checkpoint_is_replaced(folder):
    store, lines = MemoryStore(), []
    write_checkpoint(folder, 20)
    tier_of(folder, store).push(20)
    (folder.checkpoint(20) / "rank-00000.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"{}     ?")

    def instead(tier, step=20, again=True):
        return fetch_instead(tier, step, {20}, None, again=again, log=lambda *_, **__: None, say=lines.append)

    assert instead(tier_of(folder, store)) == (20, [])
    verify_checkpoint(folder.checkpoint(20))
    assert instead(tier_of(folder, store), 10) == instead(tier_of(folder, store), again=False) == (0, [])
    assert instead(None) == (0, [])
    store.write(stored_as(store, FILE), [b"damaged as well"])
    found, reasons = instead(tier_of(folder, store))
    assert found == 0 and len(reasons) == 1
    verify_checkpoint(folder.checkpoint(20))

    class Silent(MemoryStore):
        def list(self, prefix=""):
            raise StoreUnreachable("E-STORE-UNREACHABLE", "no answer")

    assert instead(tier_of(folder, Silent())) == (0, []) and lines[-1].endswith("no answer")


def test_the_order_of_a_resume_holds_over_both_tiers(folder, tmp_path):
    """Suspect checkpoints come last, on the disk and in the store, whatever their steps are."""
    store, suspect = MemoryStore(), {"health": Health(state="suspect", reason="a spike", by="test")}
    for step, fields in ((10, {}), (20, suspect), (30, suspect)):
        write_checkpoint(folder, step, **fields)
        tier_of(folder, store).push(step)
    for local, expected in (({}, 10), ({5: {}}, 10), ({10: {}}, None), ({15: suspect}, 10), ({40: suspect}, 10)):
        other = empty_node(tmp_path, f"with-{local}")
        for step, fields in local.items():
            write_checkpoint(other, step, **fields)
        fetched = tier_of(other, store).fetch_newest()
        assert (fetched and fetched.step) == expected, local
    tier = tier_of(other, store)
    assert tier.fetch_before(None, {10}, print).step == 30
    assert tier.fetch_before((2, -30), {10}, print) is None
    assert tier.fetch_before((2, -25), {10}, print).step == 30


def test_a_stored_checkpoint_that_is_damaged_is_reported_although_a_local_one_serves(folder):
    store, logged = MemoryStore(), []
    for step in (10, 20):
        write_checkpoint(folder, step)
        tier_of(folder, store).push(step)
    shutil.rmtree(folder.checkpoint(20))
    store.write(stored_as(store, FILE), [b"damaged"])
    tier = tier_of(folder, store)
    for _ in range(2):  # it is fetched once
        fetch_newest(folder, tier, lambda kind, **facts: logged.append((kind, facts["step"])), lambda line: None)
    assert logged == [(events.CHECKPOINT_REFUSED, 20)]


class Silent(MemoryStore):
    def list(self, prefix=""):
        raise StoreUnreachable("E-STORE-UNREACHABLE", "no answer")


def test_without_an_answer_a_run_continues_only_from_a_local_checkpoint(folder, tmp_path):
    with refused("E-STORE-UNREACHABLE"):
        fetch_newest(folder, tier_of(folder, Silent()), print, print)
    write_checkpoint(folder, 20)
    lines = []
    fetch_newest(folder, tier_of(folder, Silent()), print, lines.append)
    assert lines == ["WARNING   no answer; the run continues from its local checkpoints"]
    require_checkpoints(folder)


def test_ranks_start_again_although_the_store_is_gone_meanwhile(folder, tmp_path):
    """The disk of the store is no longer mounted, or it denies access: training goes on, as after a refused upload."""
    gone = LocalStore(tmp_path / "unmounted", must_exist=True)
    with refused("E-STORE-NO-FOLDER"):
        fetch_newest(folder, tier_of(folder, gone), print, print)
    write_checkpoint(folder, 20)
    lines = []
    fetch_newest(folder, tier_of(folder, gone), print, lines.append)
    assert len(lines) == 1 and lines[0].startswith(f"WARNING   {gone.url} does not exist; the run continues")


def test_the_pace_is_kept_by_all_threads_together(monkeypatch):
    slept, now = [], [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("threading.Event.wait", lambda self, seconds: slept.append(seconds))
    pace = Pace(1000)
    for _ in range(3):
        pace.take(500)
    now[0] = 200.0
    pace.take(500)
    assert slept == [0.0, 0.5, 1.0, 0.0]
    Pace(0).take(10**12)


class Tier:
    """A tier whose uploads end as the script says: None is success."""

    url, commits = "s3://bucket/run", True

    def __init__(self, script, kind=FULL):
        self.script, self.kind, self.pushed, self.pruned, self.held = list(script), kind, [], 0, []

    def push(self, step):
        self.pushed.append(step)
        error = self.script.pop(0) if self.script else None
        if error is not None:
            raise error
        return 7

    def steps(self):
        return self.held

    def prune(self):
        self.pruned += 1


def never_logged(kind, step):
    return False


def requested(*steps):
    requests = uploader._Requests()
    for step in steps:
        requests.add(step, FULL)
    requests.end()
    return requests


def test_an_upload_is_repeated_after_longer_and_longer_pauses(monkeypatch):
    drawn = []
    monkeypatch.setattr("random.uniform", lambda low, high: drawn.append((low, high)) or 0.0)
    lost = StoreUnreachable("E-STORE-UNREACHABLE", "no answer")
    tier, reports = Tier([lost] * 8), []
    uploader.upload_all({FULL: tier}, requested(10, 20), reports.append, never_logged)
    assert tier.pushed == [20] * 9
    assert [one["retry_seconds"] for one in reports[:-1]] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert drawn == [(one["retry_seconds"] / 2, one["retry_seconds"]) for one in reports[:-1]]  # jitter
    assert reports[-1]["kind"] == events.CHECKPOINT_STORED and reports[-1]["left_out"] == [10]
    assert tier.pruned == 1


def test_a_checkpoint_that_went_to_the_store_before_the_start_is_not_left_out(folder):
    """A start asks for the upload of the one that it continues from; a newer save overtakes this request."""
    log = EventLog(folder.events)
    for step in (10, 20):
        log.write(events.CHECKPOINT, step=step, store="memory://")
        log.write(events.CHECKPOINT_STORED, store="memory://", what=FULL, step=step, bytes=7)
    log.write(events.CHECKPOINT, step=10, store="memory://")  # trained again, and not uploaded since
    stored, reports = uploader.stored_by_log(folder, "memory://"), []
    assert stored == {20}
    uploader.upload_all({FULL: Tier([])}, requested(10, 20, 30), reports.append, never_logged, (), stored)
    assert [(one["step"], one["left_out"]) for one in reports] == [(30, [10])]


def test_an_upload_that_the_log_does_not_show_is_reported_when_the_store_has_it(folder, tmp_path):
    """The run was killed between the end of the upload and its event; later starts find the event."""
    store, log = MemoryStore(), EventLog(folder.events)
    write_checkpoint(folder, 20)
    tier = tier_of(folder, store)
    tier.push(20)
    is_logged = partial(uploader.is_stored_by_log, folder, store.url)
    for url, what, step in (("s3://other", FULL, 20), (store.url, WEIGHTS, 20), (store.url, FULL, 10)):
        log.write(events.CHECKPOINT_STORED, store=url, what=what, step=step, bytes=7)
    log.write(events.CHECKPOINT_NOT_STORED, store=store.url, what=FULL, step=20)
    for _ in range(2):
        uploader.upload_all({FULL: tier}, requested(20), lambda event: log.write(**event), is_logged)
    *_, last = logged = list(read_events(folder.events, events.CHECKPOINT_STORED))
    assert len(logged) == 4 and (last["step"], last["what"], last["store"], last["bytes"]) == (20, FULL, store.url, 0)


def test_weights_go_up_after_checkpoints_and_only_if_they_are_newer(monkeypatch):
    """Weights of step 30 wait for checkpoint 20, which fails three times, and then fail until checkpoint 40 comes."""
    lost = StoreUnreachable("E-STORE-UNREACHABLE", "no answer")
    full, alone, reports = Tier([lost] * 3), Tier([lost] * 9, WEIGHTS), []
    tiers, requests, pauses = {FULL: full, WEIGHTS: alone}, requested(20), itertools.count(1)

    def later(low, high):
        match next(pauses):
            case 1:
                requests.add(30, WEIGHTS)
            case 5:
                requests.add(40, FULL)
        return 0.0

    monkeypatch.setattr("random.uniform", later)
    uploader.upload_all(tiers, requests, reports.append, never_logged)
    assert (full.pushed, alone.pushed) == ([20] * 4 + [40], [30] * 2)
    assert [(one["step"], one["what"]) for one in reports if one["kind"] == events.CHECKPOINT_STORED] == [
        (20, FULL),
        (40, FULL),
    ]
    requests = uploader._Requests()
    for step, kind in ((30, WEIGHTS), (40, FULL)):
        requests.add(step, kind)
    requests.end()
    uploader.upload_all(tiers, requests, reports.append, never_logged)
    assert alone.pushed == [30] * 2


def test_steps_that_are_trained_again_after_a_roll_back_go_up():
    """Rolled back from step 310 to 200: the uploads of 250 and of another 310 follow. Weights alone likewise."""
    full, alone, requests = Tier([]), Tier([], WEIGHTS), uploader._Requests()
    later = iter([(250, FULL), (310, FULL), (320, WEIGHTS), (210, WEIGHTS)])

    def saved(event):
        if event["kind"] == events.CHECKPOINT_STORED and (following := next(later, None)):
            requests.add(*following)

    requests.add(310, FULL)
    requests.end()
    uploader.upload_all({FULL: full, WEIGHTS: alone}, requests, saved, never_logged)
    assert (full.pushed, alone.pushed) == ([310, 250, 310], [320, 210])


def test_each_checkpoint_that_a_newer_one_overtakes_is_reported_once(monkeypatch):
    """Step 10 is given up for 20, which weights and then 40 follow; nothing is left out before 50."""
    lost = StoreUnreachable("E-STORE-UNREACHABLE", "no answer")
    tiers, reports, requests = {FULL: Tier([lost]), WEIGHTS: Tier([], WEIGHTS)}, [], uploader._Requests()

    def later(low, high):
        requests.add(20, FULL)
        return 0.0

    def saved(event):
        if event["kind"] == events.CHECKPOINT_STORED:
            reports.append((event["step"], event.get("left_out")))
            match event["step"]:
                case 20:
                    for step, kind in ((30, FULL), (35, WEIGHTS), (40, FULL)):
                        requests.add(step, kind)
                case 40:
                    requests.add(50, FULL)
                    requests.end()

    monkeypatch.setattr("random.uniform", later)
    requests.add(10, FULL)
    uploader.upload_all(tiers, requests, saved, never_logged)
    assert reports == [(20, [10]), (40, [30]), (50, None)]


def test_the_log_shows_which_checkpoints_earlier_attempts_left_out(folder):
    """Not those for another store or none, those that were stored or named, and those that a start made void."""
    log, place = EventLog(folder.events), "s3://bucket/run"
    stored = {"what": FULL, "store": f"{place}/"}  # as the store writes its address
    for step, store in ((1, None), (2, "s3://other"), (3, place), (4, place), (5, place), (6, place)):
        log.write(events.CHECKPOINT, step=step, store=store)
    log.write(events.CHECKPOINT_STORED, step=4, left_out=[3], **stored)
    log.write(events.CHECKPOINT_STORED, step=6, **stored | {"store": "s3://other"})
    log.write(events.CHECKPOINT_STORED, step=6, **stored | {"what": WEIGHTS})
    assert uploader.overtaken_by_log(folder, place, f"{place}/") == [5, 6]
    log.write(events.RUN_STARTED, from_step=5)
    overtaken = uploader.overtaken_by_log(folder, place, f"{place}/")
    assert overtaken == [5]
    tier, reports = Tier([]), []
    tier.held = [5]  # it was sent by a command
    uploader.upload_all({FULL: tier}, requested(8), reports.append, never_logged, [4, *overtaken, 9])
    assert reports[0]["left_out"] == [4]


def test_a_checkpoint_that_went_up_without_an_event_is_never_called_left_out(folder):
    """The store had step 1 when the event of step 2 named what it lacked, and removed it later."""
    log, place = EventLog(folder.events), "s3://bucket/run"
    for step in (1, 2):
        log.write(events.CHECKPOINT, step=step, store=place)
    log.write(events.CHECKPOINT_STORED, step=2, what=FULL, store=place)
    log.write(events.CHECKPOINT, step=3, store=place)
    assert uploader.overtaken_by_log(folder, place, place) == [3]


def test_damaged_events_and_a_listing_that_fails_stop_no_upload(folder):
    log, place = EventLog(folder.events), "s3://bucket/run"
    for step in (3, None, "4", [5]):
        log.write(events.CHECKPOINT, step=step, store=place)
        log.write(events.CHECKPOINT_STORED, step=None, what=FULL, store=place, left_out=step)
        log.write(events.RUN_STARTED, from_step=None)
        log.write(events.ROLLED_BACK, to_step="2")
    log.write(events.CHECKPOINT_STORED, step=2, what=FULL, store=place, left_out=None)
    overtaken = uploader.overtaken_by_log(folder, place, place)
    tier, reports = Tier([]), []
    tier.held = None  # not iterable: an error that is none of a store
    uploader.upload_all({FULL: tier}, requested(8), reports.append, never_logged, overtaken)
    assert [(one["kind"], one["left_out"]) for one in reports] == [(events.CHECKPOINT_STORED, [3])]


@pytest.mark.parametrize(
    ("error", "fix"),
    [(StoreRefused("E-STORE-REFUSED", "no permission", fix="get it"), "get it"), (OSError("gone"), "")],
)
def test_an_upload_that_cannot_succeed_is_reported_once_with_the_way_out(error, fix):
    tier, reports = Tier([error]), []
    uploader.upload_all({FULL: tier}, requested(20), reports.append, never_logged)
    (one,) = reports
    assert (one["kind"], one["retry_seconds"], one["fix"]) == (events.CHECKPOINT_NOT_STORED, None, fix)


def test_commands_move_checkpoints(folder, tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    stored = RemoteCheckpoints(url=f"file://{tmp_path}/store")
    run = SimpleNamespace(checkpoint=SimpleNamespace(remote=stored), launch=Launch(), settings=dict)
    monkeypatch.setattr(commands, "recorded_run", lambda path: run)
    for move in (commands.push_checkpoint, commands.fetch_checkpoint):
        with refused("E-CKPT-NONE"):
            move(folder.root)
    for step in (10, 20):
        write_checkpoint(folder, step)
        assert commands.push_checkpoint(folder.root, step).bytes > 0
    with refused("E-CKPT-STEP-UNKNOWN", step=15, steps=[10, 20]):
        commands.push_checkpoint(folder.root, 15)
    shutil.rmtree(folder.checkpoints)
    assert commands.fetch_checkpoint(folder.root).step == 20
    assert commands.fetch_checkpoint(folder.root).step == 20 and not list(folder.checkpoints.glob(".*"))
    assert commands.fetch_checkpoint(folder.root, 10).step == 10
    tier = commands.open_run(folder.root)[1]
    assert [(one.step, one.whole) for one in tier.stored()] == [(10, True), (20, True)]
    (tmp_path / "store" / MANIFEST).unlink()
    assert [(one.step, one.whole) for one in tier.stored()] == [(10, True), (20, False)]
    with RunLock(folder.lock), refused("E-RUN-BUSY"):
        commands.fetch_checkpoint(folder.root)
    run.checkpoint.remote = RemoteCheckpoints()
    with refused("E-TIER-NONE"):
        commands.push_checkpoint(folder.root)
    with refused("E-RUN-NOT-FOUND"):
        commands.push_checkpoint(tmp_path)


def test_a_node_that_waits_for_the_uploads_of_others_reports_that_only_after_a_while(monkeypatch):
    monkeypatch.setattr("random.uniform", lambda low, high: 0.0)
    waiting = NotYetStored("E-TIER-INCOMPLETE", "files are missing")
    tier, reports = Tier([waiting] * 4), []
    uploader.upload_all({FULL: tier}, requested(20), reports.append, never_logged)
    assert [(one["kind"], one.get("retry_seconds")) for one in reports] == [
        (events.CHECKPOINT_NOT_STORED, 8),
        (events.CHECKPOINT_STORED, None),
    ]
    tier, reports = Tier([]), []
    tier.commits = False
    uploader.upload_all({FULL: tier}, requested(20), reports.append, never_logged)
    assert (tier.pushed, tier.pruned, reports) == ([20], 0, [])


def test_weights_alone_have_their_own_place_number_and_rules_in_the_store(folder, tmp_path):
    store = MemoryStore()
    write_checkpoint(folder, 20)
    tier_of(folder, store, keep=1).push(20)
    tier = tier_of(folder.weights, store, keep=2)
    for step in (10, 20, 30):
        write_weights(folder, step)
        assert tier.push(step) > 0
    assert (tier.push(30), tier.prune(), tier.steps()) == (0, [10], [30, 20])
    assert tier_of(folder, store, keep=1).prune() == [] and tier_of(folder, store).steps() == [20]
    assert {one.name.split("/")[0] for one in store.list()} == {"checkpoints", "weights", "ledger", "run.toml"}
    other = empty_node(tmp_path)
    assert tier_of(other, store).fetch_newest().step == 20  # never the weights of step 30
    assert tier_of(other.weights, store).fetch(30) > 0
    assert verify_checkpoint(other.weights.checkpoint(30)).kind == WEIGHTS
    shutil.rmtree(folder.checkpoints)
    tier_of(folder, store, keep=0).prune()
    for one in store.list("checkpoints"):
        store.remove(one.name)
    with refused("E-TIER-NOT-EMPTY", step=30):
        require_empty(folder, tier_of(folder, store))


def test_weights_of_a_step_that_was_trained_again_take_the_place_of_the_earlier_ones(folder, tmp_path):
    """A full checkpoint is never replaced."""
    store = MemoryStore()
    for write, where in ((write_checkpoint, folder), (write_weights, folder.weights)):
        write(folder, 20)
        tier_of(where, store).push(20)
        write(folder, 20, data_fingerprint="trained again")
    sent = store.list("weights")
    assert tier_of(folder.weights, store).push(20) > 0
    assert tier_of(folder.weights, store).manifest(20).data_fingerprint == "trained again"
    assert [one.name for one in store.list("weights")] == [one.name for one in sent]
    with refused("E-TIER-OTHER"):
        tier_of(folder, store).push(20)
    shutil.rmtree(folder.weights.checkpoint(20))
    with refused("E-TIER-REMOVED", step=20) as error:
        tier_of(folder.weights, store).push(20)
    assert "checkpoint.weights_keep" in error.value.fix


def test_a_checkpoint_that_was_trained_again_takes_the_place_of_the_earlier_one(folder, tmp_path):
    """The same attempt may replace it, and a later one, or any if its manifest is damaged; an earlier attempt never."""
    store = MemoryStore()
    for epoch, again in ((1, ""), (1, "rolled back"), (3, "fell back")):
        write_checkpoint(folder, 20, epoch=epoch, data_fingerprint=again)
        for one in store.list("checkpoints"):  # the reason to fall back; the new tensors have the same hash and name
            store.write(one.name, [bytes(one.bytes)] if one.name != MANIFEST else [read_object(store, one.name)])
        tier_of(folder, store).push(20)
        assert tier_of(folder, store).manifest(20).data_fingerprint == again
        assert tier_of(empty_node(tmp_path, again or "first"), store).fetch_newest().step == 20
    write_checkpoint(folder, 20, epoch=2, data_fingerprint="restored from a copy")
    with refused("E-TIER-OTHER"):
        tier_of(folder, store).push(20)
    store.write(MANIFEST, [b"{}"])
    tier_of(folder, store).push(20)
    assert tier_of(empty_node(tmp_path), store).fetch_newest().step == 20


def test_without_a_sound_checkpoint_the_weights_in_the_store_are_named(folder, tmp_path):
    store, other = MemoryStore(), empty_node(tmp_path)
    write_checkpoint(folder, 20)
    tier_of(folder, store).push(20)
    store.write(stored_as(store, FILE), [b"damaged"])
    for named in (False, True):
        with refused("E-CKPT-SIZE") as error:
            fetch_newest(other, tier_of(other, store), lambda *_, **__: None, print)
        assert ("--weights --step 10" in error.value.fix) == named
        write_weights(folder, 10)
        tier_of(folder.weights, store).push(10)

    class SilentOnWeights(MemoryStore):
        def list(self, prefix=""):
            if prefix == "weights":
                raise StoreUnreachable("E-STORE-UNREACHABLE", "no answer")
            return super().list(prefix)

    store.__class__ = SilentOnWeights
    with refused("E-CKPT-SIZE"):
        fetch_newest(other, tier_of(other, store), lambda *_, **__: None, print)


def test_weights_in_the_place_of_a_checkpoint_are_never_training_state(folder, tmp_path):
    store = MemoryStore()
    write_weights(folder, 20)
    tier_of(folder.weights, store).push(20)
    for one in store.list("weights"):
        store.write(one.name.replace("weights", "checkpoints", 1), [read_object(store, one.name)])
    with refused("E-CKPT-KIND"):
        tier_of(empty_node(tmp_path), store).fetch_newest()
