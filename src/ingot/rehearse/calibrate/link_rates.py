"""How fast collectives of this machine's ranks are by themselves: latency and bandwidth of the trainer's own calls.

Several kinds and sizes are timed, and the two figures fitted to them by the formulas that the planner divides by
(planner/collectives.py), so that what a call costs besides the bytes (the library, its threads) is in them.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from ingot.planner.predict.time.collectives import SECONDS, Group
from ingot.trainer.mesh.exchange import all_sum, gather, scatter_sum

# Hidden states and gradients of models that CPUs train.
_SIZES = (1 << 13, 1 << 17, 1 << 20, 1 << 22)
_REPEATS = 5


def measure_links(device: torch.device) -> dict[str, float]:
    """link_bandwidth (bytes/s), link_seconds; nothing with a single rank. Collective."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return {}
    group = dist.group.WORLD
    assert group is not None
    rows, seconds = [], []
    for size in _SIZES:
        whole = torch.zeros(size // 4 // ranks * ranks, device=device)
        part = whole.chunk(ranks)[dist.get_rank()].clone()
        calls: dict[str, Callable[[], object]] = {
            "all_gather": lambda part=part: gather(part, 0, group),
            "reduce_scatter": lambda whole=whole: scatter_sum(whole, 0, group),
            "all_reduce": lambda whole=whole: all_sum(whole, group),
            "send": lambda whole=whole: _pass_round(whole),
        }
        for kind, call in calls.items():
            rows.append(features(kind, ranks, whole.numel() * 4))
            seconds.append(_fastest_seconds(call))
    return fitted_links(np.array(rows), np.array(seconds))


def features(kind: str, ranks: int, size: float) -> list[float]:
    """Bytes over the link and hops of one operation on `size` bytes: its formula, taken apart."""
    alone = Group(ranks, ranks, link=1.0)
    sent = SECONDS[kind](alone, size)
    hops = SECONDS[kind](Group(ranks, ranks, link=1.0, link_seconds=1.0), size) - sent
    return [sent, hops]


def fitted_links(rows: np.ndarray, seconds: np.ndarray) -> dict[str, float]:
    """The least sum of squared relative errors; where that asks for less than nothing, from two of the timings."""
    scaled = rows / seconds[:, None]
    per_byte, per_hop = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)[0]
    if per_byte <= 0 or per_hop <= 0:  # timings that scatter: the most bytes are all bandwidth, the least all latency
        large, small = rows[:, 0].argmax(), rows[:, 0].argmin()
        per_byte, per_hop = seconds[large] / rows[large, 0], seconds[small] / rows[small, 1]
    return {"link_bandwidth": float(1 / per_byte), "link_seconds": float(per_hop)}


def _pass_round(tensor: torch.Tensor) -> None:
    """To the next rank, and from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    arriving = dist.irecv(torch.empty_like(tensor), (rank - 1) % ranks)
    leaving = dist.isend(tensor, (rank + 1) % ranks)
    for work in (arriving, leaving):
        assert work is not None
        work.wait()


def _fastest_seconds(call: Callable[[], object]) -> float:
    """After one call that connects. What disturbs a call makes it longer, never shorter."""
    call()
    taken = []
    for _ in range(_REPEATS):
        dist.barrier()
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)
