"""The collectives that the ranks of a hung job are in, and what they show about its cause. No torch.

Each rank reports its newest collectives (torch_private.recorded_collectives, by way of `newest_calls`). The collectives
of a group have numbers in the order in which a rank calls them, so the calls of one number belong together: they have
to be the same operation, and each rank of the group has to come.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from ingot.config import from_dict

MOST_CALLS = 64
_OF_EACH_GROUP = 4  # a rank that called a wrong one may have called others since
# Operations whose ranks all give an input of the same size. In an all_to_all, parts may differ.
_EQUAL_INPUTS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


@dataclass(frozen=True)
class CollectiveCall:
    """A collective that a rank called. group: its name; ranks: its global ranks. number: the how manyth of the group.
    operation: "all_reduce". sizes: the shape of each input. dtype: of the inputs. finished: whether it is complete.
    purpose: the description of the group. point_to_point: a send or a receive, whose numbers are other ones.
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    dtype: str
    finished: bool
    purpose: str = ""
    point_to_point: bool = False

    @property
    def elements(self) -> int:
        return sum(prod(size) for size in self.sizes)

    def words(self) -> str:
        """The call in an error message: all_reduce [8, 8] Float, number 12 of group dp (ranks 0, 1)."""
        sizes = " ".join(str(list(size)) for size in self.sizes)
        about = " ".join(word for word in (self.operation, sizes, self.dtype) if word)
        number = "" if self.point_to_point else f", number {self.number}"
        return f"{about}{number} of group {self.purpose or self.group} (ranks {', '.join(map(str, self.ranks))})"

    def differs_from(self, other: "CollectiveCall") -> bool:
        """Return whether two calls of one group and number do not belong together."""
        if self.operation != other.operation:
            return True
        return self.operation in _EQUAL_INPUTS and (self.elements, self.dtype) != (other.elements, other.dtype)


def newest_calls(
    records: Iterable[Mapping[str, Any]], groups: Mapping[str, Sequence[int]]
) -> tuple[CollectiveCall, ...]:
    """Return the calls of flight recorder `records` (torch_private.recorded_collectives) that show where a rank is: all
    that are not complete and the newest of each group, at most MOST_CALLS, oldest first. groups: name -> ranks.
    """
    kept: list[CollectiveCall] = []
    of_group: Counter[str] = Counter()
    for record in reversed(list(records)):
        call = _call(record, groups)
        if not call.finished or (not call.point_to_point and of_group[call.group] < _OF_EACH_GROUP):
            kept.append(call)
            of_group[call.group] += not call.point_to_point
    return tuple(reversed(kept[:MOST_CALLS]))


def _call(record: Mapping[str, Any], groups: Mapping[str, Sequence[int]]) -> CollectiveCall:
    name, purpose = record["process_group"]
    return CollectiveCall(
        group=name,
        ranks=tuple(groups.get(name, ())),
        number=record["collective_seq_id"],
        operation=record["profiling_name"].partition(":")[2],
        sizes=tuple(tuple(size) for size in record["input_sizes"]),
        dtype=(record["input_dtypes"] or [""])[0],
        finished=record["retired"],
        purpose="" if purpose in ("undefined", "default_pg") else purpose,
        point_to_point=record["is_p2p"],
    )


def as_json(calls: Iterable[CollectiveCall]) -> list[dict[str, Any]]:
    return [asdict(call) for call in calls]


def from_json(values: Iterable[dict[str, Any]]) -> tuple[CollectiveCall, ...]:
    """Read what `as_json` wrote. Raises ConfigError for something else."""
    return tuple(from_dict(CollectiveCall, value) for value in values)


@dataclass(frozen=True)
class Blame:
    """The cause of a hang by its collectives. ranks: those that others wait for, or that called differently.
    mismatch: the ranks called collectives differently: a bug, which happens again. words: the evidence in one line.
    """

    ranks: tuple[int, ...]
    mismatch: bool
    words: str


def find_blame(reports: Mapping[int, Sequence[CollectiveCall] | None]) -> Blame | None:
    """Find the ranks that a hung job waits for. reports: rank -> its calls, None if it did not answer.

    Two ranks that called collectives of one number differently are a mismatch. Otherwise the ranks to blame are those
    that others wait for and that wait in no collective themselves. Ranks that wait for each other in a circle are all
    named: a collective that was begun ahead of its use does not show that its rank waits for it, so a circle is no
    proof of a wrong order. Returns None if the reports say nothing.
    """
    waiting = {rank: [call for call in calls or () if not call.finished] for rank, calls in reports.items()}
    return _mismatch(reports) or (_absent(reports, waiting) if any(waiting.values()) else None)


def _mismatch(reports: Mapping[int, Sequence[CollectiveCall] | None]) -> Blame | None:
    first: dict[tuple[str, int], tuple[int, CollectiveCall]] = {}
    for rank, calls in reports.items():
        for call in calls or ():
            if call.point_to_point:
                continue
            other, before = first.setdefault((call.group, call.number), (rank, call))
            if call.differs_from(before):
                words = f"rank {other} called {before.words()}, rank {rank} called {call.words()}"
                return Blame((other, rank), True, words)
    return None


def _absent(
    reports: Mapping[int, Sequence[CollectiveCall] | None], waiting: Mapping[int, list[CollectiveCall]]
) -> Blame | None:
    """Follow who waits for whom, from each rank that waits, to the ranks at the end of these chains."""

    def absent(call: CollectiveCall, rank: int) -> set[int]:
        return {other for other in call.ranks if other != rank and not _came(reports.get(other), call)}

    missing = {rank: {other for call in calls for other in absent(call, rank)} for rank, calls in waiting.items()}
    blamed = sorted({other for others in missing.values() for other in others if not missing.get(other)})
    waits = next((rank for rank, others in missing.items() if others & set(blamed)), None)
    if blamed and waits is not None:
        # Not the first call that is not finished: one whose ranks all came is recorded as finished a moment later.
        call = next(call for call in waiting[waits] if absent(call, waits) & set(blamed))
        who = f"rank{'s' if len(blamed) > 1 else ''} {', '.join(map(str, blamed))}"
        return Blame(tuple(blamed), False, f"rank {waits} waits for {who} in {call.words()}")
    circle = [rank for rank, others in missing.items() if others]
    if not circle:
        return None
    words = "; ".join(f"rank {rank} waits in {waiting[rank][0].words()}" for rank in circle[:4])
    return Blame(tuple(circle), False, words)


def _came(calls: Sequence[CollectiveCall] | None, call: CollectiveCall) -> bool:
    """Return whether a rank with `calls` has begun the collective `call` of another rank. Of a send or a receive, its
    neighbor's report says nothing."""
    if call.point_to_point:
        return False
    return any(c.group == call.group and not c.point_to_point and c.number >= call.number for c in calls or ())
