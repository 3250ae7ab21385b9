"""One result for all ranks: every rank gets the result of rank 0, or the error that a rank raised."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ingot.errors import IngotError

T = TypeVar("T")
P = TypeVar("P")


class RankError(RuntimeError):
    """An error of another rank that is not an IngotError: its rank, class and message."""


def rank() -> int:
    """Return this process's global rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def from_rank_zero(find: Callable[[], T]) -> T:
    """Call `find()` on rank 0 and return its result on every rank, or raise its error on every rank. Collective.

    An IngotError, OSError or ValueError is raised unchanged, any other error as a RankError that names it.
    """
    if not dist.is_initialized():
        return find()
    answer: list = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = find()
        except Exception as error:
            answer[1] = _portable(error)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def from_all_ranks(part: Callable[[], P], combine: Callable[[list[P]], T]) -> T:
    """Call `part` on every rank and `combine` on rank 0 with the list of results; return its result on every rank.

    The list is in rank order. An error of `combine`, or of `part` on any rank (the lowest rank if several raise), is
    raised on every rank. The results of `part` are sent to rank 0, so they must be small and picklable. Collective.
    """
    if not dist.is_initialized():
        return combine([part()])
    own: list = [None, None]
    cause = None
    try:
        own[0] = part()
    except Exception as error:
        own[1] = _portable(error)
        cause = error
    parts: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, parts, dst=0)

    def on_rank_zero() -> T:
        for _, error in parts or []:
            if error is not None:
                raise error
        return combine([value for value, _ in parts or []])

    try:
        return from_rank_zero(on_rank_zero)
    except Exception as error:
        if cause is None:
            raise
        raise error from cause  # keeps this rank's own traceback


def on_all_ranks(part: Callable[[], P]) -> P:
    """Call `part` on every rank and return this rank's result. An error on any rank is raised on all. Collective."""
    results: list[P] = []
    from_all_ranks(lambda: results.append(part()), lambda _: None)
    return results[0]


def _portable(error: Exception) -> Exception:
    """Return the error itself if other ranks can unpickle and handle it, otherwise a RankError with its message."""
    if isinstance(error, IngotError | OSError | ValueError | RankError):
        return error
    return RankError(f"rank {rank()}: {type(error).__name__}: {error}")
