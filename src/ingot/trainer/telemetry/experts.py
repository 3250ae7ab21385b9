"""How evenly tokens went to experts, layer by layer, as numbers for the log.

Shape letters: L layers with experts, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DIGITS = 3  # after the point: a log is read by people and charts, and large models have many layers


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """The facts of an `experts` event (schema/events.py).

    A load is an expert's share of a layer's assignments x E: 1 is even. steps: how many these are sums over, the last
    of them `step`. layers: their numbers; the other lists go along with it.
    load_cv: deviation of the loads, whose mean is 1. max_load, min_load: of the busiest and of the idlest expert.
    dropped, fallback: share of the assignments beyond an expert's capacity, by what becomes of them: nothing, or the
    fallback expert takes the token; the other is None, both where all are taken. entropy: nats of a token's scores, as
    probabilities; the mean. loads: [L][E], or None to keep the log small.
    """

    step: int
    steps: int
    layers: list[int]
    load_cv: list[float]
    max_load: list[float]
    min_load: list[float]
    dropped: list[float] | None
    fallback: list[float] | None
    entropy: list[float]
    loads: list[list[float]] | None


def expert_load(
    table: np.ndarray, layers: Sequence[int], *, step: int, steps: int, overflow: str, with_loads: bool
) -> ExpertLoad:
    """table: float64 [L, E + 3] as parallel/balance.py makes it, summed over `steps`. overflow: "drop" or "fallback"
    (schema/arch.py), "" where experts take all."""
    counts_LE, beyond_L, entropy_L, tokens_L = table[:, :-3], table[:, -3], table[:, -2], table[:, -1]
    assignments_L = counts_LE.sum(1)
    beyond = _short(beyond_L / assignments_L)
    loads_LE = counts_LE * counts_LE.shape[1] / assignments_L[:, None]
    return ExpertLoad(
        step=step,
        steps=steps,
        layers=list(layers),
        load_cv=_short(loads_LE.std(1)),
        max_load=_short(loads_LE.max(1)),
        min_load=_short(loads_LE.min(1)),
        dropped=beyond if overflow == "drop" else None,
        fallback=beyond if overflow == "fallback" else None,
        entropy=_short(entropy_L / tokens_L),
        loads=_short(loads_LE) if with_loads else None,
    )


def _short(values: np.ndarray) -> list:
    return values.round(DIGITS).tolist()
