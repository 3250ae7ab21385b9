"""The names of a state on disk, and the tensors that may be missing there."""

import dataclasses
import json

import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import ledger_of
from tests.expect import refused

from ingot.schema.checkpoint import BlockLayout, pack_crc32
from ingot.storage import canonical_json, sha256_bytes, sha256_file, write_json
from ingot.trainer.checkpoint.load import resume
from ingot.trainer.checkpoint.manifest import read_manifest, write_manifest
from ingot.trainer.checkpoint.save import save_checkpoint

from .conftest import facts, make_training, save, state_of, values


def load(folder, state):
    settings = {"optim.lr": 0.01}
    return resume(folder, state, settings=settings, data_fingerprint="d" * 64, on_refused=lambda *refused: None)


def test_the_names_on_the_disk(folder, training):
    path = save(folder, 10, *training).path
    manifest = read_manifest(path)
    assert sorted(manifest.tensors) == sorted(
        f"{kind}.{name}"
        for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq", "optim.step")
        for name in ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight")
    )
    assert manifest.tensors["optim.step.0.weight"].shape == ()
    assert manifest.tensors["optim.exp_avg.0.weight"].shape == (5, 6)
    assert [c.key for c in manifest.chunks("model.0.weight")] == ["model.0.weight"]
    stored, (model, optimizer) = load_file(path / "rank-00000.safetensors"), training
    for name, parameter in model.named_parameters():
        assert torch.equal(stored[f"model.{name}"], parameter)
        for kind, tensor in optimizer.state[parameter].items():
            assert torch.equal(stored[f"optim.{kind}.{name}"], tensor), kind


def test_reads_a_checkpoint_of_two_ranks_as_ingot_has_always_written_it(folder, training):
    """The files are made here by the library's writer, with the keys and the manifest of the first version."""
    expected = values(*training)
    files, tensors = [{}, {}], {}
    for name, tensor in expected.items():
        rows = -(-tensor.shape[0] // 2) if tensor.dim() else 0
        parts = tensor.split(rows) if tensor.dim() else [tensor]
        chunks = []
        for rank, part in enumerate(parts):
            offsets = (rank * rows, *[0] * (tensor.dim() - 1)) if tensor.dim() else ()
            key = f"{name}@{','.join(map(str, offsets))}" if rank else name
            file = rank if tensor.dim() else 1
            files[file][key] = part.contiguous()
            sizes = tuple(part.shape)
            chunk = {"file": f"rank-0000{file}.safetensors", "key": key, "offsets": offsets, "sizes": sizes, "crc32": 0}
            chunks.append(chunk)
        tensors[name] = {"dtype": "float32", "shape": list(tensor.shape), "chunks": chunks}
    path = folder.checkpoint(10)
    path.mkdir(parents=True)
    entries = {}
    for rank, content in enumerate(files):
        file = path / f"rank-0000{rank}.safetensors"
        save_file(content, file)
        entries[file.name] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    manifest = {"version": 1, "files": entries, "tensors": tensors, "rng": ["", ""], "ledger": ledger_of(folder, 10)}
    manifest = json.loads(json.dumps(dataclasses.asdict(facts(10)) | manifest, default=dataclasses.asdict))
    write_json(path / "manifest.json", manifest | {"sha256": sha256_bytes(canonical_json(manifest).encode())})
    other = make_training(seed=3, steps=0)
    assert load(folder, state_of(*other)).step == 10
    loaded = values(*other)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def save_with(folder, training, **extras):
    return save_checkpoint(folder, facts(10), state_of(*training, extras=extras), ledger_of(folder, 10), keep=2).path


def test_extras_are_saved_and_loaded_in_place(folder, training):
    path = save_with(folder, training, loss_scale=torch.tensor(1024.0), good_steps=torch.tensor([3, 4]))
    assert read_manifest(path).tensors["extra.good_steps"].dtype == "int64"
    scale, steps = torch.tensor(0.0), torch.tensor([0, 0])
    load(folder, state_of(*training, extras={"loss_scale": scale, "good_steps": steps}))
    assert scale == 1024 and steps.tolist() == [3, 4]


def test_an_extra_that_the_checkpoint_lacks_is_kept_only_if_it_may_lack(folder, training):
    save_with(folder, training)
    extras = {"loss_scale": torch.tensor(5.0)}
    with refused("E-CKPT-NONE-USABLE"):
        load(folder, state_of(*training, extras=extras))
    load(folder, state_of(*training, extras=extras, optional_extras=frozenset(["loss_scale"])))
    assert extras["loss_scale"] == 5


def test_an_extra_that_the_run_lacks_is_skipped_only_if_it_may_lack(folder, training):
    save_with(folder, training, loss_scale=torch.tensor(5.0))
    with refused("E-CKPT-NONE-USABLE"):
        load(folder, state_of(*training))
    assert load(folder, state_of(*training, optional_extras=frozenset(["loss_scale"]))).step == 10


def test_only_extras_are_optional(folder, training):
    save_with(folder, training)
    other = torch.nn.Sequential(*training[0], torch.nn.Linear(3, 3, bias=False))
    state = state_of(other, torch.optim.AdamW(other.parameters()), optional_extras=frozenset(["3.weight"]))
    with refused("E-CKPT-NONE-USABLE"):
        load(folder, state)


def test_overlapping_blocks_in_a_manifest_are_refused(folder, training):
    """The blocks have as many elements as the tensor, but one row twice and one never."""
    path = save(folder, 10, *training).path
    manifest = read_manifest(path)
    cuts = (*manifest.cuts, BlockLayout(ranks=(0, 0), offsets=((0, 0), (1, 0)), sizes=((3, 6), (2, 6))))
    entry = dataclasses.replace(manifest.tensors["model.0.weight"], cut=len(cuts) - 1, crc32=pack_crc32([0, 0]))
    tensors = manifest.tensors | {"model.0.weight": entry}
    write_manifest(path, dataclasses.replace(manifest, cuts=cuts, tensors=tensors))
    with refused("E-CKPT-MANIFEST"):
        read_manifest(path)
