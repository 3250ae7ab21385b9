"""A rank of a job without the job: a fake process group, whose collectives return at once and exchange nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ingot.trainer.torch_private import count_group_name, fake_store


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    """Be rank `rank` of `world` ranks inside the context. The process must not have a process group."""
    original = dist.new_group
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world)
    try:
        dist.new_group = own_groups_only(original, rank)
        yield
    finally:
        dist.new_group = original
        dist.destroy_process_group()


def own_groups_only(original: Callable, rank: int) -> Callable:
    """Return a replacement for `dist.new_group` that creates only groups that contain `rank`. For each of the thousands
    of other groups, the replacement only advances the counter of group names.
    """

    def new_group(ranks: list[int], *args, **kwargs):
        if rank in ranks:
            return original(ranks, *args, **kwargs)
        count_group_name(ranks)
        return dist.GroupMember.NON_GROUP_MEMBER

    return new_group
