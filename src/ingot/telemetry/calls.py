"""Collectives as they pass the dispatcher, in the terms of theory/rendezvous.py; and FLOPs that PyTorch does not count.

Two families: `c10d::*` work in place and belong to torch.distributed's functions; `_c10d_functional::*` return new
tensors and belong to torch.distributed._functional_collectives.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import register_flop_formula

from ingot.theory.rendezvous import BARRIER, RECV, SEND, Call

# name in the dispatcher -> (our name, which side holds the whole tensor)
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
    """The call that `func` makes; None for a wait. Raises NotImplementedError for a collective not known here."""
    name = func._overloadpacket.__name__
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
    return Call(op, ranks, str(side[0].dtype).removeprefix("torch."), elements, group.group_name, peer, label)


def collective_tensors(func, args: tuple) -> Iterator[Tensor]:
    """Buffers that `func` writes or reads in place for gathering and scattering."""
    if func.namespace == "c10d" and func._overloadpacket.__name__ in ("_allgather_base_", "_reduce_scatter_base_"):
        yield from (arg for arg in args if isinstance(arg, Tensor))


def _group(args: tuple, kwargs: dict[str, Any]) -> dist.ProcessGroup:
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
        if isinstance(arg, dist.ProcessGroup):
            return arg
    names = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str)]
    return _resolve_process_group(names[-1])  # type: ignore[arg-type]  # the reduction comes before the group


def _sides(func, args: tuple, result) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that go in and those that come out."""

    def tensors(tree) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

    if func.namespace != "c10d":
        return tensors(args[0]), tensors(result)
    if func._overloadpacket.__name__ in _OUTPUT_FIRST:
        return tensors(args[1]), tensors(args[0])
    return tensors(args[0]), tensors(args[0])


# torch counts no FLOPs for attention on a CPU, without a word. As it does for the other kernels, all of T x S counts,
# the masked half included: 2 products forward, 5 backward (the scores are computed again).
@register_flop_formula([torch.ops.aten._scaled_dot_product_flash_attention_for_cpu])
def _attention_flops(q_shape, k_shape, *_, **__) -> int:
    return 2 * 2 * _scores(q_shape, k_shape) * q_shape[-1]


@register_flop_formula([torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward])
def _attention_backward_flops(_, q_shape, k_shape, *__, **___) -> int:
    return 5 * 2 * _scores(q_shape, k_shape) * q_shape[-1]


def _scores(q_shape, k_shape) -> int:
    batch, heads, tokens, _ = q_shape
    return batch * heads * tokens * k_shape[-2]
