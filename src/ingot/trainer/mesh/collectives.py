"""Small exchanges between ranks on the host, named by what they are for.

They run on the CPU side of the default group and end with an error after that group's timeout. Means are taken in rank
order and in float64, so a result does not depend on how values were batched into messages.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist


def any_rank(flag: bool) -> bool:
    """True on every rank if `flag` is true on at least one. Collective."""
    vote = torch.tensor([int(flag)])
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


def gather_from(ranks: Sequence[int], array: np.ndarray) -> np.ndarray:
    """`array` (floats; same shape and dtype on every rank) of these ranks, in this order: [len(ranks), ...].

    Collective, also for other ranks, whose values do not count. Each rank adds its part to zeros, which changes no
    value (-0.0 becomes 0.0), so what travels grows with `ranks` and not with the job.
    """
    parts = np.zeros((len(ranks), *array.shape), array.dtype)
    for slot, rank in enumerate(ranks):
        if rank == dist.get_rank():
            parts[slot] = array
    dist.all_reduce(torch.from_numpy(parts))  # fills `parts`, whose memory it shares
    return parts


def mean_over_ranks(values: np.ndarray, ranks: Sequence[int] | None = None) -> np.ndarray:
    """Elementwise mean of the float values of `ranks` (None: all), in float64 and in that order.

    The same bits on every rank. Collective, also for ranks whose own values do not count.
    """
    return gather_from(range(dist.get_world_size()) if ranks is None else ranks, values.astype(np.float64)).mean(axis=0)
