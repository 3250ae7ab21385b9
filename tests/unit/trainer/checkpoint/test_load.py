import dataclasses
import json
import random
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from tests.expect import refused

from ingot.config import from_dict
from ingot.errors import CheckpointError
from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.checkpoint import WEIGHTS, CheckpointManifest, FileEntry, file_of
from ingot.schema.run import RemoteCheckpoints, settings_sha256
from ingot.storage import sha256_bytes, write_atomic, write_json
from ingot.stores.memory import MemoryStore
from ingot.trainer.checkpoint.load import load_model, resume, resume_from_memory
from ingot.trainer.checkpoint.manifest import read_manifest, verify_checkpoint, write_manifest
from ingot.trainer.checkpoint.remote import RemoteTier
from ingot.trainer.checkpoint.save import save_checkpoint
from ingot.trainer.checkpoint.state import GENERATORS
from ingot.trainer.checkpoint.tiers import fetch_instead
from ingot.trainer.restore import load_newest

from .conftest import facts, make_training, save, state_of, train_one, values

SETTINGS = {"optim.lr": 0.01}  # those of the checkpoints here


def go_on(folder, model, optimizer, settings=SETTINGS, data="d" * 64, **options):
    refused = []
    manifest = resume(
        folder,
        state_of(model, optimizer),
        settings=settings,
        data_fingerprint=data,
        on_refused=lambda step, path, reason, again: refused.append((step, reason)),
        **options,
    )
    return manifest, refused


def test_a_resumed_run_goes_on_bit_for_bit(folder, training):
    """Random numbers too: the batches are drawn from the generator that the checkpoint restores."""
    model, optimizer = training
    save(folder, 2, model, optimizer)
    undisturbed = [train_one(model, optimizer) for _ in range(5)]
    other, other_optimizer = make_training(seed=5, steps=1)
    manifest, refused = go_on(folder, other, other_optimizer)
    assert manifest.step == 2 and not refused
    assert [train_one(other, other_optimizer) for _ in range(5)] == undisturbed
    a, b = values(model, optimizer), values(other, other_optimizer)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_random_states_of_version_1_come_back_from_the_manifest(folder, training):
    path = save(folder, 2, *training).path
    drawn = torch.rand(3)
    manifest = read_manifest(path)
    write_manifest(path, dataclasses.replace(manifest, rng=(torch.get_rng_state().numpy().tobytes().hex(),)))
    after = torch.rand(3)
    assert not torch.equal(drawn, after)
    go_on(folder, *make_training(seed=5, steps=0))
    assert torch.equal(torch.rand(3), after)


def test_another_number_of_ranks_keeps_its_own_random_state(folder, training):
    path = save(folder, 2, *training).path
    manifest = read_manifest(path)
    shutil.copy(path / file_of(0), path / file_of(1))
    write_manifest(
        path, dataclasses.replace(manifest, world=2, files=manifest.files | {file_of(1): manifest.files[file_of(0)]})
    )
    other = make_training(seed=5, steps=0)
    state = torch.get_rng_state()
    go_on(folder, *other)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_new_run_starts_at_nothing(folder):
    assert go_on(folder, *make_training()) == (None, [])


def test_a_rank_does_not_start_at_nothing_if_a_step_was_saved(folder, training):
    save(folder, 2, *training)
    log = EventLog(folder.events)
    log.write("run_started", from_step=0)
    log.write("checkpoint", step=2)
    folder.checkpoints.rename(folder.root / "elsewhere")
    with refused("E-CKPT-VANISHED", step=2, exists=False):
        go_on(folder, *make_training())


def test_settings_that_were_written_out_at_their_defaults_are_the_same_experiment(folder, training):
    """So are free settings, which checkpoints of earlier versions do not have."""
    path = save(folder, 2, *training).path
    settings = {"optim.lr": 0.1, "model.moe.noise": 0.0}
    write_manifest(path, dataclasses.replace(read_manifest(path), config_sha256="0" * 64, settings=settings))
    manifest, _ = go_on(folder, *training, settings={"optim.lr": 0.1, "train.tf32": False, "parallel.dp_shard": 8})
    assert manifest.step == 2
    with refused("E-RUN-CHANGED"):
        go_on(folder, *training, settings=settings | {"model.moe.noise": 0.5})


