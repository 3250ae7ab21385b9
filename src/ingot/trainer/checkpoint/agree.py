"""One result for all ranks: every rank gets the result of rank 0, or the error that a rank raised.

Values and errors travel as bytes (message.py) in uint8 tensors, and nothing that comes from the network is unpickled.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from ingot.errors import IngotError, ResourceError
from ingot.trainer.checkpoint.message import RankError, as_error, as_value, pack_json, read_message, unpack_json

T = TypeVar("T")
P = TypeVar("P")

MAX_RESULT_BYTES = 1 << 30  # the manifest of 16,384 ranks has 20 MB
MAX_PART_BYTES = 64 << 20  # rank 0 holds one part per rank; a rank of a 405B model sends 3 KB
_LENGTH_BYTES = 8


def rank() -> int:
    """Return this process's global rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def from_rank_zero(
    find: Callable[[], T],
    pack: Callable[[T], bytes] = pack_json,
    unpack: Callable[[bytes], T] = unpack_json,
    group: dist.ProcessGroup | None = None,
) -> T:
    """Call `find()` on rank 0 and return its result on every rank, or raise its error on every rank. Collective.

    An IngotError, OSError or ValueError is raised as such, any other error as a RankError that names it. pack, unpack:
    turn the result into bytes and back; by default JSON, in which a tuple arrives as a list. group: all ranks, by
    default the world group; a thread beside the training thread needs a group of its own.
    """
    if not dist.is_initialized():
        return find()
    if dist.get_rank() != 0:
        return read_message(_broadcast(b"", group), unpack)
    try:
        result, failure = find(), None
        answer = as_value(pack(result))
    except Exception as error:
        result, failure = None, portable(error)
        answer = as_error(failure)
    _broadcast(answer, group)
    if failure is not None:
        raise failure
    return result  # pyright: ignore[reportReturnType]


def from_all_ranks(
    part: Callable[[], P],
    combine: Callable[[list[P]], T],
    pack: Callable[[P], bytes] = pack_json,
    unpack: Callable[[bytes], P] = unpack_json,
    group: dist.ProcessGroup | None = None,
) -> T:
    """Call `part` on every rank and `combine` on rank 0 with the list of results; return its result on every rank.

    The list is in rank order. An error of `combine`, or of `part` on any rank (the lowest rank if several raise), is
    raised on every rank. pack, unpack: turn the result of `part` into bytes and back, by default JSON; the result of
    `combine` is always sent as JSON. group: see `from_rank_zero`. Collective.
    """
    if not dist.is_initialized():
        return combine([part()])
    cause = None
    try:
        own = as_value(pack(part()))
    except Exception as error:
        own, cause = as_error(portable(error)), error
    parts = _gather(own, group)
    try:
        return from_rank_zero(lambda: combine([read_message(one, unpack) for one in parts]), group=group)
    except Exception as error:
        if cause is None:
            raise
        raise error from cause  # keeps this rank's own traceback


def on_all_ranks(part: Callable[[], P]) -> P:
    """Call `part` on every rank and return this rank's result. An error on any rank is raised on all. Collective."""
    results: list[P] = []
    from_all_ranks(lambda: results.append(part()), lambda _: None)
    return results[0]


def portable(error: Exception) -> Exception:
    """Return the error itself if other ranks can rebuild and handle it, otherwise a RankError with its message."""
    if isinstance(error, IngotError | OSError | ValueError | RankError):
        return error
    return RankError(f"rank {rank()}: {type(error).__name__}: {error}")


def _broadcast(message: bytes, group: dist.ProcessGroup | None) -> bytes:
    """Return the message of rank 0 on every rank. Raises ResourceError on every rank if it is too large."""
    length = torch.tensor([len(message)])
    dist.broadcast(length, src=0, group=group)
    size = int(length.item())
    _check_size(size, MAX_RESULT_BYTES)
    data = _tensor(message) if dist.get_rank() == 0 else torch.empty(size, dtype=torch.uint8)
    dist.broadcast(data, src=0, group=group)
    return data.numpy().tobytes()


def _gather(message: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the messages of all ranks on rank 0, and nothing on others. Raises ResourceError on every rank if one is
    too large."""
    longest = torch.tensor([len(message)])
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    size = int(longest.item())
    _check_size(size, MAX_PART_BYTES)
    own = torch.zeros(_LENGTH_BYTES + size, dtype=torch.uint8)
    framed = len(message).to_bytes(_LENGTH_BYTES, "little") + message
    own[: len(framed)] = _tensor(framed)
    if dist.get_rank() != 0:
        dist.gather(own, dst=0, group=group)
        return []
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.gather(own, parts, dst=0, group=group)
    framed_parts = (part.numpy().tobytes() for part in parts)
    return [one[_LENGTH_BYTES:][: int.from_bytes(one[:_LENGTH_BYTES], "little")] for one in framed_parts]


def _tensor(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _check_size(size: int, most: int) -> None:
    if not 0 < size <= most:
        raise ResourceError(
            "E-RANKS-MESSAGE",
            f"a message between ranks has {size:,} bytes",
            rule=f"ranks send each other at most {most:,} bytes at a time",
            fix="start all ranks with the same version of ingot; if they are, please report this as a bug",
            bytes=size,
            most=most,
        )
