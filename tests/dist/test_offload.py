"""Offload and clipping on several ranks: against one process, and when a rank is killed in the middle of a step."""

import multiprocessing
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.schema.parallel import Parallel
from ingot.schema.run import Optim
from ingot.trainer.optim.adamw import adamw_rules
from ingot.trainer.optim.build import build_optimizer
from ingot.trainer.optim.gradients import clip_factor, gradient_norm
from ingot.trainer.optim.offload import OffloadedOptimizer
from ingot.trainer.optim.optimizer import Optimizer

OPTIM = Optim(lr=0.01, weight_decay=0.1)
ROWS = {"embed": (13, 64), "norm": (64,), "shared": (6, 5)}  # `shared` is on every rank, the others are cut by rows


def clip_grad_norm(shards, max_norm, *, scale=None):
    """Clip as a training step does, but in place, so that a test can read the gradients."""
    norm = gradient_norm(shards, scale=scale)
    factor = clip_factor(norm, max_norm, scale=scale)
    for shard in shards:
        if factor is not None:
            shard.grad.mul_(factor)
    return norm


@dataclass
class Block:
    name: str
    value: torch.Tensor
    decays: bool
    owner: bool = True
    grad: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


def own(name, whole, rank, world):
    return whole if name == "shared" else whole.tensor_split(world)[rank]


def train(rank, world, offload, folder="", steps=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shards = [
        Block(
            name,
            own(name, torch.randn(shape, generator=generator, dtype=dtype), rank, world).clone(),
            decays=len(shape) > 1,
            owner=name != "shared" or rank == 0,
        )
        for name, shape in ROWS.items()
    ]
    optimizer, norms = (
        build_optimizer(shards, adamw_rules(OPTIM), Parallel(offload=offload, offload_folder=folder), Path()),
        [],
    )
    for step in range(1, steps + 1):
        for shard in shards:
            whole = torch.randn(ROWS[shard.name], generator=generator, dtype=dtype)
            shard.grad = own(shard.name, whole, rank, world).clone()
        if step % 2:
            norms.append(clip_grad_norm(shards, 1.0))
            optimizer.step(0.01 * step)
        else:
            norms.append(gradient_norm(shards, world))
            optimizer.step(0.01 * step, scale=clip_factor(norms[-1], 1.0))
    optimizer.close()
    return {p.name: p.value.numpy() for p in shards}, torch.stack(norms).numpy()


def test_every_form_on_four_ranks_equals_one_process(fork_ranks, tmp_path):
    expected, norms = train(0, 1, "none")
    forms = {}
    for offload in ("none", "cpu", "nvme"):
        forms[offload] = fork_ranks(lambda r, w, o=offload: train(r, w, o, str(tmp_path / "moments")), 4)
        for rank, (values, rank_norms) in enumerate(forms[offload]):
            assert abs(rank_norms / norms - 1).max() < 1e-14
            for name, value in values.items():
                assert abs(value - own(name, torch.from_numpy(expected[name]), rank, 4).numpy()).max() < 1e-13
                assert (value == forms["none"][rank][0][name]).all()
    assert list((tmp_path / "moments").iterdir()) == []


def test_the_norm_has_the_same_bits_every_time_and_on_every_rank(fork_ranks):
    runs = [fork_ranks(lambda r, w: train(r, w, "none", dtype=torch.float32)[1], 4) for _ in range(2)]
    assert all((norms == runs[0][0]).all() for run in runs for norms in run)


def die_in_the_middle(folder, blocks, in_step):
    optimizer = OffloadedOptimizer(blocks, adamw_rules(OPTIM), folder=folder, buffer_bytes=64 * 1024)
    optimizer.step(0.01)
    write, written = optimizer.file.write, []

    def write_and_die(*args):
        write(*args)
        written.append(args)
        if len(written) == 3:
            in_step.set()
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer.file.write = write_and_die
    for block in blocks:
        block.grad = torch.ones_like(block.value)
    optimizer.step(0.01)


def test_a_rank_killed_in_a_step_leaves_no_file(tmp_path):
    def blocks():
        return [Block("w", torch.ones(20_000), decays=True, grad=torch.ones(20_000))]

    context = multiprocessing.get_context("fork")
    in_step = context.Event()
    process = context.Process(target=die_in_the_middle, args=(tmp_path, blocks(), in_step))
    process.start()
    process.join(30)
    assert in_step.is_set() and process.exitcode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    mine, same = blocks(), blocks()
    after, reference = (
        OffloadedOptimizer(mine, adamw_rules(OPTIM), folder=tmp_path),
        Optimizer(same, adamw_rules(OPTIM)),
    )
    assert all(not t.any() for t in after.moments()["w"].values())
    after.step(0.01)
    reference.step(0.01)
    assert torch.equal(mine[0].value, same[0].value)
    after.close()
