"""The planner's accuracy on published runs: errors by family (the rows of one source), and their mean over families.

Each family is scored alone, so that large families do not dominate the mean. Step times are compared, not MFU, because
sources count FLOPs and peaks differently. For a row without a step time, it is computed from the row's other figures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ingot.errors import IngotError
from ingot.planner.predict.memory.peak_memory import memory_bill
from ingot.planner.predict.time.constants import Constants
from ingot.planner.predict.time.step_time import estimate
from ingot.planner.published.run import PublishedRow, PublishedRun, SkippedRow, published_run
from ingot.theory.flops import train_flops_per_token


@dataclass(frozen=True, kw_only=True)
class RowScore:
    """The prediction of one row.

    skipped: why the row was not compared. step_error, memory_error: predicted / measured - 1; None if not measured.
    speed: model FLOP/s of one device, (predicted, measured). ran_out: the run exceeded the device's memory. over: the
      prediction exceeds it. judged: a wrong `over` counts as an error, because the row states micro-batch and
      recomputation.
    """

    id: str
    family: str
    predicted: dict[str, float] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    skipped: str | None = None
    step_error: float | None = None
    memory_error: float | None = None
    speed: tuple[float, float] | None = None
    ran_out: bool = False
    over: bool = False
    judged: bool = False

    def facts(self) -> dict[str, Any]:
        return {"id": self.id, "predicted": self.predicted, "measured": self.measured, "skipped": self.skipped}


@dataclass(frozen=True)
class PlannerScore:
    """The scores of all rows."""

    rows: tuple[RowScore, ...]

    @cached_property
    def families(self) -> dict[str, dict[str, Any]]:
        """Errors by family, in percent.

        n: number of compared rows. rank_correlation: Spearman's correlation of model FLOP/s per device.
        oom_called: rows that were predicted not to fit, and ran out of memory or were measured above the device's.
        oom_false: rows that fitted, state their micro-batch and recomputation, and were predicted not to fit.
        """
        names = dict.fromkeys(row.family for row in self.rows)
        return {name: _family([row for row in self.rows if row.family == name]) for name in names}

    def mean(self, figure: str) -> float | None:
        """Return the mean of a figure over the families that have it, None if no family has it."""
        known = [family[figure] for family in self.families.values() if family[figure] is not None]
        return _rounded(float(np.mean(known))) if known else None

    def facts(self) -> dict[str, Any]:
        figures = ("step_time_mape", "step_time_median_error", "memory_mape", "rank_correlation")
        return {
            "families": self.families,
            "rows": [row.facts() for row in self.rows],
            **{figure: self.mean(figure) for figure in figures},
        }


def score(
    rows: Sequence[PublishedRow], constants_for: Callable[[str], Constants | None] = lambda family: None
) -> PlannerScore:
    """Return the scores of all rows. constants_for: returns the constants to predict a family with, or None for the
    constants that the package ships."""
    return PlannerScore(tuple(score_row(row, constants_for(row.family)) for row in rows))


def score_row(row: PublishedRow, constants: Constants | None = None) -> RowScore:
    """Return the score of a row. If the row cannot be predicted or has no measured figure to compare with, the score
    has the reason in `skipped`."""
    found = published_run(row)
    if isinstance(found, SkippedRow):
        return RowScore(id=row.id, family=row.family, skipped=found.reason)
    step, memory = found.measured.step_seconds, found.measured.memory_bytes
    if step is None and memory is None and not found.measured.ran_out:
        reason = "has no step time, throughput, device-hours or memory to compare with"
        return RowScore(id=row.id, family=row.family, skipped=reason)
    try:
        return _compared(found, constants)
    except (IngotError, ArithmeticError, LookupError, ValueError) as error:
        return RowScore(id=row.id, family=row.family, skipped=f"cannot be predicted: {error!r}")


def _compared(found: PublishedRun, constants: Constants | None) -> RowScore:
    time = estimate(found.run, found.cluster, found.software, constants)
    if time is None:
        why = f"no rate is known for {found.run.train.precision} on {found.cluster.device_name}"
        return RowScore(id=found.id, family=found.family, skipped=why)
    seconds, measured = time.seconds * found.scale, found.measured
    bill = memory_bill(found.run, found.cluster, found.software)
    counted = sum(term.value for kind, term in bill.items() if kind not in measured.memory_without)
    step, memory = measured.step_seconds, measured.memory_bytes
    flops = train_flops_per_token(found.run.model, found.run.train.seq_len) * found.tokens / found.devices
    return RowScore(
        id=found.id,
        family=found.family,
        predicted=_figures(found, seconds, counted)
        | ({"bubble": _rounded(time.schedule_bubble)} if time.bubble else {}),
        measured=_as_measured(found),
        step_error=None if step is None else seconds / step - 1,
        memory_error=None if memory is None else counted / memory - 1,
        speed=None if step is None else (flops / seconds, flops / step),
        ran_out=measured.ran_out or (memory or 0.0) > found.cluster.memory_bytes,
        over=sum(term.value for term in bill.values()) > found.cluster.memory_bytes,
        judged=not found.part
        and None not in (found.row.count("plan", "micro_batch"), found.row.value("plan", "recompute")),
    )


def _figures(found: PublishedRun, seconds: float, memory: float) -> dict[str, float]:
    """Return the predicted figures in the units of the rows' file.

    MFU is relative to the 16-bit peak, with causal attention counted half. FLOP/s, MFU, HFU and device-hours that the
    row itself reports are scaled by predicted and measured step time instead, so they follow the row's convention.
    """
    speed = found.tokens / seconds / found.devices
    flops = train_flops_per_token(found.run.model, found.run.train.seq_len)
    peak = found.cluster.peak_flops[found.run.train.precision]
    tokens = found.row.number("measured", "tokens")
    own = {
        "step_s": _rounded(seconds),
        "tok_s_gpu": _rounded(speed),
        "tflops_gpu": _rounded(speed * flops / 1e12),
        "mfu_pct": _rounded(100 * speed * flops / peak),
        **({} if found.part else {"mem_gb": _rounded(memory / _memory_unit(found.row))}),
        **({"gpu_hours": _rounded(tokens / speed / 3600)} if tokens else {}),
    }
    if not (step := found.measured.step_seconds):
        return own
    printed = {name: found.row.number("measured", name) for name in ("tflops_gpu", "mfu_pct", "hfu_pct", "gpu_hours")}
    faster = {name: seconds / step if name == "gpu_hours" else step / seconds for name in printed}
    return own | {name: _rounded(value * faster[name]) for name, value in printed.items() if value}


def _memory_unit(row: PublishedRow) -> float:
    return 2**30 if "gib" in row.text("measured", "mem_kind") else 1e9


def _as_measured(found: PublishedRun) -> dict[str, Any]:
    names = ("step_s", "tok_s_gpu", "tflops_gpu", "mfu_pct", "hfu_pct", "mem_gb", "gpu_hours")
    given = {name: value for name in names if (value := found.row.number("measured", name)) is not None}
    if found.measured.derived and found.measured.step_seconds is not None:
        given |= {"step_s": _rounded(found.measured.step_seconds), "step_s_from": found.measured.derived}
    return given | ({"bubble": found.measured.bubble} if found.measured.bubble is not None else {})


def _family(rows: Sequence[RowScore]) -> dict[str, Any]:
    steps = [row.step_error for row in rows if row.step_error is not None]
    memory = [row.memory_error for row in rows if row.memory_error is not None]
    speeds = [row.speed for row in rows if row.speed is not None]
    return {
        "n": sum(row.skipped is None for row in rows),
        "step_time_mape": _percent(np.mean(np.abs(steps))) if steps else None,
        "step_time_median_error": _percent(np.median(steps)) if steps else None,
        "memory_mape": _percent(np.mean(np.abs(memory))) if memory else None,
        "rank_correlation": rank_correlation(*zip(*speeds, strict=True)) if len(speeds) > 2 else None,
        "oom_called": sum(row.ran_out and row.over for row in rows),
        "oom_false": sum(not row.ran_out and row.over and row.judged for row in rows),
    }


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation. Ties have their mean rank; None if all values of one side are equal."""
    one, other = _ranks(first), _ranks(second)
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return _rounded(float(np.corrcoef(one, other)[0, 1]))


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[place]


def _percent(share: np.floating | float) -> float:
    return round(100 * float(share), 2)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
