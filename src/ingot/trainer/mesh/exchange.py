"""Collectives on the device, named by what they do; one name for all supported versions of PyTorch.

`gather`, `scatter_sum` and `all_sum` return new tensors and are operators that a compiler can see and overlap.
`start_all_to_all` is one, too, but does not wait for its result. `start_gather` and `start_scatter_sum` fill buffers
that are there and return at once.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_operators = torch.ops._c10d_functional
# New names since 2.12; the old ones warn there.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks side by side along `dim`, in rank order."""
    ranks = group.size()
    parts = _operators.wait_tensor(_operators.all_gather_into_tensor(x.contiguous(), ranks, group.group_name))
    if math.prod(x.shape[:dim]) == 1:  # side by side already
        return parts.view(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])
    return torch.cat(parts.chunk(ranks, dim=0), dim=dim)


def scatter_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, of which each gets its part along `dim`."""
    ranks = group.size()
    shape = (*x.shape[:dim], x.shape[dim] // ranks, *x.shape[dim + 1 :])
    if math.prod(x.shape[:dim]) == 1:  # rank by rank already
        parts = x.contiguous().view(x.shape[dim:])
    else:
        parts = torch.cat(x.chunk(ranks, dim=dim), dim=0)
    return _operators.wait_tensor(_operators.reduce_scatter_tensor(parts, "sum", ranks, group.group_name)).view(shape)


def all_sum(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """The sum over ranks (or "max", "min"), on all of them."""
    return _operators.wait_tensor(_operators.all_reduce(x.contiguous(), op, group.group_name))


def start_all_to_all(rows: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The first sent[0] of these rows go to rank 0, the next sent[1] to rank 1..; received[r] come from rank r, and lie
    in the order of the ranks in what is returned. `finish` it before it is looked at; `rows` may go at once."""
    return _operators.all_to_all_single(rows.contiguous(), list(received), list(sent), group.group_name)


def finish(x: Tensor) -> Tensor:
    """Wait for what was started. Nothing happens to a tensor that has come."""
    return _operators.wait_tensor(x)


def start_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Fill `whole` with the `own` of all ranks in rank order; its first dim has as many equal parts as ranks."""
    return _started(_gather_into(whole.view(-1), own.view(-1), group=group, async_op=True))


def start_scatter_sum(own: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Fill `own` with this rank's part of the sum of `whole` over ranks."""
    return _started(_scatter_into(own.view(-1), whole.view(-1), group=group, async_op=True))


def start_all_sum(x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Sum `x` over ranks, in place."""
    return _started(dist.all_reduce(x, group=group, async_op=True))


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None is for ranks outside of the group
    return work
