"""Checkpoints written on some ranks, loaded on others: parameters and Adam's moments are the same bits."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ingot.checkpoint.loading import load_model, resume
from ingot.checkpoint.manifest import verify_checkpoint
from ingot.checkpoint.saving import CheckpointFacts, save_checkpoint
from ingot.checkpoint.state import training_state
from ingot.errors import CheckpointError, ResourceError
from ingot.schema.layout import RunFolder


def make(seed: int):
    """Sizes that no number of ranks divides, so shards are uneven and some are empty."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3, bias=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)  # the same batch everywhere: gradients do not depend on the ranks
    for _ in range(steps):
        model(torch.randn(4, 7, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model, optimizer) -> dict[str, np.ndarray]:
    state = training_state(model, optimizer)
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).numpy().copy() for n, t in state.items()}


def facts(step: int) -> CheckpointFacts:
    return CheckpointFacts(
        step=step,
        tokens=0,
        settings={},
        config_sha256="c",
        data_fingerprint="d",
        layout={"dp_shard": dist.get_world_size()},
    )


def go_on(folder, model, optimizer, refused=None):
    note = refused.append if refused is not None else lambda fact: None
    return resume(
        folder,
        model,
        optimizer,
        config_sha256="c",
        data_fingerprint="d",
        on_refused=lambda step, path, reason: note((step, reason)),
    )


def continue_and_save(rank, ranks, root, step):
    """Load what is there, keep it to compare, train on, save. Returns the state before and after."""
    folder = RunFolder(root)
    model, optimizer = make(seed=ranks)
    manifest = go_on(folder, model, optimizer)
    loaded = whole(model, optimizer)
    train(model, optimizer, 2)
    save_checkpoint(folder, facts(step), model, optimizer, (), keep=9)
    return manifest.step if manifest else 0, loaded, whole(model, optimizer)


def test_2_to_1_to_2_to_4_ranks(fork_ranks, tmp_path):
    saved = None
    for number, ranks in enumerate((2, 1, 2, 4, 1)):
        results = fork_ranks(continue_and_save, ranks, tmp_path, 10 * (number + 1))
        for step, loaded, _ in results:
            assert step == 10 * number
            if saved is not None:
                assert loaded.keys() == saved.keys() and len(loaded) == 20
                assert all(np.array_equal(loaded[name], saved[name]) for name in saved)
        saved = results[0][2]
        manifest = verify_checkpoint(RunFolder(tmp_path).checkpoint(10 * (number + 1)))
        assert manifest.layout == {"dp_shard": ranks} and len(manifest.rng) == ranks
        assert 1 <= len(manifest.files) <= ranks


def test_one_process_loads_the_model_of_many(fork_ranks, tmp_path):
    _, _, state = fork_ranks(continue_and_save, 4, tmp_path, 10)[0]
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3, bias=False))
    load_model(RunFolder(tmp_path).checkpoint(10), model)
    assert all(np.array_equal(tensor.numpy(), state["model." + name]) for name, tensor in model.state_dict().items())


def load_damaged(rank, ranks, root):
    refused = []
    model, optimizer = make(seed=0)
    manifest = go_on(RunFolder(root), model, optimizer, refused)
    return manifest.step, refused


def test_all_ranks_fall_back_to_the_same_checkpoint(fork_ranks, tmp_path):
    """Only the rank that hashes the file sees the damage; all of them hear of it."""
    for step in (10, 20):
        fork_ranks(continue_and_save, 2, tmp_path, step)
    file = RunFolder(tmp_path).checkpoint(20) / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    results = fork_ranks(load_damaged, 2, tmp_path)
    assert results[0] == results[1]
    step, refused = results[0]
    assert step == 10 and refused[0][0] == 20 and "rank-00001.safetensors" in refused[0][1]


def load_with_torn_record(rank, ranks, root):
    try:
        resume(RunFolder(root), *make(seed=0), config_sha256="other", data_fingerprint="d", on_refused=lambda *_: None)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_what_only_rank_0_reads_fails_on_all(fork_ranks, tmp_path):
    fork_ranks(continue_and_save, 2, tmp_path, 10)
    RunFolder(tmp_path).accepted.write_text("torn")
    results = fork_ranks(load_with_torn_record, 2, tmp_path)
    assert results[0] == results[1] and "Expecting value" in results[0]


def save_with_trouble(rank, ranks, root, trouble):
    import errno

    import ingot.checkpoint.tensor_file as tensor_file
    import ingot.checkpoint.writer as writer

    model, optimizer = make(seed=0)
    train(model, optimizer, 1)
    if trouble == "disk fills up on rank 1" and rank == 1:

        def full(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        tensor_file._HashedFile.write = full
    if trouble == "no space on rank 0" and rank == 0:

        def no_space(*_):
            raise ResourceError("no space")

        writer.require_free = no_space
    if trouble == "NaN on rank 1" and rank == 1:
        with torch.no_grad():
            model[0].weight.to_local().fill_(float("nan"))
    try:
        save_checkpoint(RunFolder(root), facts(5), model, optimizer, (), keep=2)
    except (CheckpointError, ResourceError) as error:
        return error.found
    return "saved"


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("disk fills up on rank 1", "No space left"),
        ("no space on rank 0", "no space"),
        ("NaN on rank 1", "holds NaN"),
    ],
)
def test_trouble_on_one_rank_is_an_error_on_all(fork_ranks, tmp_path, trouble, message):
    results = fork_ranks(save_with_trouble, 2, tmp_path, trouble)
    assert all(message in found for found in results)
    assert not list(RunFolder(tmp_path).checkpoints.glob("step-*"))
