import os
import subprocess
import sys
import threading

import pytest
import torch
from tests.expect import refused

from ingot.schema.parallel import Parallel
from ingot.trainer.optim import offload
from ingot.trainer.optim.adamw import adamw_rules
from ingot.trainer.optim.build import build_optimizer
from ingot.trainer.optim.gradients import clip_factor, gradient_norm
from ingot.trainer.optim.offload import OffloadedOptimizer
from ingot.trainer.optim.optimizer import Optimizer

FEW = 64 * 1024  # bytes of staging: ranges of 2048 float32 or 1024 float64 elements, so that `embed` has several


def clip_grad_norm(shards, max_norm, *, scale=None):
    """Clip as a training step does, but in place, so that a test can read the gradients."""
    norm = gradient_norm(shards, scale=scale)
    factor = clip_factor(norm, max_norm, scale=scale)
    for shard in shards:
        if factor is not None:
            shard.grad.mul_(factor)
    return norm


@pytest.fixture(params=["memory", "file", "staged memory", "staged file"])
def offloaded(request, tmp_path, optim, monkeypatch):
    """`staged` treats values and gradients as if they were on a device: the same path with plain copies."""
    if "staged" in request.param:
        monkeypatch.setattr(offload, "in_host_memory", lambda tensor: False)
    folder = tmp_path / "moments" if "file" in request.param else None
    made = []

    def make(shards, **options):
        made.append(OffloadedOptimizer(shards, adamw_rules(optim), folder=folder, **{"buffer_bytes": FEW, **options}))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.close()


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.float64)],
)
def test_the_same_bits_as_on_the_device(offloaded, blocks, gradients, optim, dtype, kept):
    mine, same = blocks(dtype), blocks(dtype)
    optimizer, reference = offloaded(mine), Optimizer(same, adamw_rules(optim))
    ranges = list(optimizer._ranges())
    assert len(ranges) > 4 and all(part.start * dtype.itemsize % 64 == 0 for part in ranges)
    for step in range(1, 6):
        for shards, one in ((mine, optimizer), (same, reference)):
            gradients(shards, step, kept)
            if step % 2:
                clip_grad_norm(shards, 0.7)
                one.step(0.01 * step)
            else:
                one.step(0.01 * step, scale=clip_factor(gradient_norm(shards), 0.7))
    for a, b in zip(mine, same, strict=True):
        assert torch.equal(a.value, b.value), a.name
        assert a.grad is None or not a.value.numel()
    for name, state in optimizer.moments().items():
        assert all(torch.equal(t, reference.moments()[name][kind]) for kind, t in state.items()), name
        assert state["step"].item() == 5


def test_a_vetoed_step_leaves_everything_but_gradients(offloaded, blocks, gradients):
    mine = blocks()
    optimizer = offloaded(mine)
    gradients(mine, 1)
    optimizer.step(0.01, found_inf=torch.tensor(0.0))
    before = [b.value.clone() for b in mine]
    state = {n: {k: t.clone() for k, t in s.items()} for n, s in optimizer.moments().items()}
    gradients(mine, 2)
    mine[0].grad.fill_(float("inf"))
    optimizer.step(0.01, found_inf=torch.tensor(True))
    assert all(b.grad is None for b in mine if b.value.numel())
    assert all(torch.equal(b.value, v) for b, v in zip(mine, before, strict=True))
    assert all(torch.equal(t, state[n][k]) for n, s in optimizer.moments().items() for k, t in s.items())


def test_moments_can_be_read_filled_in_place_and_put(offloaded, blocks, gradients, optim):
    source = blocks()
    reference = Optimizer(source, adamw_rules(optim))
    for step in (1, 2):
        gradients(source, step)
        reference.step(0.01)
    filled, put = blocks(seed=3), blocks(seed=4)
    one, other = offloaded(filled), offloaded(put)
    assert all(not t.any() for s in one.moments().values() for t in s.values())
    for a, b, c in zip(source, filled, put, strict=True):
        b.value.copy_(a.value)
        c.value.copy_(a.value)
    live = one.moments()
    for name, state in reference.moments().items():
        for kind, tensor in state.items():
            live[name][kind].copy_(tensor)
    one.put_moments(live)
    other.put_moments(reference.moments())
    for shards, optimizer in ((source, reference), (filled, one), (put, other)):
        gradients(shards, 3)
        optimizer.step(0.01)
    for a, b, c in zip(source, filled, put, strict=True):
        assert torch.equal(a.value, b.value) and torch.equal(a.value, c.value), a.name


def test_staging_never_takes_more_than_its_buffer(offloaded, blocks, gradients):
    mine = blocks()
    optimizer = offloaded(mine)
    gradients(mine, 1)
    optimizer.step(0.01)
    assert sum(b.nbytes for slot in optimizer.slots for b in slot.buffers.values()) <= FEW


