"""One answer for all ranks: what rank 0 finds out, or the error that any rank met, is what every rank gets."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ingot.errors import CheckpointError, IngotError

T = TypeVar("T")


def from_rank_zero(find: Callable[[], T]) -> T:
    """`find()` of rank 0, on every rank. An IngotError, OSError or ValueError is raised on every rank. Collective."""
    if not dist.is_initialized():
        return find()
    answer: list = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = find()
        except (IngotError, OSError, ValueError) as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def first_error(check: Callable[[], None]) -> IngotError | None:
    """Run `check` on every rank; the IngotError of the lowest rank that met one, the same on every rank. Collective."""
    mine: IngotError | None = None
    try:
        check()
    except IngotError as error:
        mine = error
    if not dist.is_initialized():
        return mine
    errors: list[IngotError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine)
    return next((e for e in errors if e), None)


@contextlib.contextmanager
def planned_together() -> Iterator[None]:
    """Around a save or load of PyTorch's planners: the reason for a failure is raised itself, on every rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is a job, too
        try:
            yield
        except CheckpointException as error:
            _raise_first(error)


def _raise_first(error: CheckpointException) -> NoReturn:
    failures = sorted(error.failures.items())
    reasons = [wrapped[0] for _, wrapped in failures]
    for reason in reasons:
        if isinstance(reason, IngotError):
            raise reason from None
    rank, reason = failures[0][0], reasons[0]
    raise CheckpointError(f"rank {rank}: {type(reason).__name__}: {reason}") from error
