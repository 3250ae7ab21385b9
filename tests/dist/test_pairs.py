"""DualPipeV's pairs: a forward beside the backward of another micro-batch, in the order that hides their exchanges."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ingot.theory.schedule import turns
from ingot.trainer.build import build_parts
from ingot.trainer.parallel import expert
from ingot.trainer.step import train_step

from .steps import CPU, batch_of, keep, run_of
from .test_experts import EXPERTS, _marked

LAYERS = 8  # two on each of four stages


def paired_run(layers=LAYERS, **settings):
    layout = {"pp": 2, "dp_shard": 2, "ep": 2, "schedule": "dualpipe_v", "global_batch": 10}
    return run_of(arch=replace(EXPERTS, num_layers=layers), **layout | settings)


def gradients(rank, world, run):
    """The loss and the gradients of one batch, without pairs and with them."""
    parts, found = build_parts(run, CPU, Path()), []
    program = parts.program
    paired, alone = program.slots, [(action,) for action in program.row]
    assert len(paired) < len(alone)
    for slots in (alone, paired):
        program.slots = slots
        loss = program.train(batch_of(run, parts.mesh, 1))
        parts.model.reduce()
        shards = [(shard, shard.grad.double()) for shard in parts.model.shards if shard.grad is not None]
        found.append((loss.item(), keep(shards)))
        parts.model.publish()
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16", "recompute": "selective"},
        pytest.param({"precision": "fp64"}, marks=pytest.mark.slow),
        pytest.param({"precision": "bf16", "recompute": "full", "zero": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_pairs_keep_every_bit(fork_ranks, settings):
    for (loss, apart), (same, together) in fork_ranks(gradients, 4, paired_run(LAYERS // 2, **settings)):
        assert loss == same and len(apart) == len(together) > 0
        for (*place, ours), (*same_place, theirs) in zip(apart, together, strict=True):
            assert place == same_place and np.array_equal(ours, theirs), place


def recorded(rank, world, run):
    """Computations, starts and waits of each pair of a step, in order: (side, what, number on this side)."""
    parts, pairs = build_parts(run, CPU, Path()), []
    program, counts, sent, paired = parts.program, {}, {}, []

    def note(what, number=None):
        if not paired:
            return
        side = program.turns.side
        if number is None:
            number = counts[side, what] = counts.get((side, what), -1) + 1
        pairs[-1].append((side, what, number))

    def start(rows, *args):
        arriving = started(rows, *args)
        if rows.is_floating_point():  # not the counts of rows
            note("start")
            sent[arriving.data_ptr()] = pairs[-1][-1][2] if paired else None
        return arriving

    def wait(x):
        if x.is_floating_point() and (number := sent.pop(x.data_ptr())) is not None:
            note("wait", number)
        return waited(x)

    def run_pair(*works):
        counts.clear()
        pairs.append([])
        paired.append(True)
        together(*works)
        paired.clear()

    started, waited, together = expert.start_all_to_all, expert.finish, program.turns.run
    expert.start_all_to_all, expert.finish, program.turns.run = start, wait, run_pair
    for stage in parts.model.stages.values():
        for block in stage.get_submodule("blocks").children():
            for name in ("attention", "moe.experts"):
                part = block.get_submodule(name)
                part.forward = partial(_marked, part.forward, name, note)
    train_step(parts, batch_of(run, parts.mesh, 1), 1e-2)
    return pairs, len(program.table.overlaps[program.rank])


def expected_order(layers):
    """The events of a pair, by the order of parts that the simulation takes."""
    computes = (
        ["forward attention", "forward moe.experts"] * layers + [""],
        ["", *["backward moe.experts", "backward attention"] * layers],
    )
    for side, part in turns(2 * layers, 2 * layers):
        if part:
            yield side, "wait", part - 1
        if what := computes[side][part]:
            yield side, what, part // 2 if side == 0 else (part - 1) // 2
        if part < 2 * layers:
            yield side, "start", part


def test_each_exchange_of_a_pair_starts_before_and_is_waited_for_after(fork_ranks):
    order = list(expected_order(LAYERS // 4))
    for pairs, overlaps in fork_ranks(recorded, 4, paired_run()):
        assert len(pairs) == overlaps > 0
        for pair in pairs:
            assert pair == order
