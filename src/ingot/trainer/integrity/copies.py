"""The ranks that have copies of the same tensors: along which axes of the mesh, and the exchange of hashes with them.

Tensors with the same name and place in the whole parameter are copies. Ranks that differ on one axis alone are
compared: if they agree on each axis, all copies do. Pipeline stages have different parameters; the two ends of tied
embeddings are not compared with each other, only each with its own copies.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ingot.trainer.mesh.collectives import start_gather
from ingot.trainer.mesh.mesh import AXES, Mesh

Place = tuple[str, tuple[int, ...], tuple[int, ...]]  # name, offsets, sizes
_AXES = [axis for axis in AXES if axis != "pp"]


class CopyGroup:
    """The ranks along one axis that have copies of some tensors of this rank.

    ranks: their global numbers, in order. indexes: those of the tensors in the list of this rank, in an order that is
    the same on all of `ranks`. weights: int64 [tensors of this rank], odd for these tensors and 0 for others: the sum
    of hashes times weights is the hash of all of them.
    """

    def __init__(
        self, axis: str, mesh: Mesh, keys: np.ndarray, copied: set[int], device: torch.device, link: torch.device
    ):
        self.axis, self.ranks, self._group, self._link = axis, mesh.ranks(axis), mesh.group(axis), link
        order = sorted((key, i) for i, key in enumerate(keys.tolist()) if key in copied)
        self.indexes = [i for _, i in order]
        weights = np.where(np.isin(keys, list(copied)), keys | 1, 0)
        self.weights = torch.from_numpy(weights).to(device)

    def exchange(self, values: Tensor) -> Tensor:
        """Return the int64 `values` of all ranks of the group, [ranks, *shape]. Collective over the group."""
        whole = torch.empty((len(self.ranks), *values.shape), dtype=torch.int64, device=self._link)
        start_gather(whole, values.to(self._link).contiguous(), self._group).wait()
        return whole


def copy_groups(mesh: Mesh, places: Sequence[Place], device: torch.device, link: torch.device) -> list[CopyGroup]:
    """Return a group for each axis along which this rank's tensors have copies. Collective.

    places: of the tensors of this rank, none of them empty. device: of their hashes. link: of the mesh, for exchanges.
    """
    keys = np.array([_key(place) for place in places], dtype=np.int64)
    groups = []
    for axis in _AXES:
        ranks, group = mesh.ranks(axis), mesh.group(axis)
        if len(ranks) == 1:
            continue
        # Ranks whose shards are empty have fewer tensors.
        most = torch.tensor([len(keys)], device=link)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        own = torch.zeros(int(most), dtype=torch.int64, device=link)
        own[: len(keys)] = torch.from_numpy(keys).to(link)
        whole = torch.empty(len(ranks), len(own), dtype=torch.int64, device=link)
        start_gather(whole, own, group).wait()
        copied = set.intersection(*(set(row) for row in whole.tolist())) - {0}
        if copied:
            groups.append(CopyGroup(axis, mesh, keys, copied, device, link))
    return groups


def _key(place: Place) -> int:
    digest = hashlib.sha256(repr(place).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True) or 1
