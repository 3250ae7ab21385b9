"""Pipeline bubbles on four real ranks whose stages compute nothing: each rank counts time, and messages carry it.

A stage adds its slot to its rank's clock, and sends the clock's value as its hidden state or gradient; a rank that
receives a later value sets its clock forward. So a step takes as long as the order of the executor's actions and
messages makes it take, on any machine and under any load. Sends cost nothing here: a send that blocked its rank would
not show.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ingot.schema.parallel import TWO_STAGES, Parallel
from ingot.theory.schedule import build_table, simulate
from ingot.trainer.mesh.mesh import build_mesh
from ingot.trainer.parallel.pipeline import PipelineExecutor
from ingot.trainer.parallel.split_backward import SplitBackward

RANKS, MICRO_BATCHES, WIDTH = 4, 8, 4
SLOT = 1.0  # forward of a rank's stages, and each half of their backward; halves are exact in fp32
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zb_v")


class Clock:
    now = 0.0

    def spend(self, seconds: float, arrived: torch.Tensor | None = None) -> float:
        """Wait for what arrived, then spend `seconds`; return the time after it."""
        self.now = max(self.now, 0.0 if arrived is None else float(arrived.max())) + seconds
        return self.now


class _InputHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, stage):
        ctx.stage = stage
        return torch.full_like(x, stage.clock.spend(stage.seconds, x))

    @staticmethod
    def backward(ctx, *grads):
        return torch.full_like(grads[0], ctx.stage.clock.spend(ctx.stage.seconds)), None


class _Output(torch.autograd.Function):
    """The end of a stage: its backward begins when the gradient arrives from the next stage."""

    @staticmethod
    def forward(ctx, y, stage):
        ctx.stage = stage
        return y.clone()

    @staticmethod
    def backward(ctx, *grads):
        ctx.stage.clock.spend(0.0, grads[0])
        return grads[0], None


class _WeightHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, stage):
        ctx.stage = stage
        return weight.clone()

    @staticmethod
    def backward(ctx, *grads):
        ctx.stage.clock.spend(ctx.stage.seconds)
        return grads[0], None


class CountingStage(nn.Module):
    def __init__(self, clock: Clock, seconds: float, split: SplitBackward):
        super().__init__()
        self.clock, self.seconds, self.split = clock, seconds, split
        self.start = nn.Parameter(torch.zeros(WIDTH))
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x, targets=None, document_ids=None):
        if not x.is_floating_point():
            x = x[..., None] * self.start  # the first stage: nothing arrives
        y = _InputHalf.apply(x, self)
        # All values of a tensor are one time, which a product with the identity keeps.
        y = self.split.linear(y, _WeightHalf.apply(self.weight, self))
        return _Output.apply(y, self) if targets is None else y.sum()


class OneDataRank:
    def before_backward(self, stage, last): ...
    def after_backward(self, stage, last): ...


def table_of(name):
    return build_table(name, RANKS, MICRO_BATCHES, 2 if name in TWO_STAGES else 1)


def step_time(rank, world, name):
    """Return the time when the last rank has ended its step."""
    ones = torch.ones(MICRO_BATCHES, 1, 1, dtype=torch.int64)
    batch = SimpleNamespace(step=1, inputs=ones, targets=ones, document_ids=None)
    table, clock, split = table_of(name), Clock(), SplitBackward()
    own = table.stages_of(rank)
    program = PipelineExecutor(
        {number: CountingStage(clock, SLOT / len(own), split) for number in own},
        table,
        build_mesh(Parallel(pp=world), "cpu"),
        OneDataRank(),
        d_model=WIDTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
        split=split,
    )
    program.train(batch)
    assert all(stage.weight.grad is not None for stage in program.stages.values())
    last = torch.tensor(clock.now)
    dist.all_reduce(last, dist.ReduceOp.MAX)
    return float(last)


def all_step_times(rank, world):
    return {name: step_time(rank, world, name) for name in SCHEDULES}


def test_steps_take_what_their_tables_plan_with_bubbles_in_the_published_order(fork_ranks):
    times, *_ = fork_ranks(all_step_times, RANKS)
    for name in SCHEDULES:
        slot = SLOT / (2 if name in TWO_STAGES else 1)
        planned = simulate(table_of(name), forward=slot, backward_input=slot, backward_weight=slot)
        assert times[name] == planned.step_time, name
    bubble = {name: 1 - 3 * MICRO_BATCHES * SLOT / found for name, found in times.items()}
    assert bubble["gpipe"] == bubble["1f1b"] > bubble["interleaved"] > max(bubble["interleaved_zb"], bubble["zb_v"])
    # Huang et al. 2019, Narayanan et al. 2021: (p - 1) / (m + p - 1), and with m v instead of m.
    assert bubble["1f1b"] == pytest.approx((RANKS - 1) / (MICRO_BATCHES + RANKS - 1))
    assert bubble["interleaved"] == pytest.approx((RANKS - 1) / (2 * MICRO_BATCHES + RANKS - 1))
