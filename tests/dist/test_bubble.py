"""Pipeline bubbles in wall-clock time: stages that sleep instead of computing, so that four ranks overlap on any machine."""

import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from ingot.schema.parallel import TWO_STAGES, Parallel
from ingot.theory.schedule import build_table, simulate
from ingot.trainer.mesh.mesh import build_mesh
from ingot.trainer.parallel.pipeline import PipelineExecutor
from ingot.trainer.parallel.split_backward import SplitBackward

RANKS, MICRO_BATCHES, WIDTH = 4, 8, 4
SLOT_SECONDS = 0.03  # forward of a rank's stages, and each half of their backward
STEPS = 12  # at most: a machine that is busy with other things wakes sleepers late
NEAR = 1.08  # the planned times of gpipe, interleaved and zb_v are further apart
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zb_v")


class _InputSleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        time.sleep(ctx.seconds)
        return grads[0], None


class _WeightSleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, seconds):
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx, *grads):
        time.sleep(ctx.seconds)
        return grads[0], None


class SleepingStage(nn.Module):
    def __init__(self, seconds: float, split: SplitBackward):
        super().__init__()
        self.seconds, self.split = seconds, split
        self.start = nn.Parameter(torch.ones(WIDTH))
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x, targets=None, document_ids=None):
        if not x.is_floating_point():
            x = x[..., None] * self.start
        y = self.split.linear(_InputSleeps.apply(x, self.seconds), _WeightSleeps.apply(self.weight, self.seconds))
        return y if targets is None else y.sum()


class OneDataRank:
    def before_backward(self, stage, last): ...
    def after_backward(self, stage, last): ...


def table_of(name):
    return build_table(name, RANKS, MICRO_BATCHES, 2 if name in TWO_STAGES else 1)


def planned_seconds(name):
    """Return the time of a step of the table if only sleep takes time."""
    slot = SLOT_SECONDS / (2 if name in TWO_STAGES else 1)
    return simulate(table_of(name), forward=slot, backward_input=slot, backward_weight=slot).step_time


def step_seconds(rank, world):
    """Return for each schedule the fastest step, from the first rank's start to the last rank's end."""
    ones = torch.ones(MICRO_BATCHES, 1, 1, dtype=torch.int64)
    batch = SimpleNamespace(step=1, inputs=ones, targets=ones, document_ids=None)
    mesh, found = build_mesh(Parallel(pp=world), "cpu"), {}
    for name in SCHEDULES:
        table = table_of(name)
        own = table.stages_of(rank)
        split = SplitBackward()
        stages = {number: SleepingStage(SLOT_SECONDS / len(own), split) for number in own}
        program = PipelineExecutor(
            stages,
            table,
            mesh,
            OneDataRank(),
            d_model=WIDTH,
            dtype=torch.float32,
            device=torch.device("cpu"),
            split=split,
        )
        found[name] = float("inf")
        for _ in range(STEPS):
            dist.barrier()
            start = time.perf_counter()
            program.train(batch)
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            found[name] = min(found[name], float(seconds))
            if found[name] < NEAR * planned_seconds(name):
                break
        assert all(stage.weight.grad is not None for stage in stages.values())
    return found


def test_bubbles_are_in_the_published_order(fork_ranks):
    seconds, *_ = fork_ranks(step_seconds, RANKS)
    ideal = 3 * MICRO_BATCHES * SLOT_SECONDS
    bubble = {name: 1 - ideal / found for name, found in seconds.items()}
    assert abs(seconds["gpipe"] / seconds["1f1b"] - 1) <= 0.1, bubble
    assert bubble["1f1b"] > bubble["interleaved"] > max(bubble["interleaved_zb"], bubble["zb_v"]), bubble
    for name in SCHEDULES:
        assert seconds[name] > planned_seconds(name), f"{name} waits less than its table: stages did not take turns"