def test_falls_back_over_damaged_ones_and_says_why(folder, training):
    model, optimizer = training
    states = {}
    for step in (10, 20, 30, 40):
        train_one(model, optimizer)
        states[step] = values(model, optimizer)
        save(folder, step, model, optimizer, keep=4)
    (folder.checkpoint(40) / "manifest.json").unlink()
    damaged = folder.checkpoint(30) / "rank-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-torch.get_rng_state().nbytes - 3] ^= 16  # the end of the last tensor; the random state follows it
    damaged.write_bytes(content)
    other, other_optimizer = make_training(seed=5, steps=0)
    manifest, refused = go_on(folder, other, other_optimizer)
    assert manifest.step == 20
    assert [step for step, _ in refused] == [40, 30]
    assert "never finished" in refused[0][1]
    assert "rank-00000.safetensors" in refused[1][1] and "tensor " in refused[1][1]
    now = values(other, other_optimizer)
    assert all(torch.equal(now[name], states[20][name]) for name in now)


def test_checkpoints_of_the_store_come_in_their_turn(folder, training):
    """40 and 20 are damaged on the disk, 40 and 30 in the store, which also has 10, and no manifest of 20."""
    model, optimizer = training
    store, reported, states = MemoryStore(), [], {}
    tier = RemoteTier(folder, store, RemoteCheckpoints(url="s3://bucket/run"))
    write_atomic(folder.config, "name = 'run'")
    for step in (10, 20, 30, 40):
        train_one(model, optimizer)
        states[step] = values(model, optimizer)
        save(folder, step, model, optimizer, keep=4)
        tier.push(step)

    def damage(step):
        for one in store.list(f"checkpoints/step-{step:08d}"):
            if not one.name.endswith(".json"):
                store.write(one.name, [b"damaged"])

    for step in (10, 30):
        shutil.rmtree(folder.checkpoint(step))
        (folder.checkpoint(step + 10) / "rank-00000.safetensors").write_bytes(b"x")
        damage(step + 10 if step == 30 else 30)
    store.remove("checkpoints/step-00000020/manifest.json")
    instead = partial(
        fetch_instead, tier, log=lambda kind, step, **_: reported.append((kind, step)), say=lambda line: None
    )
    other, other_optimizer = make_training(seed=5, steps=0)
    manifest, local = go_on(folder, other, other_optimizer, fetch_instead=instead)
    assert manifest.step == 10 and [step for step, _ in local] == [40, 20]
    assert reported == [
        (events.CHECKPOINT_REFUSED, 40),
        (events.CHECKPOINT_REFUSED, 30),
        (events.CHECKPOINT_FETCHED, 10),
    ]
    now = values(other, other_optimizer)
    assert all(torch.equal(now[name], states[10][name]) for name in now)
    (folder.checkpoint(10) / "rank-00000.safetensors").write_bytes(b"x")
    damage(10)
    with refused("E-CKPT-NONE-USABLE", checkpoints=3) as caught:
        go_on(folder, *make_training(steps=0), fetch_instead=instead)
    assert caught.value.found.count("\n") == 4  # three on the disk, 10 in the store; the others were refused before


def test_the_store_is_asked_for_a_step_again_unless_its_copy_was_refused_or_is_of_another_model(folder, training):
    path, asked = save(folder, 2, *training).path / "rank-00000.safetensors", []
    sound = path.read_bytes()

    def again(training, fetch_instead):
        asked.clear()
        with refused("E-CKPT-NONE-USABLE"):
            resume(
                folder,
                state_of(*training),
                settings=SETTINGS,
                data_fingerprint="d" * 64,
                on_refused=lambda step, path, reason, again: asked.append(again),
                fetch_instead=fetch_instead,
            )
        return asked

    def fetched_once(step, seen, following, *, again):  # the copy is damaged, too
        return (step if again else 0), []

    path.write_bytes(sound[:-1])
    assert again(training, fetched_once) == [True, False]
    path.write_bytes(sound)
    deeper = torch.nn.Sequential(*training[0], torch.nn.Linear(3, 3))
    assert again((deeper, torch.optim.AdamW(deeper.parameters())), fetched_once) == [False]


