"""The rank whose state or gradients are damaged, and whether they will be again: decided from what each rank found."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

_STEADY = 2  # steps that every suspect computed twice with the same bits, before a difference means something


class Trust(IntEnum):
    """The sureness that a rank is the damaged one, from none to the highest."""

    NOTHING = 0
    RECOMPUTED = 1  # one of the ranks that computed the same gradients, which differ; a damaged weight has this effect
    UNDECIDED = 2  # its copy differs from others, of which no majority is equal
    RECOMPUTED_ALONE = 3  # gradients that it computed differ, and it is the only rank that explains all differences
    MINORITY = 4  # its copy differs from most others, which are equal
    OWN_HASH = 5  # its own state has another hash than when it was last written


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """The finding of a rank about itself. step: of the comparison. tensor: its name in a checkpoint, "" without one.

    element, bit: the only bit that differs, in the tensor of this rank; None if that is not known, or more differ.
    """

    trust: Trust
    step: int = 0
    tensor: str = ""
    element: int | None = None
    bit: int | None = None

    def or_worse(self, other: "Suspicion") -> "Suspicion":
        """Return the surer of two suspicions, the earlier of two that are as sure."""
        return max(self, other, key=lambda one: (one.trust, -one.step))


NOTHING = Suspicion(trust=Trust.NOTHING)


@dataclass(frozen=True)
class Damage:
    """The damaged ranks, as all ranks found together. step: of the first comparison that differed. ranks: the damaged
    ones; if `trust` is UNDECIDED, those among which the damaged one is."""

    step: int
    trust: Trust
    ranks: tuple[int, ...]

    @property
    def is_named(self) -> bool:
        """True if all of `ranks` are damaged."""
        return self.trust > Trust.UNDECIDED

    @property
    def of_gradients(self) -> bool:
        """True if gradients are damaged, and nothing is known of the state."""
        return self.trust in (Trust.RECOMPUTED, Trust.RECOMPUTED_ALONE)


def judge(rows: Sequence[tuple[Trust, int]]) -> Damage:
    """Return the damage from the trust and step that each rank found about itself, in the order of ranks.

    A damaged rank spoils the gradients of all, but changes no other rank's own hash, and copies stay as different as
    they were: only the surest suspicions count.
    """
    surest = max(trust for trust, _ in rows)
    assert surest > Trust.NOTHING, "some rank found a difference"
    ranks = tuple(rank for rank, (trust, _) in enumerate(rows) if trust is surest)
    return Damage(min(step for trust, step in rows if trust > Trust.NOTHING), surest, ranks)


@dataclass(frozen=True)
class ReplayVerdict:
    """The finding of the steps that were trained again. "persistent": `ranks` are damaged again. "other": others are,
    so that nothing is known of the first damage. ranks: as in Damage, is_named too."""

    verdict: Literal["transient", "persistent", "other"]
    ranks: tuple[int, ...]
    is_named: bool


def ended(damage: Damage, changed: Sequence[bool], first: Sequence[int] = ()) -> ReplayVerdict:
    """Return the verdict after the steps were trained again without damage.

    changed: for each rank, whether its hash at the step of the damage is another one now. Of two copies, the damaged
    one is that which changed. If both did, the damaged one had spoiled the gradients of the other before: then it is
    the one whose own gradients changed first. first: for each rank, the step of that, 0 if none is known.
    """
    ranks = damage.ranks if damage.is_named else _only(damage.ranks, changed, first)
    return ReplayVerdict("transient", ranks, damage.is_named or ranks != damage.ranks)


def repeated(damage: Damage, again: Damage, changed: Sequence[bool], first: Sequence[int] = ()) -> ReplayVerdict:
    """Return the verdict on `damage` when there was damage `again` in the steps that were trained again.

    changed, first: as for `ended`, if that step was reached. A sound rank has the same hashes each time.
    """
    ranks = tuple(sorted(set(damage.ranks) & set(again.ranks)))
    if not ranks:
        return ReplayVerdict("other", again.ranks, again.is_named)
    if damage.is_named or again.is_named:
        return ReplayVerdict("persistent", ranks, True)
    left = _only(ranks, changed if again.step == damage.step else [False] * len(changed), first)
    return ReplayVerdict("persistent", left, len(left) == 1 or left != ranks)


class OwnGradients(NamedTuple):
    """The samples of a rank's own gradients in steps that were trained again. first: the first step that had another
    one before; 0: none had. sound: the last step before the damage with equal copies. equal: how many steps before
    `first` had the same sample."""

    first: int = 0
    sound: int = 0
    equal: int = 0


def firsts(each: Sequence[OwnGradients], suspects: Sequence[int]) -> list[int]:
    """Return for each rank the first step whose own gradients changed; 0 for all if this run may not compute the same
    bits twice: the gradients of a sound step changed, or no suspect computed some steps with the same bits again.

    Every save compares copies, so damage that is found by the first comparison after the newest checkpoint has no sound
    step that is trained again. Steps before the first change are as good: kernels without a fixed order of sums would
    have changed their bits, too.
    """
    is_steady = all(not one.first or one.first > one.sound for one in each)
    is_steady = is_steady and all(each[rank].equal >= _STEADY for rank in suspects)
    return [one.first if is_steady else 0 for one in each]


def _only(ranks: tuple[int, ...], changed: Sequence[bool], first: Sequence[int] = ()) -> tuple[int, ...]:
    """Return those of `ranks` whose gradients changed first. If that is none of them or all of them: those that
    changed, or all of them if none did. Ranks of one copy of the model change together, because a wrong activation of
    one of them reaches the others."""
    steps = {rank: first[rank] for rank in ranks if first and first[rank]}
    earliest = tuple(rank for rank, step in steps.items() if step == min(steps.values()))
    if 0 < len(earliest) < len(ranks):
        return earliest
    return tuple(rank for rank in ranks if changed[rank]) or ranks


def doubted(opinions: Mapping[int, int]) -> frozenset[int]:
    """Return the ranks whose hash of the same gradients is not that of most: all of them if there is no majority.

    opinions: rank -> its hash.
    """
    ((most, count), *others) = Counter(opinions.values()).most_common()
    if not others:
        return frozenset()
    has_majority = 2 * count > len(opinions)
    return frozenset(rank for rank, found in opinions.items() if not has_majority or found != most)


def explained(doubts: Sequence[frozenset[int]]) -> tuple[frozenset[int], bool]:
    """Return the ranks that explain several differences, and whether they are all damaged, or one of them is.

    doubts: for each difference the ranks of which at least one is damaged; at least one difference. A rank that is
    doubted alone is damaged. Without such a rank, one that is doubted in every one of several differences is.
    """
    if alone := frozenset[int]().union(*(ranks for ranks in doubts if len(ranks) == 1)):
        return alone, True
    common = frozenset.intersection(*doubts)
    return (common, len(common) == 1) if common else (frozenset[int]().union(*doubts), False)
