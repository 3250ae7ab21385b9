"""The judgment of the machines of a fleet: each against the median of the others. No torch.

A machine that computes wrong is bad whatever its speed. One that is slow is bad below a share of the median: 0.75 for
computation and memory (the threshold of NVIDIA's resiliency extension for slow ranks), half for disks and links, which
others use too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ingot.units import format_bytes, format_flops

SHARES = {"matmul": 0.75, "memory": 0.75, "disk": 0.5, "link": 0.5}
UNITS = {"matmul": "FLOP/s", "memory": "B/s", "disk": "B/s", "link": "B/s"}
NO_LINK = "no sum over its links with other machines was completed"
CLOCK_SECONDS = 1.0  # a clock that differs by more confuses people and caches; ingot itself needs none


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of a machine. rates: by name of SHARES, per second. wrong: by the same names, how many results
    differed from what they have to be. clock: how far its clock is ahead of the leader's, in seconds."""

    node: str
    rates: dict[str, float]
    wrong: dict[str, int]
    clock: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Unfit:
    """A machine that should not train, and why. slow: it is slower than the others, not wrong."""

    node: str
    check: str
    words: str
    slow: bool = False


def judge(fleet: Sequence[Measured]) -> list[Unfit]:
    """Return what is wrong with which machines. Their `link` is left out: see `judge_links`."""
    found = []
    for one in fleet:
        others = [other for other in fleet if other is not one]
        for check, count in one.wrong.items():
            if count:
                found.append(Unfit(node=one.node, check=check, words=f"{count} wrong results"))
        for check, share in SHARES.items():
            values = [other.rates[check] for other in others if check in other.rates]
            if check == "link" or check not in one.rates or not values:
                continue
            typical = median(values)
            if one.rates[check] < share * typical:
                found.append(
                    Unfit(node=one.node, check=check, words=_slow(check, one.rates[check], typical), slow=True)
                )
        # Not the median of the others: with two of them, it is as far from a right one as from a wrong one.
        apart = sorted((one.clock - other.clock for other in others), key=abs)
        if apart and abs(ahead := apart[(len(apart) - 1) // 2]) > CLOCK_SECONDS:
            found.append(Unfit(node=one.node, check="clock", words=f"{ahead:+.1f} s from most of the others"))
    return found


def first_pairs(nodes: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of the first round; of an odd number, one machine is in two pairs."""
    return _pairs(list(nodes))


def second_pairs(nodes: Sequence[str], first: Mapping[tuple[str, str], float]) -> list[tuple[str, str]]:
    """Return the pairs of the second round: each machine of a slow pair with one of a fast pair, so that a bad machine
    is slow in both rounds, and its first partner is not. first: rate of each pair of the first round."""
    if len(nodes) < 4:
        return list(pairwise(nodes))[1:]  # of three machines, the pair that is left
    slowest = {node: min(rate for pair, rate in first.items() if node in pair) for node in nodes}
    ordered = sorted(nodes, key=lambda node: (slowest[node], node))
    half = len(ordered) // 2
    slow, fast, known = ordered[:half], ordered[half : 2 * half], {frozenset(pair) for pair in first}
    turned = [list(zip(slow, fast[turn:] + fast[:turn], strict=True)) for turn in range(half)]
    chosen = min(turned, key=lambda pairs: sum(frozenset(pair) in known for pair in pairs))
    return _pairs([node for pair in chosen for node in pair] + ordered[2 * half :])


def _pairs(nodes: list[str]) -> list[tuple[str, str]]:
    pairs = list(pairwise(nodes))[::2]
    if len(nodes) % 2 and len(nodes) > 1:
        pairs.append((nodes[-1], nodes[0]))
    return pairs


def judge_links(rounds: Sequence[Mapping[tuple[str, str], float]]) -> list[Unfit]:
    """Return the machines whose links are slow: even the best of a machine, compared with the best ones of the others.
    rounds: rate of each pair, by round.

    With two machines there is one pair, and no way to decide which of both is slow: neither is named. If no sum came
    over their link, both are: they cannot train together.
    """
    nodes, share = sorted({node for one in rounds for pair in one for node in pair}), SHARES["link"]
    best, found = {node: best_link(rounds, node) for node in nodes}, []
    for node, rate in best.items():
        typical = median(theirs for other, theirs in best.items() if other != node)
        if rate == 0:
            found.append(Unfit(node=node, check="link", words=NO_LINK))
            continue
        if rate < share * typical:
            found.append(Unfit(node=node, check="link", words=_slow("link", rate, typical), slow=True))
    return found


def best_link(rounds: Sequence[Mapping[tuple[str, str], float]], node: str) -> float:
    """Return the rate of the fastest pair of a machine; 0 if it was in none."""
    return max((rate for one in rounds for pair, rate in one.items() if node in pair), default=0.0)


def rate_text(check: str, rate: float) -> str:
    """Return the rate of a check for people: "62.3 GFLOP/s"."""
    return f"{(format_flops if check == 'matmul' else format_bytes)(rate)}/s"


def _slow(check: str, rate: float, typical: float) -> str:
    return (
        f"{rate_text(check, rate)}, {rate / typical:.1%} of {rate_text(check, typical)}, the median of the others; the "
        f"limit is {SHARES[check]:.0%}"
    )