@pytest.mark.parametrize(("again", "text"), [(True, "the copy in s3://bucket, then the next"), (False, "the next")])
def test_the_line_of_a_refusal_names_the_store_only_if_it_is_asked(folder, monkeypatch, again, text):
    lines, path = [], folder.checkpoint(2)
    monkeypatch.setattr("ingot.trainer.restore.resume", lambda *_, on_refused, **__: on_refused(2, path, "cut", again))
    of_run = SimpleNamespace(settings={"checkpoint.remote.url": "s3://bucket"}, data_fingerprint="")
    load_newest(SimpleNamespace(state=None), folder, of_run, lambda *_, **__: None, lines.append, None, None)
    assert lines == [f"refused   cut; trying {text} older one"]


def test_never_starts_again_silently(folder, training):
    for step in (10, 20):
        save(folder, step, *training)
        (folder.checkpoint(step) / "rank-00000.safetensors").write_bytes(b"x")
    with refused("E-CKPT-NONE-USABLE", folder=str(folder.checkpoints), checkpoints=2) as caught:
        go_on(folder, *make_training(steps=0))
    causes = [(cause["code"], cause["path"]) for cause in caught.value.facts["causes"]]
    assert causes == [("E-CKPT-SIZE", str(folder.checkpoint(step))) for step in (20, 10)]
    assert caught.value.facts["weights"] == ""
    for step in (8, 15):
        save_checkpoint(folder, dataclasses.replace(facts(step), kind=WEIGHTS), state_of(*training), (), keep=3)
    newest = str(folder.weights.checkpoint(15))
    with refused("E-CKPT-NONE-USABLE", weights=newest) as caught:
        go_on(folder, *make_training(steps=0))
    assert f"--out NEW_DIR --set init={newest}" in caught.value.fix and "remote" not in caught.value.fix
    (folder.weights.checkpoint(15) / "rank-00000.safetensors").write_bytes(b"x")
    with refused("E-CKPT-NONE-USABLE", weights=str(folder.weights.checkpoint(8))) as caught:
        go_on(folder, *make_training(steps=0), settings=SETTINGS | {"checkpoint.remote.url": "s3://bucket/run"})
    assert "--set checkpoint.remote.url=NEW_PLACE" in caught.value.fix


def test_training_does_not_continue_from_the_weights_alone(folder, training):
    """Not even if there is nothing else, and not if they are newer."""
    save_checkpoint(folder, dataclasses.replace(facts(15), kind=WEIGHTS), state_of(*training), (), keep=3)
    assert go_on(folder, *make_training(steps=0))[0] is None
    save(folder, 10, *training)
    assert go_on(folder, *make_training(steps=0))[0].step == 10


@pytest.mark.parametrize(
    ("settings", "data", "what"), [({"optim.lr": 0.02}, "d" * 64, "settings"), (SETTINGS, "x" * 64, "data")]
)
def test_another_experiment_needs_consent(folder, training, settings, data, what):
    save(folder, 10, *training)
    with refused("E-RUN-CHANGED", changed=what):
        go_on(folder, *make_training(), settings, data)
    record = {"step": 10, "changes": {}, "config_sha256": settings_sha256(settings), "data_fingerprint": data}
    write_json(folder.accepted, [record])
    assert go_on(folder, *make_training(), settings, data)[0].step == 10


def test_another_model_is_refused_before_a_byte_is_read(folder, training):
    save(folder, 10, *training)
    wider = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3, bias=False))
    with refused("E-CKPT-NONE-USABLE"):
        go_on(folder, wider, torch.optim.AdamW(wider.parameters()))
    deeper = torch.nn.Sequential(*training[0], torch.nn.Linear(3, 3))
    with refused("E-CKPT-NONE-USABLE") as caught:
        go_on(folder, deeper, torch.optim.AdamW(deeper.parameters()))
    (cause,) = caught.value.facts["causes"]
    assert (cause["code"], cause["tensor"]) == ("E-CKPT-OTHER-MODEL", "model.3.weight")


