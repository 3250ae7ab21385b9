"""The order in which a rank issues collectives and computes: what could run at the same time on a GPU does not wait.

Marks record when the forward and the backward of a block compute; the tracker lists them together with collectives.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch

from ingot.rehearse.dryrun.tracker import Tracker
from ingot.trainer.build import build_parts
from ingot.trainer.parallel import zero
from ingot.trainer.step import train_step

from .steps import ARCH, CPU, batch_of, run_of

LAYERS = ARCH.num_layers
OUTER = 1  # the unit of embedding, last norm and head


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, note, text):
        ctx.note, ctx.text = note, text
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        ctx.note(ctx.text)
        return grads[0], None, None


def mark_blocks(stage, note):
    """`note` hears "forward i" and "backward i" when block i begins to compute, and "end i" after its backward.

    Inside of all hooks that gather, wait and scatter.
    """

    def marked(forward, i):
        def marked_forward(x, *args):
            note(f"forward {i}")
            y = forward(_Mark.apply(x, note, f"end {i}"), *args)
            return _Mark.apply(y, note, f"backward {i}")

        return marked_forward

    for i, block in stage.blocks.items():
        block.forward = marked(block.forward, i)


def issued(rank, world, run):
    """One step, from the update before it to its last backward: marks and names of collectives, in order."""
    parts = build_parts(run, CPU, Path())
    with Tracker() as tracker:
        mark_blocks(parts.model.stages[0], tracker.mark)
        publish = parts.model.publish

        def marked_publish():
            tracker.mark("publish")
            publish()

        parts.model.publish = marked_publish
        for step in (1, 2):
            train_step(parts, batch_of(run, parts.mesh, step), 1e-3)
    order = [
        event.name
        for event in tracker.events
        if event.what == "mark" or (event.call and event.call.op in ("all_gather", "reduce_scatter"))
    ]
    first, second = (i for i, name in enumerate(order) if name == "publish")
    return order[first + 1 : second]


def counts_at_marks(order):
    """Return the numbers of collectives issued before each mark, and in all."""
    seen, found = Counter(), {}
    for name in order:
        if name in ("all_gather", "reduce_scatter"):
            seen[name] += 1
        else:
            found[name] = seen.copy()
    return found, seen


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_zero_3_gathers_ahead_in_both_directions(fork_ranks, prefetch):
    run = run_of(dp_shard=2, zero=3, prefetch=prefetch, global_batch=2)
    for order in fork_ranks(issued, 2, run):
        at, total = counts_at_marks(order)
        for i in range(LAYERS):
            ahead = min(i + 1 + prefetch, LAYERS)
            assert at[f"forward {i}"]["all_gather"] == OUTER + ahead, order
            assert at[f"backward {LAYERS - 1 - i}"]["all_gather"] == OUTER + LAYERS + OUTER + ahead, order
        assert total["all_gather"] == 2 * (OUTER + LAYERS)


@pytest.mark.parametrize("form", [1, 2, 3])
def test_a_unit_is_scattered_while_the_one_before_it_computes_backward(fork_ranks, form):
    run = run_of(dp_shard=2, zero=form, global_batch=2)
    for order in fork_ranks(issued, 2, run):
        at, total = counts_at_marks(order)
        for i in range(LAYERS):
            assert at[f"backward {i}"]["reduce_scatter"] == LAYERS - 1 - i, order
        assert total["reduce_scatter"] == LAYERS + OUTER


@pytest.mark.parametrize("form", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_whole_parameters_are_gathered_while_earlier_units_compute(fork_ranks, form, prefetch):
    run = run_of(dp_shard=2, zero=form, prefetch=prefetch, global_batch=2)
    for order in fork_ranks(issued, 2, run):
        at, total = counts_at_marks(order)
        for i in range(LAYERS):
            assert at[f"forward {i}"]["all_gather"] == OUTER + min(i + 1 + prefetch, LAYERS), order
        assert total["all_gather"] == OUTER + LAYERS


class Heard:
    """A collective on its way that says when it is waited for."""

    def __init__(self, work, note, text):
        self.work, self.note, self.text = work, note, text

    def wait(self):
        self.note(self.text)
        return self.work.wait()


def waited(rank, world, run):
    """Marks, starts and waits of the exchanges of zero.py, numbered by unit, of one step as in `issued`."""
    order: list[str] = []

    def heard(start, what):
        numbers = iter(range(10_000))

        def start_and_tell(*args):
            number = next(numbers) % (LAYERS + OUTER)
            order.append(f"start {what} {number}")
            return Heard(start(*args), order.append, f"wait {what} {number}")

        return start_and_tell

    zero.start_gather, zero.start_scatter_sum = heard(zero.start_gather, "gather"), heard(zero.start_scatter_sum, "sum")
    parts = build_parts(run, CPU, Path())
    mark_blocks(parts.model.stages[0], order.append)
    publish = parts.model.publish

    def heard_publish():
        order.append("publish")
        publish()

    parts.model.publish = heard_publish
    for step in (1, 2):
        train_step(parts, batch_of(run, parts.mesh, step), 1e-3)
    first, second = (i for i, name in enumerate(order) if name == "publish")
    return order[first + 1 : second]


@pytest.mark.parametrize("form", [1, 2])
def test_nothing_is_waited_for_before_it_is_needed(fork_ranks, form):
    for order in fork_ranks(waited, 2, run_of(dp_shard=2, zero=form, global_batch=2)):
        place = {name: i for i, name in enumerate(order)}
        for i in range(LAYERS):
            unit = OUTER + i
            if i:  # started before the block before computes, waited for after it was called
                assert place[f"start gather {unit}"] < place[f"forward {i - 1}"] < place[f"wait gather {unit}"], order
            assert place[f"wait gather {unit}"] < place[f"forward {i}"]
            scattered = LAYERS - 1 - i  # the last block is the first that is scattered
            assert place[f"backward {i}"] < place[f"start sum {scattered}"], order
            if i:
                assert place[f"start sum {scattered}"] < place[f"backward {i - 1}"] < place[f"wait sum {scattered}"]
            # One at a time: it is waited for when the next one can start.
            assert place[f"wait sum {scattered}"] == place[f"start sum {scattered + 1}"] - 1, order
