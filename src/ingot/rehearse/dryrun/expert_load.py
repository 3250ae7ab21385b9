"""Assumed numbers of tokens per expert, because fake tensors have no scores to route by.

Every sequence is assumed to be routed alike. This module does not import torch.
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
    """The load of each expert. shares: of all kept assignments, by expert, with sum 1; dropped: the share of
    assignments above an expert's capacity. first, own: the first expert of this rank and their number."""

    shares: tuple[float, ...]
    dropped: float
    first: int
    own: int

    @classmethod
    def of(cls, moe: Moe, given: Sequence[float], ep_index: int, ep: int) -> "AssumedLoad":
        """Return the load for `given`, the load of each expert in any unit; empty: all equal."""
        total = math.fsum(given)
        shares = [load / total for load in given] if given else [1 / moe.num_experts] * moe.num_experts
        if moe.capacity_factor:
            shares = [min(share, moe.capacity_factor / moe.num_experts) for share in shares]
        kept, own = math.fsum(shares), moe.num_experts // ep
        return cls(tuple(share / kept for share in shares), 1 - kept, ep_index * own, own)

    def kept(self, assignments: int) -> int:
        """Return how many of so many assignments are kept."""
        return round(assignments * (1 - self.dropped))

    def sent(self, rows: int) -> list[int]:
        """Return how many of `rows` rows each expert gets."""
        return _dealt(rows, self.shares)

    def coming(self, rows: int, ranks: int) -> list[int]:
        """Return the rows that each expert of this rank gets from each of `ranks` senders of `rows` rows, sender by
        sender."""
        return self.sent(rows)[self.first : self.first + self.own] * ranks

    def own_parts(self, rows: int) -> list[int]:
        """Return how many of `rows` arrived rows each expert of this rank has."""
        mine = self.shares[self.first : self.first + self.own]
        return _dealt(rows, [share / (math.fsum(mine) or 1.0) for share in mine])


def _dealt(rows: int, shares: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `rows`, each less than one away from its share."""
    ends = [round(rows * end) for end in accumulate(shares, initial=0.0)]
    ends[-1] = rows
    return [after - before for before, after in pairwise(ends)]


def read_loads(path: Path, arch: Arch) -> tuple[float, ...]:
    """Read a JSON list with the load of each expert, in any unit. Raises ConfigError."""
    if not arch.is_moe:
        raise ConfigError(
            "E-EXPERT-LOAD-DENSE",
            f"--expert-load {path} for a model without experts",
            rule="only experts have loads",
            fix="remove --expert-load",
        )
    experts = arch.moe.num_experts
    rule = f"the file holds a JSON list of {experts} numbers that are not negative, the load of each expert"
    fix = "give such a list, or `balanced`"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("E-EXPERT-LOAD-FILE", f"--expert-load {path}: {error}", rule=rule, fix=fix) from error
    numbers = isinstance(found, list) and all(isinstance(load, (int, float)) and load >= 0 for load in found)
    if not numbers or len(found) != experts or not 0 < math.fsum(found) < math.inf:
        what = f"a list of {len(found)}" if numbers else "no list of such numbers"
        text = f"--expert-load {path}: {what}, for {experts} experts"
        raise ConfigError("E-EXPERT-LOAD-FILE", text, rule=rule, fix=fix, path=str(path), experts=experts)
    return tuple(float(load) for load in found)
