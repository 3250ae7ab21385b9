"""The progress line that a run prints for each interval, in fixed columns, and the load of experts.

LINE_PATTERN parses a line. A line has fewer than 100 characters; for a model with experts, fewer than 140.
Shape letters: L layers with experts, E experts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.units import counted, format_count


@dataclass(frozen=True, kw_only=True)
class ProgressLine:
    """The fields of a `progress` event, in the units of schema/events.py. Seconds are means per trained step of the
    interval; loss, bpb and grad_norm are of the last step that was trained.

    passed: the number of steps whose data were passed. If all were, there is no number of a trained step: None.
    load_cv, dropped, fallback: means over all layers with experts (see ExpertLoadFacts). max_load: the maximum.
    """

    step: int
    steps: int
    loss: float | None
    bpb: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    tokens_per_second: float | None
    mfu: float | None
    data_wait_seconds: float | None
    step_seconds: float | None
    eta_seconds: float | None
    cost_usd: float | None
    peak_memory_bytes: int
    load_cv: float | None = None
    max_load: float | None = None
    dropped: float | None = None
    fallback: float | None = None
    passed: int = 0


# A named group for every field of `format_line`. Optional fields: the cost (if the price is known), the load (with
# experts), and the share that was dropped or went to the fallback expert (if experts have a capacity).
LINE_PATTERN = re.compile(
    r"step +(?P<step>\d+)/(?P<steps>\d+)"
    r" +loss +(?P<loss>[-+.\w]+) +bpb +(?P<bpb>[-+.\w]+) +gn +(?P<gn>[-+.\w]+) +lr +(?P<lr>[-+.\w]+)"
    r" +(?P<tokens_per_second>[.\w]+) tok/s +mfu +(?P<mfu>n/a|[\d.]+%) +data +(?P<data>\d+)%"
    r"(?: +load cv +(?P<load_cv>[\d.]+) max +(?P<max_load>[\d.]+)x"
    r"(?: drop +(?P<dropped>[\d.]+)%| over +(?P<fallback>[\d.]+)%)?)?"
    r" +eta +(?P<eta>[\dhms]+)(?: +\$(?P<cost>[\d,.]+))?"
)


def format_line(progress: ProgressLine) -> str:
    """Format the progress line, which LINE_PATTERN parses; of steps that all were passed, one without numbers."""
    p, width = progress, len(str(progress.steps))
    at = f"step {p.step:>{width}}/{p.steps}"
    if p.loss is None or p.bpb is None or p.grad_norm is None or p.tokens_per_second is None or p.eta_seconds is None:
        return f"{at}  passed {counted(p.passed, 'step')} without training"
    waits = (p.data_wait_seconds or 0.0) / (p.step_seconds or 1.0)
    mfu = "n/a" if p.mfu is None else f"{p.mfu:5.1%}"
    cost = "" if p.cost_usd is None else f" ${p.cost_usd:,.2f}"
    return (
        f"{at}  loss {_five(p.loss)} bpb {p.bpb:.2f} gn {p.grad_norm:<4.2g} lr {_power(p.lr)}"
        f"  {format_count(p.tokens_per_second):>5} tok/s mfu {mfu} data {waits:>3.0%}"
        f"{_load(p)}  eta {_clock(p.eta_seconds)}{cost}"
    )


def _load(progress: ProgressLine) -> str:
    if progress.load_cv is None:
        return ""
    shares = (("drop", progress.dropped), ("over", progress.fallback))
    beyond = "".join(f" {word} {share:>5.1%}" for word, share in shares if share is not None)
    return f"  load cv {progress.load_cv:.2f} max {progress.max_load:>4.1f}x{beyond}"


def _five(loss: float) -> str:
    """Format a loss in five characters: 6.644, 11.76."""
    return f"{loss:5.3f}" if loss < 9.9995 else f"{loss:5.2f}"


def _power(lr: float) -> str:
    """Format a learning rate in at least six characters: 6.0e-04 -> '6.0e-4', 13.0 -> '1.3e1 '."""
    digits, _, exponent = f"{lr:.1e}".partition("e")
    return f"{digits}e{int(exponent)}".ljust(6)


def _clock(seconds: float) -> str:
    """Format a duration: 80 -> '1m20s', 4000 -> '1h06m'."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


DIGITS = 3  # decimals of logged loads: enough for people and charts, and a large model logs many layers


@dataclass(frozen=True, kw_only=True)
class ExpertLoadFacts:
    """The fields of an `experts` event (schema/events.py).

    The load of an expert is its share of a layer's assignments x E; 1 is an even load. step: the last of the steps
    that are summed. steps: their number. layers: the layers with experts; the other lists have one entry per layer.
    load_cv: the standard deviation of the loads, whose mean is 1. max_load, min_load: the largest and smallest load.
    dropped, fallback: the share of assignments beyond an expert's capacity, which are dropped or go to the fallback
    expert; one of the two is None, or both without a capacity. entropy: the mean entropy of a token's scores as
    probabilities, in nats. loads: [L][E], or None to keep the log small.
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
) -> ExpertLoadFacts:
    """Compute the load of experts. table: float64 [L, E + 3] from parallel/balance.py, summed over `steps` steps.

    overflow: "drop" or "fallback" (schema/arch.py), "" without a capacity.
    """
    counts_LE, beyond_L, entropy_L, tokens_L = table[:, :-3], table[:, -3], table[:, -2], table[:, -1]
    assignments_L = counts_LE.sum(1)
    beyond = _short(beyond_L / assignments_L)
    loads_LE = counts_LE * counts_LE.shape[1] / assignments_L[:, None]
    return ExpertLoadFacts(
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
