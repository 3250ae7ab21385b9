"""Assumed numbers of tokens per expert, because fake tensors have no scores for routing.

All sequences are assumed to have the same loads. This module does not import torch.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from ingot.errors import ConfigError
from ingot.schema.arch import Arch, Moe


@dataclass(frozen=True)
class AssumedLoad:
    """The load of each expert. shares: each expert's share of all assignments that are kept; their sum is 1. dropped:
    share of assignments that exceed an expert's capacity. first, own: index of this rank's first expert, and number of
    experts on this rank.
    """

    shares: tuple[float, ...]
    dropped: float
    first: int
    own: int

    @classmethod
    def of(cls, moe: Moe, given: Sequence[float], ep_index: int, ep: int) -> "AssumedLoad":
        """Return the AssumedLoad of rank `ep_index` of `ep`. given: the load of each expert in any unit; empty: equal
        loads.
        """
        total = math.fsum(given)
        shares = [load / total for load in given] if given else [1 / moe.num_experts] * moe.num_experts
        if moe.capacity_factor:
            shares = [min(share, moe.capacity_factor / moe.num_experts) for share in shares]
        kept, own = math.fsum(shares), moe.num_experts // ep
        return cls(tuple(share / kept for share in shares), 1 - kept, ep_index * own, own)

    def kept(self, assignments: int) -> int:
        """Return how many of `assignments` assignments (top_k per token) are kept."""
        return round(assignments * (1 - self.dropped))

    def sent(self, rows: int) -> list[int]:
        """Return how many of `rows` rows each expert receives."""
        return _dealt(rows, self.shares)

    def coming(self, rows: int, ranks: int) -> list[int]:
        """Return the number of rows that each expert of this rank receives from each of `ranks` ranks that send `rows`
        rows: a flat list, sender by sender.
        """
        return self.sent(rows)[self.first : self.first + self.own] * ranks

    def own_parts(self, rows: int) -> list[int]:
        """Return how many of the `rows` rows that arrived at this rank belong to each of its experts."""
        mine = self.shares[self.first : self.first + self.own]
        return _dealt(rows, [share / (math.fsum(mine) or 1.0) for share in mine])


def _dealt(rows: int, shares: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `rows`, each less than 1 away from its share of `rows`."""
    ends = [round(rows * end) for end in accumulate(shares, initial=0.0)]
    ends[-1] = rows
    return [after - before for before, after in pairwise(ends)]


def read_loads(path: Path, arch: Arch) -> tuple[float, ...]:
    """Read a JSON list with the load of each expert, in any unit. Raises ConfigError."""
    if not arch.is_moe:
        raise ConfigError(
            "E-EXPERT-LOAD-DENSE",
            f"--expert-load {path} is set, but the model has no experts",
            rule="--expert-load needs a model with experts (model.moe.num_experts of at least 2)",
            fix="remove --expert-load",
        )
    experts = arch.moe.num_experts
    rule = f"the file is a JSON list of {experts} numbers, the load of each expert in any unit"
    fix = "give such a file, or --expert-load balanced"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("E-EXPERT-LOAD-FILE", f"--expert-load {path}: {error}", rule=rule, fix=fix) from error
    numbers = isinstance(found, list) and all(isinstance(load, (int, float)) and load >= 0 for load in found)
    if not numbers or len(found) != experts or not 0 < math.fsum(found) < math.inf:
        what = f" (the list has {len(found)} numbers)" if numbers else ""
        text = f"--expert-load {path}: not a list of {experts} non-negative numbers with a positive sum{what}"
        raise ConfigError("E-EXPERT-LOAD-FILE", text, rule=rule, fix=fix, path=str(path), experts=experts)
    return tuple(float(load) for load in found)
