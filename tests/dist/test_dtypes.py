"""The dtypes at the points of a bf16 step where bfloat16 would cost accuracy, and of everything that ranks exchange.

A sum in bfloat16 between a few ranks is smaller than the noise of the whole gradient (test_precision.py), so it is
looked at directly.
"""

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from ingot.rehearse.dryrun.mesh_world import Grid
from ingot.rehearse.dryrun.tracker import Tracker
from ingot.schema.arch import Moe
from ingot.trainer.build import build_parts
from ingot.trainer.mesh.mesh import AXES
from ingot.trainer.model import attention, routing
from ingot.trainer.step import train_step

from .steps import ARCH, CPU, batch_of, run_of

EXPERTS = replace(ARCH, moe=Moe(num_experts=4, top_k=2, d_expert=8, sequence_loss=0.01))
BF16, FP32, FP64, INT64 = "bfloat16", "float32", "float64", "int64"
WIDE = {"loss": {FP32}, "rotary": {FP32}, "gradients": {FP32}, "norm": {FP32}}
# Form -> its settings, the dtypes at the named points, and those of messages: (operation, axis) -> dtypes.
FORMS: dict[str, tuple[dict[str, Any], dict[str, set[str]], dict[tuple[str, str], set[str]]]] = {
    "zero 2": (
        {"dp_shard": 2, "zero": 2},
        WIDE,
        # the mean of gradients and the norm, and the weights
        {
            ("reduce_scatter", "dp_shard"): {FP32},
            ("all_reduce", "dp_shard"): {FP64},
            ("all_gather", "dp_shard"): {BF16},
        },
    ),
    "zero 3": (
        {"dp_shard": 2, "zero": 3},
        WIDE,
        {
            ("reduce_scatter", "dp_shard"): {FP32},
            ("all_reduce", "dp_shard"): {FP64},
            ("all_gather", "dp_shard"): {BF16},
        },
    ),
    "tp": (
        {"tp": 2},
        WIDE,
        # activations; the parts of the loss, partial gradients and the norm
        {("all_gather", "tp"): {BF16}, ("reduce_scatter", "tp"): {BF16}, ("all_reduce", "tp"): {FP32, FP64}},
    ),
    "ring": (
        {"cp": 2, "context": "ring"},
        WIDE,
        # keys and values travel in bf16, the sums of their gradients in float32
        {
            ("send", "cp"): {BF16, FP32},
            ("reduce_scatter", "cp"): {FP32},
            ("all_reduce", "cp"): {FP64},
            ("all_gather", "cp"): {BF16},
        },
    ),
    "ep": (
        {"dp_shard": 2, "ep": 2, "arch": EXPERTS},
        WIDE | {"router": {FP32}},
        # rows and their number; gradients, the norm, and what routers counted
        {
            ("all_to_all", "dp_shard"): {BF16, INT64},
            ("all_reduce", "dp_shard"): {FP64},
            ("reduce_scatter", "dp_shard"): {FP32},
            ("all_gather", "dp_shard"): {BF16},
        },
    ),
    "pp": ({"pp": 2}, WIDE, {("send", "pp"): {BF16}, ("all_reduce", "pp"): {FP32, FP64}}),
}


def seen(rank: int, world: int, run) -> tuple[dict[str, set[str]], dict[tuple[str, str], set[str]]]:
    """Return the dtypes at named points, and of messages by operation and axis, in this rank's second step."""
    points: dict[str, set[str]] = defaultdict(set)
    messages: dict[tuple[str, str], set[str]] = defaultdict(set)
    parts = build_parts(run, CPU, Path())

    def record(point: str, tensor: torch.Tensor) -> torch.Tensor:
        points[point].add(str(tensor.dtype).removeprefix("torch."))
        return tensor

    def loss_and_look(measure):
        def look(*args):
            nats, slope = measure(*args)
            return record("loss", nats), slope

        return look

    for stage in parts.model.stages.values():
        if stage.norm is not None:
            stage.readout.nats_and_slope = loss_and_look(stage.readout.nats_and_slope)
    rotate, logits, linear = attention.rotate, routing._logits, F.linear

    def router_logits(x, weight):
        with patch.object(F, "linear", lambda a, b: linear(record("router", a), record("router", b))):
            return record("router", logits(x, weight))

    train_step(parts, batch_of(run, parts.mesh, 1), 1e-3)
    points.clear()
    reduce = parts.model.reduce

    def reduce_and_look() -> None:
        reduce()
        for shard in parts.model.shards:
            record("gradients", shard.grad)

    parts.model.reduce = reduce_and_look
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(attention, "rotate", lambda x, cos, sin: rotate(x, record("rotary", cos), sin))
        )
        stack.enter_context(patch.object(routing, "_logits", router_logits))
        tracker = stack.enter_context(Tracker())
        record("norm", train_step(parts, batch_of(run, parts.mesh, 2), 1e-3).grad_norm)
    grid = Grid({axis: getattr(run.parallel, axis) for axis in AXES})
    for call in tracker.calls:
        if call.op not in ("recv", "irecv", "wait", "sent", "barrier") and len(call.group) > 1:
            axis = "+".join(grid.axes(call.group if call.peer < 0 else (rank, call.peer)))
            messages["send" if call.op == "isend" else call.op, axis].add(call.dtype)
    return dict(points), dict(messages)


@pytest.mark.parametrize("form", FORMS)
def test_dtypes_of_a_step_in_bf16(fork_ranks, form):
    settings, points, messages = FORMS[form]
    run = run_of(**{"precision": "bf16", "micro_batch": 1} | settings)
    by_rank = fork_ranks(seen, run.parallel.world_size, run)
    for kind, expected in ((0, points), (1, messages)):
        found = defaultdict(set)
        for rank in by_rank:
            for key, dtypes in rank[kind].items():
                found[key] |= dtypes
        assert dict(found) == expected
