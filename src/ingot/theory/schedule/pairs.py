"""The order and the time of a forward and a backward that run together (DualPipe's F&B).

Both consist of parts of computation with all-to-alls of experts between them: attention, rows to the experts, experts,
results back (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, and github.com/deepseek-ai/DualPipe). The two take
turns: where one waits for an exchange, the other computes its next part. parallel/turns.py plays the same order.

With computation C, exchanges X and all exchanges shorter than the parts beside them, the pair takes C_F + C_B plus the
exchanges that have no part beside them, instead of C_F + X_F + C_B + X_B.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chain:
    """A forward or backward of one stage: parts of computation, and an exchange after each part but the last.

    computes, exchanges: their times, in one unit; there is one part more than there are exchanges.
    """

    computes: Sequence[float]
    exchanges: Sequence[float]

    def __post_init__(self) -> None:
        assert len(self.computes) == len(self.exchanges) + 1

    @property
    def seconds(self) -> float:
        """The time of the chain alone: it waits for every exchange."""
        return sum(self.computes) + sum(self.exchanges)


def turns(forward: int, backward: int) -> Iterator[tuple[int, int]]:
    """Yield (0 for the forward or 1 for the backward, number of its part) in the order in which the parts compute.

    forward, backward: their numbers of exchanges. The forward begins, and each turn ends at an exchange. When one of
    the two has ended, the other has all further turns.
    """
    ends, done = (forward + 1, backward + 1), [0, 0]
    side = 0
    while done[0] < ends[0] or done[1] < ends[1]:
        yield side, done[side]
        done[side] += 1
        if done[1 - side] < ends[1 - side]:
            side = 1 - side


def pair_seconds(forward: Chain, backward: Chain) -> float:
    """Return the time of the pair, F&B: one part computes at a time, and one exchange uses the link at a time."""
    chains, arrived = (forward, backward), [0.0, 0.0]
    now = link = 0.0
    for side, part in turns(len(forward.exchanges), len(backward.exchanges)):
        now = max(now, arrived[side]) + chains[side].computes[part]
        if part < len(chains[side].exchanges):
            link = max(link, now) + chains[side].exchanges[part]
            arrived[side] = link
    return now
