"""The line that a run prints per interval: fixed columns, read back by one regular expression.

It is under 100 characters; that of a model with experts under 140.
"""

import re
from dataclasses import dataclass

from ingot.units import format_count


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The facts of a `progress` event (schema/events.py), in its units. Seconds are means per step of the interval.

    load_cv, max_load, dropped, fallback: of all layers with experts (telemetry/experts.py) the mean, the highest, the
    mean, the mean.
    """

    step: int
    steps: int
    loss: float
    bpb: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_second: float
    mfu: float | None
    data_wait_seconds: float
    step_seconds: float
    eta_seconds: float
    cost_usd: float | None
    peak_memory_bytes: int
    load_cv: float | None = None
    max_load: float | None = None
    dropped: float | None = None
    fallback: float | None = None


# Every field of `format_line`, by name. The price is there only if it is known, loads if there are experts, what was
# dropped, or was over and taken by the fallback expert, if they have a capacity.
LINE_PATTERN = re.compile(
    r"step +(?P<step>\d+)/(?P<steps>\d+)"
    r" +loss +(?P<loss>[-+.\w]+) +bpb +(?P<bpb>[-+.\w]+) +gn +(?P<gn>[-+.\w]+) +lr +(?P<lr>[-+.\w]+)"
    r" +(?P<tokens_per_second>[.\w]+) tok/s +mfu +(?P<mfu>n/a|[\d.]+%) +data +(?P<data>\d+)%"
    r"(?: +load cv +(?P<load_cv>[\d.]+) max +(?P<max_load>[\d.]+)x"
    r"(?: drop +(?P<dropped>[\d.]+)%| over +(?P<fallback>[\d.]+)%)?)?"
    r" +eta +(?P<eta>[\dhms]+)(?: +\$(?P<cost>[\d,.]+))?"
)


def format_line(progress: Progress) -> str:
    p, width = progress, len(str(progress.steps))
    mfu = "n/a" if p.mfu is None else f"{p.mfu:5.1%}"
    cost = "" if p.cost_usd is None else f" ${p.cost_usd:,.2f}"
    return (
        f"step {p.step:>{width}}/{p.steps}"
        f"  loss {_five(p.loss)} bpb {p.bpb:.2f} gn {p.grad_norm:<4.2g} lr {_power(p.lr)}"
        f"  {format_count(p.tokens_per_second):>5} tok/s mfu {mfu} data {p.data_wait_seconds / p.step_seconds:>3.0%}"
        f"{_load(p)}  eta {_clock(p.eta_seconds)}{cost}"
    )


def _load(progress: Progress) -> str:
    if progress.load_cv is None:
        return ""
    shares = (("drop", progress.dropped), ("over", progress.fallback))
    beyond = "".join(f" {word} {share:>5.1%}" for word, share in shares if share is not None)
    return f"  load cv {progress.load_cv:.2f} max {progress.max_load:>4.1f}x{beyond}"


def _five(loss: float) -> str:
    """Five characters: 6.644, 11.76."""
    return f"{loss:5.3f}" if loss < 9.9995 else f"{loss:5.2f}"


def _power(lr: float) -> str:
    """6.0e-04 -> '6.0e-4'."""
    return re.sub(r"e([-+])0", r"e\1", f"{lr:.1e}")


def _clock(seconds: float) -> str:
    """80 -> '1m20s', 4000 -> '1h06m'."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"
