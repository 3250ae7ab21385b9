"""The translation of dispatched collectives to rendezvous.Call, and FLOP formulas that PyTorch does not have.

There are two families of collectives: `c10d::*` are those of torch.distributed and work in place;
`_c10d_functional::*` are those of torch.distributed._functional_collectives and return new tensors.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ingot.rehearse.dryrun.rendezvous import BARRIER, RECV, SEND, Call
from ingot.theory.flops import mean_keys
from ingot.trainer.torch_private import (
    attention_kernels,
    group_of_name,
    grouped_product_kernel,
    is_process_group,
    operator_packet,
    tree_leaves,
)

# name in the dispatcher -> (name in Call.op, "input" or "output": the side that has the whole tensor)
_IN_PLACE = {
    "allreduce_": ("all_reduce", "input"),
    "allreduce_coalesced_": ("all_reduce", "input"),
    "_allgather_base_": ("all_gather", "output"),
    "allgather_": ("all_gather", "output"),
    "allgather_into_tensor_coalesced_": ("all_gather", "output"),
    "_reduce_scatter_base_": ("reduce_scatter", "input"),
    "reduce_scatter_": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "input"),
    "alltoall_base_": ("all_to_all", "input"),
    "alltoall_": ("all_to_all", "input"),
    "broadcast_": ("broadcast", "input"),
    "reduce_": ("reduce", "input"),
    "gather_": ("gather", "input"),
    "scatter_": ("scatter", "output"),
    "barrier": (BARRIER, "input"),
    "send": (SEND, "input"),
    "recv_": (RECV, "input"),
}
_FUNCTIONAL = {
    "all_reduce": ("all_reduce", "input"),
    "all_reduce_": ("all_reduce", "input"),
    "all_reduce_coalesced": ("all_reduce", "input"),
    "all_gather_into_tensor": ("all_gather", "output"),
    "all_gather_into_tensor_out": ("all_gather", "output"),
    "all_gather_into_tensor_coalesced": ("all_gather", "output"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "input"),
    "all_to_all_single": ("all_to_all", "input"),
    "broadcast": ("broadcast", "input"),
    "broadcast_": ("broadcast", "input"),
}
_OUTPUT_FIRST = ("_allgather_base_", "allgather_", "_reduce_scatter_base_", "reduce_scatter_", "alltoall_base_")
_WAITS = ("wait_tensor", "_wrap_tensor_autograd")


def is_collective(func) -> bool:
    return func.namespace in ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")


def call_of(func, args: tuple, kwargs: dict[str, Any], result, label: str) -> Call | None:
    """Return the Call of the dispatched collective `func`, or None if `func` is a wait. Raises NotImplementedError if
    the collective is unknown. label: place in the program, for messages.
    """
    name = operator_packet(func).__name__
    if name in _WAITS:
        return None
    known = _IN_PLACE if func.namespace == "c10d" else _FUNCTIONAL
    if name not in known:
        raise NotImplementedError(f"{func} is not a collective that the tracker knows")
    op, whole = known[name]
    group = _group(args, kwargs)
    ranks = tuple(dist.get_process_group_ranks(group))
    inputs, outputs = _sides(func, args, result)
    side = inputs if whole == "input" else outputs
    elements = 0 if op == BARRIER else sum(tensor.numel() for tensor in side)
    peer = -1
    if op in (SEND, RECV):
        peer = ranks[next(arg for arg in args if isinstance(arg, int))]
    elif op in ("broadcast", "reduce", "gather", "scatter"):
        peer = ranks[next(arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool))]
    own = _own_part(args, side[0], dist.get_rank(group)) if op == "all_to_all" else -1
    dtype = str(side[0].dtype).removeprefix("torch.")
    return Call(op, ranks, dtype, elements, group.group_name, peer, label, own=own)


def _own_part(args: tuple, rows: Tensor, rank: int) -> int:
    """Return the number of elements that a rank sends to itself in an all-to-all with unequal parts; else -1."""
    splits = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], int)]
    if len({size for sizes in splits for size in sizes}) < 2:
        return -1
    _, sent = splits
    return sent[rank] * rows.shape[1:].numel()


def collective_tensors(func, args: tuple) -> Iterator[Tensor]:
    """Yield the buffers that `func` uses in place if it is an all-gather or reduce-scatter of one tensor (c10d)."""
    if func.namespace == "c10d" and operator_packet(func).__name__ in ("_allgather_base_", "_reduce_scatter_base_"):
        yield from (arg for arg in args if isinstance(arg, Tensor))


def _group(args: tuple, kwargs: dict[str, Any]) -> dist.ProcessGroup:
    for arg in (*args, *kwargs.values()):
        if is_process_group(arg):
            return dist.ProcessGroup.unbox(arg)
        if isinstance(arg, dist.ProcessGroup):
            return arg
    names = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str)]
    return group_of_name(names[-1])  # the last string is the group's name; one before it is the kind of reduction


def _sides(func, args: tuple, result) -> tuple[list[Tensor], list[Tensor]]:
    """Return the input tensors and the output tensors of a collective."""

    def tensors(tree) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

    if func.namespace != "c10d":
        return tensors(args[0]), tensors(result)
    if operator_packet(func).__name__ in _OUTPUT_FIRST:
        return tensors(args[1]), tensors(args[0])
    return tensors(args[0]), tensors(args[0])


# PyTorch's own counter silently counts 0 for attention on a CPU and for grouped products, and all T x S pairs for other
# attention. Here causal attention counts half of the pairs; pairs hidden by a mask count, because kernels compute them.
# Attention has 2 products in the forward and 5 in the backward (which computes the scores again).


def flop_formula(packet) -> Callable[..., int] | None:
    """Return the function that counts the FLOPs of an operation from its arguments and `out_val`, or None if the
    operation has no FLOPs.
    """
    return _FORMULAS.get(packet) or flop_registry.get(packet)


def _attention(q, k, v, *rest, **_) -> int:
    return 2 * 2 * _pairs(q, k, _is_causal(rest)) * q.shape[-1]


def _attention_backward(_, q, k, v, *rest, **__) -> int:
    return 5 * 2 * _pairs(q, k, _is_causal(rest)) * q.shape[-1]


def _is_causal(arguments: tuple) -> bool:
    """Return the flag is_causal: the only boolean among the arguments of these operations, False if it is missing."""
    return next((value for value in arguments if isinstance(value, bool)), False)


def _efficient(q, k, v, bias, logarithms, dropout=0.0, causal=False, **_) -> int:
    return 2 * 2 * _pairs(q, k, causal) * q.shape[-1]


def _efficient_backward(_, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, **__) -> int:
    return 5 * 2 * _pairs(q, k, causal) * q.shape[-1]


def _packed(q, k, v, starts, _, longest, *rest, **settings) -> int:
    return 2 * 2 * _packed_pairs(q, longest, rest, settings) * q.shape[-1]


def _packed_backward(_, q, k, v, out, logarithms, starts, __, longest, *rest, **settings) -> int:
    return 5 * 2 * _packed_pairs(q, longest, rest, settings) * q.shape[-1]


def _packed_pairs(q: Tensor, longest: int, rest: tuple, settings: dict[str, Any]) -> int:
    """Return the number of query-key pairs as if all documents were as long as the longest, as in a trace: where they
    end is not in the shapes. q: [all tokens, heads, width]."""
    tokens, heads, _ = q.shape
    window = 0 if _is_causal(rest) else settings["window_size_left"] + 1
    return round(tokens * heads * mean_keys(longest, window))


def _pairs(q: Tensor, k: Tensor, causal: bool) -> int:
    """Return the number of query-key pairs, summed over batch and heads. q, k: [batch, heads, tokens, width]."""
    batch, heads, tokens, _ = q.shape
    pairs = batch * heads * tokens * k.shape[-2]
    return pairs // 2 if causal else pairs


def _grouped(a: Tensor, b: Tensor, *_, **__) -> int:
    """Return the FLOPs of a grouped product: [R, K] x [G, K, N] with the rows in G groups, or [M, R] x [R, N] with one
    product per group.
    """
    return 2 * a.shape.numel() * b.shape[-1]


_kernels = attention_kernels()
_FORMULAS: dict[Any, Callable[..., int]] = {
    _kernels.flash_on_cpu: _attention,
    _kernels.flash_on_cpu_backward: _attention_backward,
    _kernels.flash: _attention,
    _kernels.flash_backward: _attention_backward,
    _kernels.packed: _packed,
    _kernels.packed_backward: _packed_backward,
    _kernels.efficient: _efficient,
    _kernels.efficient_backward: _efficient_backward,
    grouped_product_kernel(): _grouped,
}
