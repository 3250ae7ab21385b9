"""Errors of context and expert parallelism, planted like those of faults.py."""

from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import torch

from ingot.trainer.model import experts, routing, transformer
from ingot.trainer.parallel import balance, context, expert, ring, tensor, zero
from ingot.trainer.parallel.expert import ExpertDispatch
from ingot.trainer.parallel.pipeline import PipelineExecutor
from ingot.trainer.parallel.ring import Ring
from ingot.trainer.parallel.zero import Zero

from .planting import fault, replaced

_LATER = "gradient norm parameters loss"

# -- context parallelism --


@fault("documents are ignored on one step of the ring", "ring x documents", _LATER)
def mask_ignored_on_one_step(stack: ExitStack) -> None:
    def make(original):
        def one_document_on_other_ranks(parallel, own, source, tokens, *, ends, window, batch):
            ends = ends if source == own else None
            return original(parallel, own, source, tokens, ends=ends, window=window, batch=batch)

        return one_document_on_other_ranks

    replaced(stack, ring, "ring_tiles", make)


@fault("a recomputed block has the newest micro-batch's mask", "ulysses x gpipe x documents x recompute", _LATER)
def stale_mask(stack: ExitStack) -> None:
    """All micro-batches have passed forward when gpipe's first backward recomputes a block."""

    def make(original):
        newest = []

        def attend(self, q, k, v, mask_spec):
            if torch._C._current_graph_task_id() == -1:
                newest[:] = [mask_spec]
            return original(self, q, k, v, newest[0])

        return attend

    replaced(stack, context.ContextParallelism, "_attend_whole", make)


@fault("a ring knows of no window", "ring x window", _LATER)
def window_ignored(stack: ExitStack) -> None:
    replaced(
        stack,
        Ring,
        "attend",
        lambda attend: lambda self, q, k, v, mask_spec: attend(self, q, k, v, replace(mask_spec, window=0)),
    )


@fault("partial results are merged by their normalizers, not by the logarithms' sum", "ring", _LATER)
def merged_wrongly(stack: ExitStack) -> None:
    def merge(total, lse, out, out_lse):
        merged = torch.maximum(lse, out_lse)
        total.mul_((lse - merged).exp()[..., None]).add_(out * (out_lse - merged).exp()[..., None])
        lse.copy_(merged)

    stack.enter_context(patch.object(ring, "merge", merge))


@fault("the backward of a step takes that step's normalizer, not the final one", "ring over 4", _LATER)
def own_normalizer(stack: ExitStack) -> None:
    def make(backward):
        def of_this_step(grad, q, out, lse, k, v, *, causal, bias):
            return backward(
                grad, q, *ring.attend_part(q, k, v, causal=causal, bias=bias), k, v, causal=causal, bias=bias
            )

        return of_this_step

    replaced(stack, ring, "attend_part_backward", make)


