"""One answer for all ranks: what rank 0 finds out, or the error that any rank met, is what every rank gets."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ingot.errors import IngotError

T = TypeVar("T")
P = TypeVar("P")


class RankError(RuntimeError):
    """What another rank met, and no error of ours: its rank, kind and message."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def from_rank_zero(find: Callable[[], T]) -> T:
    """`find()` of rank 0, on every rank; what it raises is raised on every rank. Collective.

    An IngotError, OSError or ValueError comes as it is, anything else as a RankError that names it.
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
    """`combine([part() of rank 0, of rank 1, ...])`, computed on rank 0 and given to all. Collective.

    What `part` raises on any rank (of several, that of the lowest), or `combine`, is raised on every rank. What `part`
    returns travels to rank 0: small, and picklable.
    """
    if not dist.is_initialized():
        return combine([part()])
    mine: list = [None, None]
    cause = None
    try:
        mine[0] = part()
    except Exception as error:
        mine[1] = _portable(error)
        cause = error
    parts: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, parts, dst=0)

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
        raise error from cause  # this rank's own traceback is the one worth reading


def on_all_ranks(part: Callable[[], P]) -> P:
    """This rank's own `part()`; what it raises on any rank is raised on every rank. Collective."""
    results: list[P] = []
    from_all_ranks(lambda: results.append(part()), lambda _: None)
    return results[0]


def _portable(error: Exception) -> Exception:
    """The error itself if it survives the way to other ranks and says by itself what is wrong."""
    if isinstance(error, IngotError | OSError | ValueError | RankError):
        return error
    return RankError(f"rank {rank()}: {type(error).__name__}: {error}")