def resident_bytes():
    with open("/proc/self/status") as status:  # noqa: PTH123
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def test_moments_in_a_file_are_not_in_memory(tmp_path, blocks, optim):
    (block,) = blocks()[:1]
    ones = torch.ones(8 * 2**20)  # its moments: 64 MiB
    block.value, block.grad = torch.ones(8 * 2**20), ones
    before = resident_bytes()
    optimizer = OffloadedOptimizer([block], adamw_rules(optim), folder=tmp_path, buffer_bytes=2**20)
    optimizer.step(0.01)
    assert resident_bytes() - before < 16 * 2**20
    assert optimizer.moments()["embed"]["exp_avg"].sum().item() == pytest.approx(0.1 * 8 * 2**20, rel=1e-4)
    assert resident_bytes() - before > 24 * 2**20  # looked at
    block.grad = ones
    optimizer.step(0.01)
    assert resident_bytes() - before < 16 * 2**20
    optimizer.close()


def test_a_full_disk_stops_it_before_the_first_step(tmp_path, blocks, optim):
    (block,) = blocks()[:1]
    block.value = torch.empty(2**58, device="meta")
    with refused("E-OFFLOAD-SPACE"):
        OffloadedOptimizer([block], adamw_rules(optim), folder=tmp_path / "deep" / "folder")
    assert list((tmp_path / "deep" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    with refused("E-OFFLOAD-SPACE"):
        OffloadedOptimizer(blocks(), adamw_rules(optim), folder=tmp_path / "file")


def test_a_disk_that_fails_in_a_step_tears_the_state(tmp_path, blocks, gradients, optim):
    mine = blocks()
    optimizer = OffloadedOptimizer(mine, adamw_rules(optim), folder=tmp_path, buffer_bytes=FEW)
    full = os.open("/dev/full", os.O_RDWR)  # reads zeros, takes nothing
    os.dup2(full, optimizer.file.file.fileno())
    os.close(full)
    gradients(mine, 1)
    with refused("E-OFFLOAD-FILE", action="written"):
        optimizer.step(0.01)
    with refused("E-OFFLOAD-INCOMPLETE"):
        optimizer.moments()
    optimizer.close()


def test_a_disk_that_hangs_meets_a_deadline(tmp_path, blocks, gradients, optim, monkeypatch):
    mine = blocks()
    optimizer = OffloadedOptimizer(mine, adamw_rules(optim), folder=tmp_path, deadline_seconds=0.05)
    answers = threading.Event()
    monkeypatch.setattr(optimizer.file, "read", lambda *args: answers.wait(120))
    gradients(mine, 1)
    with refused("E-OFFLOAD-TIMEOUT", seconds=0.05):
        optimizer.step(0.01)  # it does not wait for the read, which never ends
    answers.set()
    optimizer.close()


STUCK = """
import sys, threading
from dataclasses import dataclass
from pathlib import Path
import torch
from ingot.errors import ResourceError
from ingot.trainer.optim.offload import OffloadedOptimizer
from ingot.plugins.piece import ParameterShard
from ingot.schema.run import Optim

value = torch.zeros(8)
shard = ParameterShard("w", (8,), (0,), (8,), value, True, torch.ones(8))
from ingot.trainer.optim.adamw import adamw_rules
optimizer = OffloadedOptimizer([shard], adamw_rules(Optim()), folder=Path(sys.argv[1]), deadline_seconds=0.1)
optimizer.file.read = lambda *args: threading.Event().wait()
try:
    optimizer.step(0.1)
except ResourceError:
    optimizer.close()
    print("reported", flush=True)
"""


def test_a_process_ends_with_a_read_that_never_returns(tmp_path):
    command = [sys.executable, "-c", STUCK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "reported\n" and done.returncode == 0, done.stderr


def test_files_have_no_name_and_their_space_comes_back(tmp_path, blocks, gradients, optim):
    mine = blocks()
    optimizer = OffloadedOptimizer(mine, adamw_rules(optim), folder=tmp_path)
    gradients(mine, 1)
    optimizer.step(0.01)
    assert list(tmp_path.iterdir()) == []
    number = optimizer.file.file.fileno()
    assert os.fstat(number).st_blocks * 512 >= sum(2 * b.value.nbytes for b in mine)
    optimizer.close()
    with pytest.raises(OSError):
        os.fstat(number)


def test_the_setting_chooses(tmp_path, blocks, optim):
    assert type(build_optimizer(blocks(), adamw_rules(optim), Parallel(), tmp_path)) is Optimizer
    on_host = build_optimizer(blocks(), adamw_rules(optim), Parallel(offload="cpu"), tmp_path)
    assert type(on_host) is OffloadedOptimizer and on_host.file is None
    on_disk = build_optimizer(blocks(), adamw_rules(optim), Parallel(offload="nvme", offload_folder="new"), tmp_path)
    assert on_disk.file.folder == tmp_path / "new" and (tmp_path / "new").is_dir()
    on_disk.close()
