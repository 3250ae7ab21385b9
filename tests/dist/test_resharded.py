"""A checkpoint that was written in another layout is the one that the ranks of that layout would have saved."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.checkpoints import ledger_of
from tests.expect import RecordedMeter, refused

from ingot.cli.ckpt_ls import layout_text
from ingot.config import to_toml
from ingot.schema.accepted import AcceptedChanges, read_accepted, write_accepted
from ingot.schema.arch import Moe
from ingot.schema.checkpoint import file_of
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import load_run
from ingot.trainer.build import build_parts
from ingot.trainer.checkpoint.load import resume
from ingot.trainer.checkpoint.manifest import read_manifest, verify_checkpoint
from ingot.trainer.checkpoint.save import CheckpointFacts, save_checkpoint
from ingot.trainer.convert import reshard
from ingot.trainer.convert.reshard import read_layout, reshard_checkpoint

from .steps import ARCH, CPU, LATENT, join, keep, mean_losses, run_of, same_bits, state_of, train

BATCH = 12
TIED = replace(ARCH, tied_embeddings=True)
UNEVEN = replace(ARCH, vocab_size=20, d_model=12, d_ffn=20, head_dim=6)
EXPERTS = replace(ARCH, moe=Moe(num_experts=4, top_k=2, d_expert=16, bias_rate=0.01, global_loss=0.01, first_dense=1))
CASES = {
    "tied, zero 3 to a pipeline": (TIED, {"dp_shard": 4, "zero": 3}, {"pp": 2, "tp": 2, "zero": 1}),
    "tied, a V to zero 3": (TIED, {"pp": 2, "schedule": "zb_v", "zero": 1}, {"dp_shard": 2, "zero": 3}),
    "experts": (EXPERTS, {"dp_shard": 2, "ep": 2}, {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 4, "zero": 1}),
    "experts, zero 3": (EXPERTS, {"pp": 2, "zero": 1}, {"dp_shard": 4, "ep": 2, "zero": 3}),
    "uneven": (UNEVEN, {"tp": 2, "dp_shard": 2}, {"dp_shard": 3, "zero": 2}),
    "copies, as many ranks": (ARCH, {"dp_replicate": 2, "dp_shard": 2, "zero": 3}, {"tp": 4}),
    "latent attention": (LATENT, {"dp_shard": 2, "zero": 3}, {"tp": 4}),
    "context": (ARCH, {"cp": 2, "tp": 2}, {"dp_shard": 2, "zero": 2}),
}
# Cases whose first or second layout, or model, another case has too.
LONG = ("experts", "copies, as many ranks", "context", "uneven", "latent attention")


def go_on(rank, world, run, folder, target, steps):
    """Load what is in `folder`, do `steps` steps, and save in `target`. Returns what was loaded, losses, and random
    numbers after loading."""
    torch.manual_seed(rank + 50)
    parts = build_parts(run, CPU, folder.root)
    restored = resume(
        folder,
        parts.state,
        settings=run.settings(),
        data_fingerprint="made up",
        on_refused=lambda *what: pytest.fail(str(what)),
    )
    drawn = torch.rand(2).tolist()
    parts.model.publish()
    loaded, first = keep(state_of(parts)), restored.step + 1 if restored else 1
    trained = train(run, range(first, first + steps), parts)
    facts = CheckpointFacts(
        step=first + steps - 1,
        tokens=(first + steps - 1) * run.tokens_per_step,
        settings=run.settings(),
        config_sha256=run.training_sha256(),
        data_fingerprint="made up",
        layout=parts.mesh.layout,
    )
    save_checkpoint(target, facts, parts.state, ledger_of(target, facts.step, run.train.global_batch), keep=9)
    return loaded, trained.losses, drawn


def run_in(folder: RunFolder, arch, micro_batch=3, **layout):
    """micro_batch: 3 divides the samples of one, two or four copies of the model, 1 those of three, too."""
    run = run_of(arch=arch, precision="fp32", global_batch=BATCH, micro_batch=micro_batch, **layout)
    folder.root.mkdir(parents=True, exist_ok=True)
    folder.config.write_text(to_toml(run))
    return run


def saved_in(fork_ranks, folder: RunFolder, arch, layout):
    run = run_in(folder, arch, micro_batch=1 if arch is UNEVEN else 3, **layout)
    fork_ranks(go_on, run.parallel.world_size, run, folder, folder, 2)
    return run


def text_of(layout: dict) -> dict[str, str]:
    return {name: str(value) for name, value in layout.items()}


def tensors_of(checkpoint, rank, random=False):
    with safe_open(checkpoint / file_of(rank), framework="np") as file:
        return {key: file.get_tensor(key) for key in file.keys() if random or not key.startswith("random.")}  # noqa: SIM118


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in LONG else case for case in CASES]
)
def test_equals_what_the_ranks_of_that_layout_save(fork_ranks, tmp_path, case):
    arch, first, second = CASES[case]
    old, new = RunFolder(tmp_path / "old"), RunFolder(tmp_path / "new")
    saved_in(fork_ranks, old, arch, first)
    meter = RecordedMeter()
    found = reshard_checkpoint(old.root, new.root, text_of(second), meter)
    meter.require_whole("verifying", "writing")
    verified = verify_checkpoint(new.checkpoint(2))
    # The ranks of the second layout load the old checkpoint and save it.
    run = load_run(new.config)
    assert {name: getattr(run.parallel, name) for name in second} == second
    by_ranks = RunFolder(tmp_path / "ranks")
    world = run.parallel.world_size
    fork_ranks(go_on, world, run, old, by_ranks, 0)
    theirs = read_manifest(by_ranks.checkpoint(2))
    assert found.ranks == verified.world == world and found.layout == theirs.layout
    assert (verified.cuts, verified.tensors) == (theirs.cuts, theirs.tensors)
    own_path = {"data.tokens": "made up"}  # it is relative to the run folder
    assert (verified.ledger, verified.settings) == (theirs.ledger, theirs.settings | own_path)
    assert (verified.tokens, verified.config_sha256) == (theirs.tokens, theirs.config_sha256)
    for rank in range(world):
        ours, wanted = (tensors_of(folder.checkpoint(2), rank) for folder in (new, by_ranks))
        assert list(ours) == list(wanted)
        assert all(np.array_equal(ours[key], wanted[key]) for key in wanted)
    # And back: every tensor has the bytes that it had.
    back = RunFolder(tmp_path / "back")
    reshard_checkpoint(new.checkpoint(2), back.root, text_of(first))
    again, before = verify_checkpoint(back.checkpoint(2)), read_manifest(old.checkpoint(2))
    assert (again.cuts, again.tensors) == (before.cuts, before.tensors)
    same_world = world == before.world
    for rank in range(before.world):
        ours, wanted = (tensors_of(folder.checkpoint(2), rank, random=same_world) for folder in (back, old))
        assert list(ours) == list(wanted)
        assert all(np.array_equal(ours[key], wanted[key]) for key in wanted)
    if same_world:
        assert again.files == before.files


@pytest.mark.parametrize(
    "case",
    [
        "tied, zero 3 to a pipeline",
        pytest.param("experts", marks=pytest.mark.slow),
        pytest.param("copies, as many ranks", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_as_from_the_checkpoint_itself(fork_ranks, tmp_path, case):
    arch, first, second = CASES[case]
    old, new = RunFolder(tmp_path / "old"), RunFolder(tmp_path / "new")
    saved_in(fork_ranks, old, arch, first)
    reshard_checkpoint(old.root, new.root, text_of(second))
    run = load_run(new.config)
    ends = [RunFolder(tmp_path / "end of old"), RunFolder(tmp_path / "end of new")]
    of_old, of_new = (
        list(zip(*fork_ranks(go_on, run.parallel.world_size, run, folder, end, 2), strict=True))
        for folder, end in zip((old, new), ends, strict=True)
    )
    assert same_bits(join(of_old[0]), join(of_new[0]))
    assert mean_losses(of_old[1]) == mean_losses(of_new[1])
    assert of_old[2] == of_new[2]  # random states: those of the ranks, or new ones with another number of ranks
    manifests = [read_manifest(end.checkpoint(4)) for end in ends]
    assert manifests[0].tensors == manifests[1].tensors


class OneMoment:
    """An optimizer that keeps one tensor for matrices, and for others only their step."""

    def __init__(self, pieces, value):
        self.kept = {
            piece.name: {"step": torch.tensor(value)}
            | ({"momentum": piece.value * value} if len(piece.shape) == 2 else {})
            for piece in pieces
        }

    def moments(self):
        return self.kept

    def put_moments(self, moments):
        assert moments is self.kept


def with_callbacks(rank, world, run, folder, target):
    """Save a state with another optimizer, a loss scale and the tensors of a callback, or load and save it."""
    parts = build_parts(run, CPU, folder.root)
    cut = {piece.name: piece.value.clone() for piece in parts.model.shards if "norm" not in piece.name}
    callbacks = {"ema.weights": cut, "ema.count": torch.tensor([3, rank + 3 if folder != target else 3])}
    optimizer = OneMoment(parts.model.shards, 7.0 if folder == target else 0.0)
    extras = {"loss_scale": torch.tensor(64.0)}
    state = replace(parts.state, optimizer=optimizer, callbacks=callbacks, extras=extras)
    if folder != target:
        for tensor in (*cut.values(), callbacks["ema.count"], state.extras["loss_scale"]):
            tensor.zero_()
        resume(folder, state, settings={}, data_fingerprint="d", on_refused=lambda *what: pytest.fail(str(what)))
    facts = CheckpointFacts(
        step=1, tokens=0, settings={}, config_sha256="c", data_fingerprint="d", layout=parts.mesh.layout
    )
    save_checkpoint(target, facts, state, ledger_of(target, 1), keep=9)


def test_other_moments_tensors_of_callbacks_and_the_loss_scale_come_along(fork_ranks, tmp_path):
    old, new, by_ranks = (RunFolder(tmp_path / name) for name in ("old", "new", "ranks"))
    run = run_in(old, ARCH, micro_batch=1, pp=2, dp_shard=2)
    fork_ranks(with_callbacks, 4, run, old, old)
    reshard_checkpoint(old.root, new.root, {"dp_shard": "3"})
    fork_ranks(with_callbacks, 3, load_run(new.config), old, by_ranks)
    found, wanted = (read_manifest(folder.checkpoint(1)) for folder in (new, by_ranks))
    assert (found.cuts, found.tensors) == (wanted.cuts, wanted.tensors)
    assert len(found.chunks("callback.ema.weights.blocks.3.attention.q.weight")) == 3
    assert len(found.chunks("optim.momentum.blocks.3.attention.q.weight")) == 3
    assert "optim.momentum.norm.weight" not in found.tensors and "optim.step.norm.weight" in found.tensors
    for name in ("callback.ema.count", "extra.loss_scale"):
        assert [chunk.file for chunk in found.chunks(name)] == [file_of(0)]


@pytest.fixture
def small(fork_ranks, tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "old")
    saved_in(fork_ranks, folder, TIED, {"dp_shard": 2})
    return folder


def test_paths_changes_and_ledger_come_along(small, tmp_path):
    changes = AcceptedChanges(step=1, config_sha256="c", data_fingerprint="d", changes={"optim.lr": (1, 2)})
    write_accepted(small.accepted, [changes, replace(changes, step=9)])  # made after the checkpoint was saved
    config = load_run(small.config)
    remote = replace(config.checkpoint.remote, url="file:///x")
    data = replace(config.data, tokens="../tokens/train")
    small.config.write_text(to_toml(replace(config, data=data, checkpoint=replace(config.checkpoint, remote=remote))))
    found = reshard_checkpoint(small.root, tmp_path / "deep" / "new", {"tp": "2", "micro_batch": "2"})
    new = RunFolder(tmp_path / "deep" / "new")
    run = load_run(new.config)
    assert (run.data.tokens, run.checkpoint.remote.url, found.store) == ("../../tokens/train", "", "file:///x")
    assert (run.parallel.dp_shard, run.parallel.tp, run.train.micro_batch) == (1, 2, 2)
    assert read_manifest(new.checkpoint(2)).accepted == read_manifest(small.checkpoint(2)).accepted == ()
    assert read_accepted(new.accepted) == []  # those of the checkpoint, not of later steps of the old run
    assert [path.name for path in new.ledger.iterdir()] == [path.name for path in small.ledger.iterdir()]
    assert sorted(path.name for path in new.root.iterdir()) == [
        "accepted-changes.json",
        "checkpoints",
        "ledger",
        "run.toml",
    ]


def test_memory_is_that_of_some_blocks(small, tmp_path, monkeypatch):
    """Blocks are read together up to the limit; a larger one alone."""
    held = []
    read = reshard.read_blocks

    def watched(checkpoint, manifest, blocks):
        held.append([block.tensor.nbytes for block in blocks])
        read(checkpoint, manifest, blocks)

    monkeypatch.setattr(reshard, "read_blocks", watched)
    monkeypatch.setattr(reshard, "_TOGETHER_BYTES", 2000)
    reshard_checkpoint(small.root, tmp_path / "new", {})
    assert all(sum(blocks) <= 2000 or len(blocks) == 1 for blocks in held) and max(map(len, held)) > 1
    # Each block once: what the disk has is compared with the same bytes while they are in memory.
    manifest = verify_checkpoint(RunFolder(tmp_path / "new").checkpoint(2))
    assert sum(len(blocks) for blocks in held) == len(manifest.tensors)


def test_a_damaged_checkpoint_is_refused(small, tmp_path):
    file = small.checkpoint(2) / file_of(1)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with refused("E-CKPT-HASH", file=file_of(1)):
        reshard_checkpoint(small.root, tmp_path / "new", {})
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_run_file_of_another_model_is_refused(small, tmp_path):
    run_in(small, replace(TIED, d_ffn=48))
    with refused("E-CKPT-OTHER-MODEL"):
        reshard_checkpoint(small.root, tmp_path / "new", {})
    run_in(small, replace(TIED, num_layers=3))
    with refused("E-CKPT-OTHER-MODEL", tensor="model.blocks.3.attention.k.weight"):  # the run file has fewer layers
        reshard_checkpoint(small.root, tmp_path / "new", {})
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("text", ["", " ", "tp", "tp=", "dp_shard=2 tp"])
def test_a_text_that_is_no_layout_is_refused(text):
    assert read_layout("dp_shard=2,tp=4  zero=1") == {"dp_shard": "2", "tp": "4", "zero": "1"}
    assert read_layout("dp=2 tp 4") == {"dp_shard": "2", "tp": "4"}
    assert read_layout(layout_text({"dp_replicate": 2, "dp_shard": 4, "pp": 2})) == {
        "dp_replicate": "2",
        "dp_shard": "4",
        "pp": "2",
    }
    with refused("E-RESHARD-LAYOUT", name=text):
        read_layout(text)


def test_settings_that_are_no_layout_are_refused(small, tmp_path):
    with refused("E-RESHARD-LAYOUT", name="reduce"):  # it changes sums
        reshard_checkpoint(small.root, tmp_path / "new", {"reduce": "canonical"})
    with refused("E-CONFIG-SETTINGS"):
        reshard_checkpoint(small.root, tmp_path / "new", {"tp": "3"})
    with refused("E-CONVERT-FOLDER"):
        reshard_checkpoint(small.root, small.root, {})
