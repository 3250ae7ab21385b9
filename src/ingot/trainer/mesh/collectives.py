"""Collectives between ranks, by what they do: small exchanges of host values, and exchanges of tensors on the device.

`any_rank`, `largest_of_ranks`, `gather_from`, `sum_over_ranks` and `mean_over_ranks` run on the CPU side of the default
group and fail after its timeout. Means are computed in rank order and in float64, so a result does not depend on how
values were batched into messages. `gather`, `scatter_sum` and `all_sum` return new tensors; a compiler can see these
operators and overlap them. `begin_gather`, `begin_scatter_sum` and `start_all_to_all` are such operators, too, that do
not wait for their results.
`start_gather`, `start_scatter_sum` and `start_all_sum` work on existing buffers and return at once; call `wait` on the
returned Work before using the buffers.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ingot.trainer.mesh import waiting
from ingot.trainer.torch_private import functional_collectives

_operators = functional_collectives()
# These names are new in torch 2.12, where the old names warn.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_reduce = dist.all_reduce  # without the clock's own report, see waiting.py
_Handle = TypeVar("_Handle")


# -- values on the host --


def any_rank(flag: bool) -> bool:
    """Return True on every rank if `flag` is true on at least one rank. Collective."""
    vote = torch.tensor([int(flag)])
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


def largest_of_ranks(*values: float) -> tuple[float, ...]:
    """Return on every rank the largest value of any rank, for each of `values`. Collective."""
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return tuple(largest.tolist())


def gather_from(ranks: Sequence[int], array: np.ndarray) -> np.ndarray:
    """Return the arrays of `ranks`, in this order: [len(ranks), ...].

    array: floats, with the same shape and dtype on every rank. Collective over all ranks; the values of ranks that are
    not in `ranks` do not count. Each rank adds its part to zeros, which changes no value (-0.0 becomes 0.0), so the
    traffic grows with `ranks` and not with the job.
    """
    parts = np.zeros((len(ranks), *array.shape), array.dtype)
    for slot, rank in enumerate(ranks):
        if rank == dist.get_rank():
            parts[slot] = array
    dist.all_reduce(torch.from_numpy(parts))  # fills `parts`, which shares its memory
    return parts


def sum_over_ranks(values: np.ndarray) -> np.ndarray:
    """Return the elementwise sum of the float64 values of all ranks. Collective. Its bits depend on the layout."""
    total = np.array(values, np.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(torch.from_numpy(total))  # fills `total`, which shares its memory
    return total


def mean_over_ranks(values: np.ndarray, ranks: Sequence[int] | None = None) -> np.ndarray:
    """Return the elementwise mean of the float values of `ranks` (None: all ranks), in float64 and in this order.

    Every rank gets the same bits. Collective over all ranks; the values of ranks that are not in `ranks` do not count.
    """
    return gather_from(range(dist.get_world_size()) if ranks is None else ranks, values.astype(np.float64)).mean(axis=0)


# -- tensors on the device --


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, concatenated along `dim` in rank order."""
    ranks, parts = group.size(), finish(begin_gather(x, group))
    if math.prod(x.shape[:dim]) == 1:  # concatenated already
        return parts.view(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])
    return torch.cat(parts.chunk(ranks, dim=0), dim=dim)


def scatter_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sum of `x` over ranks; the sum is divided along `dim`, in rank order."""
    ranks = group.size()
    shape = (*x.shape[:dim], x.shape[dim] // ranks, *x.shape[dim + 1 :])
    if math.prod(x.shape[:dim]) == 1:  # rank by rank already
        parts = x.contiguous().view(x.shape[dim:])
    else:
        parts = torch.cat(x.chunk(ranks, dim=dim), dim=0)
    return finish(begin_scatter_sum(parts, group)).view(shape)


def begin_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Start to gather the tensors of all ranks, concatenated along the first dim in rank order. Call `finish` before
    reading them; `x` may be freed at once."""
    return _begun(_operators.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name), group)


def begin_scatter_sum(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Start to sum `parts` over ranks; the first dim has one equal part for each rank. Returns this rank's part of the
    sum. Call `finish` before reading it; `parts` may be freed at once."""
    return _begun(_operators.reduce_scatter_tensor(parts.contiguous(), "sum", group.size(), group.group_name), group)


def all_sum(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """Return the sum of `x` over ranks (or its "max" or "min"), on all ranks."""
    return finish(_begun(_operators.all_reduce(x.contiguous(), op, group.group_name), group))


def start_all_to_all(rows: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Start an exchange of rows: the first sent[0] rows go to rank 0, the next sent[1] rows to rank 1, and so on.

    Returns the rows that arrive, received[r] from rank r, in rank order. Call `finish` before reading them; `rows` may
    be freed at once.
    """
    arriving = _operators.all_to_all_single(rows.contiguous(), list(received), list(sent), group.group_name)
    return _begun(arriving, group)


def finish(x: Tensor) -> Tensor:
    """Wait until the tensor of a started collective has arrived, and return it."""
    if torch.compiler.is_compiling() or waiting.running is None:
        return _operators.wait_tensor(x)
    return waiting.running.time(_operators.wait_tensor, x)


def start_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to fill `whole` with `own` of all ranks, in rank order: one equal part of its first dim for each rank."""
    return started(_gather_into(whole.view(-1), own.view(-1), group=group, async_op=True), group)


def scatter_into(own: Tensor, whole: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
    """Reduce `whole` over the ranks and write this rank's part of the result into `own`."""
    _call(_scatter_into, own, whole, group=group, op=op)


def start_scatter_sum(own: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to fill `own` with this rank's part of the sum of `whole` over ranks."""
    return started(_scatter_into(own.view(-1), whole.view(-1), group=group, async_op=True), group)


def start_all_sum(x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the sum of `x` over ranks, in place. Call `wait` on the result before using `x`."""
    return started(_all_reduce(x, group=group, async_op=True), group)


def all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the parts from all ranks, in rank order; part r of the first dim of `parts` goes to rank r."""
    parts = parts.contiguous()
    found = torch.empty_like(parts)
    _call(dist.all_to_all_single, found, parts, group=group)
    return found


def sum_in_place(x: Tensor, group: dist.ProcessGroup) -> None:
    """Replace `x` by its sum over ranks."""
    _call(_all_reduce, x, group=group)


def started(work: dist.Work | None, group: dist.ProcessGroup, *, message: bool = False) -> dist.Work:
    """Return `work`, an exchange in `group` that began now. message: of two ranks, whose end only a wait shows."""
    assert work is not None  # None is for ranks outside the group
    if waiting.running is not None:
        waiting.running.begun(work, group, shows_end=not message)
    return work


def _call(function: Callable[..., object], *args: Tensor, **kwargs) -> None:
    """Call a collective of torch that waits for its end."""
    if waiting.running is None:
        function(*args, **kwargs)
    else:
        waiting.running.call(function, *args, **kwargs)


def _begun(arriving: _Handle, group: dist.ProcessGroup) -> _Handle:
    """Return the tensor of a collective that began now."""
    if not torch.compiler.is_compiling() and waiting.running is not None:
        waiting.running.begun(arriving, group, shows_end=False)
    return arriving