@fault("a zigzag ring shows the halves of keys the wrong way round", "ring", _LATER)
def wrong_half(stack: ExitStack) -> None:
    def make(tiles):
        def shifted(parallel, own, source, tokens):
            found = tiles(parallel, own, source, tokens)
            if source >= own:
                return found
            return [replace(tile, keys=slice(tokens // 2, tokens)) for tile in found]

        return shifted

    replaced(stack, ring, "plain_tiles", make)


@fault("rotary positions begin at 0 on every rank", "contiguous ring", _LATER)
def positions_restart(stack: ExitStack) -> None:
    def make(tables):
        return lambda positions, *args: tables(positions - positions[0], *args)

    replaced(stack, transformer, "rotary_tables", make)


@fault("heads come back from the wrong ranks", "ulysses", _LATER)
def heads_mixed_up(stack: ExitStack) -> None:
    replaced(stack, context, "all_to_all", lambda swap: lambda parts, group: swap(parts, group).roll(1, 0))


@fault("gradients are summed over cp ranks, not averaged", "striped ring", "gradient norm parameters")
def cp_left_out_of_the_mean(stack: ExitStack) -> None:
    def make(reduce):
        def total(self):
            reduce(self)
            for shard in self.shards:
                shard.grad.mul_(self.mesh.size("cp"))

        return total

    replaced(stack, Zero, "reduce", make)


# -- experts --


@fault("experts' results are added without their weights", "idle x ep", "routing balance " + _LATER)
def combined_without_weights(stack: ExitStack) -> None:
    replaced(
        stack, experts, "combine", lambda combine: lambda made, weights, rows: combine(made, 1 + 0 * weights, rows)
    )


@fault("gradients of experts are averaged over ep as well", "experts x ep", "routing " + _LATER)
def divided_by_ep(stack: ExitStack) -> None:
    def make(reduce):
        def smaller(self):
            reduce(self)
            for shard in (shard for shard in self.shards if ".experts." in shard.name):
                shard.grad.div_(self.mesh.size("ep"))

        return smaller

    replaced(stack, Zero, "reduce", make)


@fault(
    "experts of the other tp ranks are left out of the norm",
    "experts x ep over tp",
    "routing owners norm parameters loss",
)
def experts_counted_on_one_rank(stack: ExitStack) -> None:
    def make(original):
        def on_the_first_tp_rank(cut, parameter, mesh):
            return original(cut, parameter, mesh) and not (cut.view == "expert_shard" and mesh.index("tp") > 0)

        return on_the_first_tp_rank

    replaced(stack, zero, "is_owner", make)


@fault("rows that arrive stay in the order of their senders", "capacity x ep", "routing balance " + _LATER)
def rows_not_sorted(stack: ExitStack) -> None:
    def as_they_came(ctx, rows, order, back):
        ctx.save_for_backward(torch.arange(len(back)))
        return rows.clone()

    stack.enter_context(patch.object(expert._Reorder, "forward", staticmethod(as_they_came)))


@fault("a rank takes the next rank's gate matrices for its own", "experts x ep", "routing " + _LATER)
def wrong_experts(stack: ExitStack) -> None:
    def make(cut):
        def next_ranks_gates(stage, names, mesh):
            cuts = cut(stage, names, mesh)
            for name in (name for name in names if name.endswith("gate.weight")):
                rows = cuts[name].shape[0]
                first = (cuts[name].offsets[0] + rows // mesh.size("ep")) % rows
                cuts[name] = replace(cuts[name], offsets=(first, *cuts[name].offsets[1:]))
            return cuts

        return next_ranks_gates

    replaced(stack, tensor, "_cut_experts", make)


@fault("experts take all tokens, whatever their capacity", "capacity x ring", "routing balance " + _LATER)
def nothing_dropped(stack: ExitStack) -> None:
    replaced(
        stack,
        routing,
        "within_capacity",
        lambda within: lambda choices, moe: torch.ones_like(choices, dtype=torch.bool),
    )


@fault("late tokens go before early ones", "fallback x ep over cp", "routing " + _LATER)
def last_come_first_served(stack: ExitStack) -> None:
    replaced(
        stack, routing, "within_capacity", lambda within: lambda choices, moe: within(choices.flip(1), moe).flip(1)
    )


@fault(
    "each rank counts the choices of its own tokens for a whole sequence's",
    "experts x ring",
    "routing " + _LATER,
)
def counted_on_one_rank(stack: ExitStack) -> None:
    replaced(stack, ExpertDispatch, "whole_sequences", lambda whole: lambda self, choices: choices)


@fault("the balance loss counts twice", "experts x gpipe", "routing " + _LATER)
def balance_loss_doubled(stack: ExitStack) -> None:
    def make(original):
        def twice(self, step, micro_batch):
            more = original(self, step, micro_batch)
            return (
                {"router_loss": replace(more["router_loss"], weight=2 * more["router_loss"].weight)} if more else more
            )

        return twice

    replaced(stack, PipelineExecutor, "_router_loss", make)


@fault("every rank draws the same noise for its own first sequence", "experts x ddp", "routing " + _LATER)
def noise_by_place(stack: ExitStack) -> None:
    replaced(stack, routing, "normal_noise", lambda noise: lambda keys, *args: noise(torch.arange(len(keys)), *args))


@fault("biases follow the loads of one rank", "idle x zero-1", "routing balance loss norm parameters")
def biases_of_one_rank(stack: ExitStack) -> None:
    replaced(stack, balance, "all_sum", lambda original: lambda x, group: x)