@pytest.mark.parametrize("lost", [file_of(1), "generators"])
def test_what_cannot_be_brought_changes_nothing(folder, training, lost):
    """A snapshot in memory of which one part is gone when the ranks fetch it, by the time they have others."""
    path = save(folder, 2, *training).path
    manifest = read_manifest(path)
    if lost == file_of(1):  # two ranks saved: some of the blocks are in the file of the second one
        shutil.copy(path / file_of(0), path / lost)
        cuts = (*manifest.cuts[:-1], dataclasses.replace(manifest.cuts[-1], ranks=(1,)))
        files = manifest.files | {lost: manifest.files[file_of(0)]}
        manifest = dataclasses.replace(manifest, world=2, files=files, cuts=cuts)
        assert len(cuts) > 1
    found = []

    def find(file, keys):
        if file == lost or (lost == "generators" and keys == GENERATORS):
            raise CheckpointError("E-REPLICA-LOST", "it is gone", rule="-", fix="-")
        found.append(file)
        return path / file

    memory = SimpleNamespace(manifest=manifest, path=path, find=find)
    model, optimizer = make_training(seed=5, steps=1)
    before, state = values(model, optimizer), torch.get_rng_state()
    with refused("E-REPLICA-LOST"):
        resume_from_memory(folder, memory, state_of(model, optimizer), settings=SETTINGS, data_fingerprint="d" * 64)
    after = values(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before) and torch.equal(torch.get_rng_state(), state)
    assert found == ([file_of(0)] if lost == file_of(1) else [])
    lost = ""
    resume_from_memory(folder, memory, state_of(model, optimizer), settings=SETTINGS, data_fingerprint="d" * 64)
    after, saved = values(model, optimizer), values(*training)
    assert all(torch.equal(saved[name], after[name]) for name in saved)


def test_another_type_is_refused(folder, training):
    save(folder, 10, *training)
    model, _ = make_training()
    model.to(torch.float64)
    with refused("E-CKPT-NONE-USABLE"):
        go_on(folder, model, torch.optim.AdamW(model.parameters()))


def test_loads_the_model_alone(folder, training):
    path = save(folder, 10, *training).path
    model, _ = make_training(seed=4)
    assert load_model(path, model).step == 10
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), training[0].parameters(), strict=True))
    half, _ = make_training(seed=4)
    half.to(torch.bfloat16)
    load_model(path, half)
    assert torch.equal(half[0].weight, training[0][0].weight.to(torch.bfloat16))


def test_loading_the_model_alone_verifies_first(folder, training):
    path = save(folder, 10, *training).path
    file = path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-8] + b"\1" * 8)
    with refused("E-CKPT-HASH"):
        load_model(path, make_training()[0])
    with refused("E-CKPT-OTHER-MODEL"):
        load_model(save(folder, 20, *training).path, torch.nn.Linear(2, 2))


def test_a_pickle_is_never_opened(folder, training):
    """A torch.save file in the place of the tensors, with a manifest that vouches for it, is refused as what it is."""
    path = save(folder, 10, *training).path
    file = path / "rank-00000.safetensors"
    torch.save({"model.0.weight": torch.zeros(5, 6)}, file)
    file.write_bytes(file.read_bytes().ljust(4096, b"\0"))
    vouch(path, file)
    with refused("E-CKPT-HEADER"):
        verify_checkpoint(path)


def test_hostile_headers_are_refused(folder, training):
    """Headers with a right hash: only the header check protects the allocator from them."""
    path = save(folder, 10, *training).path
    file = path / "rank-00000.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    rng = random.Random(2)
    hostile = [
        (1 << 62).to_bytes(8, "little") + whole[8:],
        whole[:8] + b"{" * length + whole[8 + length :],
    ]
    for _ in range(25):
        changed = json.loads(json.dumps(header))
        name = rng.choice([n for n in changed if n != "__metadata__"])
        key = rng.choice(["shape", "data_offsets", "dtype"])
        changed[name][key] = rng.choice([[1 << 40, 1 << 40], [0, 1 << 50], [-1, 4], [], None, "F64", "OBJ", 7])
        if changed == header:
            continue
        text = json.dumps(changed).encode()
        hostile.append(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    for content in hostile:
        file.write_bytes(content)
        vouch(path, file)
        with pytest.raises(CheckpointError):
            verify_checkpoint(path)
        with pytest.raises((CheckpointError, SafetensorError)):
            load_model(path, make_training()[0])


def vouch(path, file):
    data = file.read_bytes()
    entry = FileEntry(bytes=len(data), sha256=sha256_bytes(data))
    values = json.loads((path / "manifest.json").read_text())
    values.pop("sha256")
    manifest = from_dict(CheckpointManifest, values)
    write_manifest(path, dataclasses.replace(manifest, files={file.name: entry}))


def test_a_copied_checkpoint_is_as_good(folder, training, tmp_path):
    path = save(folder, 10, *training).path
    shutil.copytree(path, tmp_path / "elsewhere" / path.name)
    assert verify_checkpoint(tmp_path / "elsewhere" / path.name) == read_manifest(path)
