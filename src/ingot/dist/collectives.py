"""Small exchanges between ranks on the host, named by what they are for.

They run on the CPU side of the default group and end with an error after that group's timeout. Sums are taken in rank
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


def gather_array(array: np.ndarray) -> np.ndarray:
    """`array` (same shape and dtype on every rank) of all ranks, stacked by rank: [ranks, ...]. Collective."""
    mine = torch.from_numpy(np.ascontiguousarray(array))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.stack(parts).numpy()


def mean_over_ranks(values: np.ndarray, ranks: Sequence[int] | None = None) -> np.ndarray:
    """Elementwise mean of the float values of `ranks` (None: all), in float64 and in that order.

    The same bits on every rank. Collective, also for ranks whose own values do not count.
    """
    everyone = gather_array(values.astype(np.float64))
    return (everyone if ranks is None else everyone[list(ranks)]).mean(axis=0)
