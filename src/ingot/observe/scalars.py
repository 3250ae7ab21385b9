"""The numbers that events of the log have, by the names under which sinks send them.

A number that is recorded, too, has the name, unit and meaning that schema/metrics.py gives it.
"""

from collections.abc import Iterator, Mapping
from math import isfinite
from statistics import fmean
from typing import Any, NamedTuple

from ingot.schema import events
from ingot.schema.metrics import ALL_RANKS, METRICS, TRAFFIC_AXES, metric_of


class ScalarMeaning(NamedTuple):
    """A number. unit: "" for one without."""

    unit: str
    meaning: str


PIPELINE = "pp"
_PER_STEP = "per step, mean over ranks"
USES = {
    "data": "waiting for the next batch",
    "pipeline": "waiting for another stage of the pipeline",
    "collectives": "waiting in exchanges with other ranks",
    "reading": "waiting for the results of steps, on a GPU until it has computed them",
    "computing": "computing on a core",
    "queued": "ready, but without a core",
    "blocked": "waiting for anything else",
}
TRAFFIC = {
    "exposed": "waiting for the exchanges of {axis}, and for ranks that come late to them",
    "hidden": "in which an exchange of {axis} is in flight while a rank works",
}
_RECORDED = {metric.name: metric for metric in METRICS}
# Numbers that each rank records, and that sinks get once for all: of rank 0, which writes the log, or a mean.
FIRST, MEAN = "of rank 0", "mean over ranks"
OVER_RANKS = {
    **dict.fromkeys(("perf/step_seconds", "data/wait_seconds", "memory/peak_bytes", "checkpoint/stall_seconds"), FIRST),
    **{name: MEAN for use in USES if (name := f"perf/{use}_seconds") in _RECORDED},
    **{f"perf/{{axis}}/{part}_seconds": MEAN for part in TRAFFIC},
}
_RUN = (
    "train/loss train/bpb train/grad_norm train/param_norm train/update_ratio train/lr train/tokens "
    "perf/tokens_per_second perf/mfu run/eta_seconds run/goodput run/cost_usd run/cost_to_come_usd experts/load_cv "
    "experts/max_load experts/dropped experts/fallback experts/route_flips eval/sanity_loss"
)
# Numbers that the log has and schema/metrics.py has not: name -> unit and meaning.
ONLY_SENT: dict[str, ScalarMeaning] = {
    "train/underflow_share": ScalarMeaning("share", "gradient elements that are 0 or subnormal; the worst layer"),
    "train/saturation_share": ScalarMeaning("share", "gradient elements near the largest number; the worst layer"),
    **{
        name: ScalarMeaning("s", f"{words}, {_PER_STEP}")
        for use, words in USES.items()
        if (name := f"perf/{use}_seconds") not in _RECORDED
    },
    **{
        f"perf/{use}_seconds_most": ScalarMeaning("s", f"{words}, per step, the rank with the most")
        for use, words in USES.items()
    },
    "run/start_seconds": ScalarMeaning("s", "from the fault, or the command, to the first steps"),
    "experts/min_load": ScalarMeaning("", "load of the idlest expert, in units of the mean; the worst layer"),
    "experts/entropy": ScalarMeaning("nats", "entropy of the router's scores, mean over layers"),
    "checkpoint/write_seconds": ScalarMeaning("s", "time until a checkpoint was verified"),
    "checkpoint/bytes": ScalarMeaning("bytes", "size of a checkpoint"),
    "eval/bpb": ScalarMeaning("bits per byte", "loss of held-out text"),
    "eval/loss": ScalarMeaning("nats per token", "loss of held-out text"),
    "eval/unigram_bpb": ScalarMeaning("bits per byte", "the same by the frequencies of tokens alone"),
    "eval/seconds": ScalarMeaning("s", "time of an evaluation"),
}
# name -> its unit and meaning.
SCALARS: dict[str, ScalarMeaning] = {
    **{name: ScalarMeaning(_RECORDED[name].unit, _RECORDED[name].meaning) for name in _RUN.split()},
    **{
        name.format(axis=axis): ScalarMeaning(own.unit, f"{own.meaning.format(axis=axis)} ({over})")
        for name, over in OVER_RANKS.items()
        for own in (_RECORDED[name],)
        for axis in (TRAFFIC_AXES if "{axis}" in name else ("",))
    },
    **ONLY_SENT,
}
# The same for names with a word of the run in braces. Of a callback, the unit is its own.
NAMED_SCALARS: dict[str, ScalarMeaning] = {
    **{
        metric.name: ScalarMeaning(metric.unit, metric.meaning)
        for metric in METRICS
        if metric.owner == "run" and "{" in metric.name
    },
    "eval/{source}/bpb": ScalarMeaning("bits per byte", "loss of the held-out text of a source"),
    "eval/{source}/loss": ScalarMeaning("nats per token", "loss of the held-out text of a source"),
    "callbacks/{callback}/{metric}": ScalarMeaning("", "metric of a callback, or term of the loss"),
}
# kind of event -> its field -> the name of the number.
_FIELDS = {
    events.STEP: {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/lr"},
    events.PROGRESS: {
        "bpb": "train/bpb",
        "tokens": "train/tokens",
        "tokens_per_second": "perf/tokens_per_second",
        "mfu": "perf/mfu",
        "step_seconds": "perf/step_seconds",
        "data_wait_seconds": "data/wait_seconds",
        "peak_memory_bytes": "memory/peak_bytes",
        "eta_seconds": "run/eta_seconds",
        "cost_usd": "run/cost_usd",
    },
    events.CHECKPOINT: {
        "stall_seconds": "checkpoint/stall_seconds",
        "write_seconds": "checkpoint/write_seconds",
        "bytes": "checkpoint/bytes",
    },
    events.EVALUATION: {name: f"eval/{name}" for name in ("bpb", "loss", "unigram_bpb", "seconds")},
    events.SANITY: {"loss": "eval/sanity_loss"},
    events.START_TIMES: {"total_seconds": "run/start_seconds"},
}
_OF_EXPERTS = {
    **dict.fromkeys(("load_cv", "entropy", "dropped", "fallback"), fmean),
    "max_load": max,
    "min_load": min,
}


def scalars_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an event by name; null and everything that is no number is left out. {} for most kinds."""
    return {name: float(value) for name, value in _found(event) if _is_number(value)}


def _found(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    kind = event["kind"]
    yield from ((name, event.get(field)) for field, name in _FIELDS.get(kind, {}).items())
    if kind == events.WAITS:
        for use in USES:
            own = event.get(use)
            if isinstance(own, Mapping):
                yield f"perf/{use}_seconds", own.get("mean")
                yield f"perf/{use}_seconds_most", own.get("most")
        yield from ((f"perf/{name}_seconds", seconds) for name, seconds in traffic_of(event).items())
    elif kind == events.EXPERTS:
        for field, over in _OF_EXPERTS.items():
            yield f"experts/{field}", _over(over, event.get(field))
    elif kind == events.GRADIENT_RANGE:
        for field in ("underflow", "saturation"):
            yield f"train/{field}_share", _over(max, event.get(field))
    elif kind == events.EVALUATION:
        for source, own in (event.get("by_source") or {}).items():
            yield from ((f"eval/{source}/{field}", own.get(field)) for field in ("bpb", "loss"))
    elif kind == events.SOURCES:
        for field in ("loss", "share"):
            by_source = event.get(field)
            for source, own in by_source.items() if isinstance(by_source, Mapping) else ():
                yield f"data/{source}/{field}", own
    elif kind == events.MEASURED:
        values = event.get("values")
        for name, own in values.items() if isinstance(values, Mapping) else ():
            if (metric := metric_of(str(name))) is not None and metric.owner == "run":
                yield str(name), own
    elif kind == events.METRICS:
        yield from ((f"callbacks/{event.get('by')}/{name}", own) for name, own in (event.get("values") or {}).items())


def traffic_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return AXIS/exposed and AXIS/hidden -> seconds per step, mean over ranks, of a `waits` event; {} without any."""
    by_axis = event.get("axes")
    found = {}
    for axis, parts in by_axis.items() if isinstance(by_axis, Mapping) else ():
        for part, spread in parts.items() if axis in TRAFFIC_AXES and isinstance(parts, Mapping) else ():
            if part in TRAFFIC and isinstance(spread, Mapping):
                found[f"{axis}/{part}"] = spread.get("mean")
    return found


class BusiestAxis(NamedTuple):
    """The communication of an axis, seconds per step, mean over ranks. hidden: None if it is not known."""

    axis: str
    exposed: float
    hidden: float | None


def busiest_axis(event: Mapping[str, Any]) -> BusiestAxis | None:
    """Return the axis for whose collectives ranks wait most, of a `waits` event; None if communication was not counted
    by axis, or no rank waited. "pp" is left out: a stage waits for the work of its neighbor, which is the bubble."""
    found = {name: seconds for name, seconds in traffic_of(event).items() if _is_number(seconds) and isfinite(seconds)}
    exposed = {axis: found.get(f"{axis}/exposed", 0.0) for axis in TRAFFIC_AXES if axis != PIPELINE}
    axis = max(exposed, key=exposed.__getitem__)
    return BusiestAxis(axis, exposed[axis], found.get(f"{axis}/hidden")) if exposed[axis] > 0 else None


def least_exposed(event: Mapping[str, Any]) -> float:
    """Return the seconds per step that every rank waits for collectives, of a `waits` event: the sum over axes of the
    rank that waits least; 0 if communication was not counted by axis. "pp" is left out, as above."""
    by_axis = event.get("axes")
    total = 0.0
    for axis, parts in by_axis.items() if isinstance(by_axis, Mapping) else ():
        spread = parts.get("exposed") if axis in TRAFFIC_AXES and isinstance(parts, Mapping) else None
        least: Any = spread.get("least") if axis != PIPELINE and isinstance(spread, Mapping) else None
        total += least if _is_number(least) and isfinite(least) else 0.0
    return total


def axis_title(axis: str) -> str:
    """Return an axis in words for people."""
    return "all ranks" if axis == ALL_RANKS else axis


def _over(function: Any, values: Any) -> float | None:
    numbers = [one for one in values or () if _is_number(one)]
    return function(numbers) if numbers else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
