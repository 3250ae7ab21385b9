"""Alerts from limits of numbers that the events have: speed, communication, goodput, data mixture, cost, saves, disks.

Numbers of log lines are judged when `alerts.lines` of them in a row are beyond a limit, without the first line of an
attempt, which compiles. Ages are judged whenever time passes.
"""

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.observe.alerts import kinds
from ingot.observe.alerts.incidents import End, Sign
from ingot.observe.alerts.run_state import RunState, finite
from ingot.observe.alerts.verdicts import Verdict
from ingot.observe.scalars import axis_title, busiest_axis, least_exposed
from ingot.schema import events
from ingot.schema.alert_record import CRITICAL, WARNING
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.theory.flops import mfu_words
from ingot.theory.goodput import GoodputMeter
from ingot.theory.late_lines import late_after_seconds
from ingot.units import format_bytes, format_seconds, format_usd
from ingot.value_names import metric_part

_GOODPUT_AFTER_SECONDS = 3600.0  # one restart of a short run says nothing
_MOST_SOURCES = 256
_SHARE = re.compile(r"data/share/(.+)|data/(.+)/share")
_DEVIATIONS = 3.0  # standard deviations of the share in random samples, which are no drift
_BUCKET_SECONDS, _BUCKETS, _LEAST_BUCKETS = 600.0, 37, 7  # of free disk space: six hours, and judged after one
_ROOM = 1.1  # of the newest checkpoint, that the next one needs


class _Rows:
    """The number of log lines in a row that are beyond a limit, or within it, by kind and subject."""

    def __init__(self, lines: int):
        self._lines = lines
        self._rows: dict[tuple[str, str], int] = defaultdict(int)  # above 0: beyond; below: within

    def judge(self, kind: str, beyond: bool, subject: str = "") -> bool | None:
        """Return True if an alert is due, False if it is over, None if the row is too short for either."""
        row = self._rows[kind, subject]
        row = self._rows[kind, subject] = max(row, 0) + 1 if beyond else min(row, 0) - 1
        return row > 0 if abs(row) >= self._lines else None

    def clear(self) -> None:
        self._rows.clear()


@dataclass
class _DiskSpace:
    """The least free bytes of each interval of time: files that are written and removed again do not count."""

    least: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_BUCKETS))  # (elapsed, bytes)

    def add(self, elapsed: float, free: float) -> None:
        if self.least and elapsed - self.least[-1][0] < _BUCKET_SECONDS:
            begin, before = self.least.pop()
            self.least.append((begin, min(before, free)))
        else:
            self.least.append((elapsed, free))

    def hours_left(self) -> float | None:
        """Return the hours until the disk is full at the rate so far; None if it does not fill, or nobody knows yet."""
        if len(self.least) < _LEAST_BUCKETS:
            return None
        (first, before), (last, now) = self.least[0], self.least[-1]
        return now * (last - first) / (before - now) / 3600 if before > now else None


def source_shares(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each source, by the name that it has in metrics."""
    total, found = sum(weights.values()), defaultdict[str, float](float)
    for source, weight in weights.items() if total else ():
        found[metric_part(source)] += weight / total
    return dict(found)


def _axis_words(event: Mapping[str, Any], step_seconds: float) -> str:
    """Return the axis that takes most of the communication of a `waits` event, as the end of a sentence; "" if it was
    not counted by axis."""
    if (found := busiest_axis(event)) is None:
        return ""
    hidden = f", and hides {format_seconds(found.hidden)}" if found.hidden else ""
    title, share = axis_title(found.axis), found.exposed / step_seconds
    return f"; {title} takes most: {share:.0%} of a step ({format_seconds(found.exposed)}), mean over ranks{hidden}"


class LimitRules:
    """The limits of a run. plan: what was predicted for it; None if nobody knows."""

    def __init__(self, run: RunConfig, plan: Plan | None, state: RunState):
        self._run, self._alerts, self._state = run, run.alerts, state
        same = plan is not None and plan.tokens_per_step == run.tokens_per_step
        self._plan = plan if same and plan and plan.step_seconds > 0 else None
        self._rows = _Rows(run.alerts.lines)
        self._goodput = GoodputMeter(run.alerts.goodput_seconds)
        self._disks: dict[str, _DiskSpace] = {}
        self._weights = source_shares(run.data.weights)

    def of(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        """Yield the verdicts of an event that the state of the run has taken in."""
        kind = event["kind"]
        self._goodput.take(event)
        if kind in (events.RUN_STARTED, events.STOPPED, events.FINISHED):
            self._rows.clear()
        elif kind == events.PROGRESS:
            yield from self._cost(event)
            if self._state.settled:
                yield from self._mfu(event)
                yield from self._throughput(event)
            yield from self._goodput_share()
            yield from self._saved_steps()
        elif kind == events.WAITS and self._state.settled:
            yield from self._communication(event)
        elif kind == events.METRICS:
            yield from self._mix(event["values"])
        elif kind == events.SOURCES:
            shares = {f"data/share/{source}": share for source, share in event["share"].items()}
            yield from self._mix(shares, self._run.watch.log_every * self._run.train.global_batch)

    # -- speed --

    def _mfu(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        mfu, alerts = finite(event.get("mfu")), self._alerts
        if mfu is None or not alerts.mfu_least:
            return
        due = self._rows.judge(kinds.LOW_MFU, mfu < alerts.mfu_least)
        if due:
            yield Sign(
                kind=kinds.LOW_MFU,
                goes_on=True,
                evidence=f"the MFU is {mfu:.1%} ({mfu_words(mfu)}) in {alerts.lines} log lines in a row, "
                f"below {alerts.mfu_least:.0%}; the target is {alerts.mfu_target:.0%}",
                since=self._state.step,
                value=mfu,
                limit=alerts.mfu_least,
                lost=1 - mfu / alerts.mfu_target,
            )
        elif due is False:
            yield End(kinds.LOW_MFU, why=f"the MFU is {mfu:.1%} ({mfu_words(mfu)})")

    def _throughput(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        plan, speed = self._plan, finite(event["tokens_per_second"])
        if plan is None or speed is None or self._state.adapted or not self._alerts.throughput_least:
            return
        planned = plan.tokens_per_step / plan.step_seconds
        limit = self._alerts.throughput_least * planned
        band = ""
        if plan.step_seconds_high:
            slowest = plan.tokens_per_step / plan.step_seconds_high
            limit, band = min(limit, slowest), f" ({slowest:,.0f} at the slow end of its error band)"
        due = self._rows.judge(kinds.THROUGHPUT, speed < limit)
        if due:
            yield Sign(
                kind=kinds.THROUGHPUT,
                goes_on=True,
                evidence=f"{speed:,.0f} tokens/s in {self._alerts.lines} log lines in a row are {speed / planned:.0%} "
                f"of the {planned:,.0f} that the plan predicts{band}",
                since=self._state.step,
                value=speed,
                limit=limit,
                lost=1 - speed / planned,
            )
        elif due is False:
            yield End(kinds.THROUGHPUT, why=f"{speed:,.0f} tokens/s are {speed / planned:.0%} of the plan")

    def _communication(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        # The rank that waits least waits for no other rank: its time is only communication (report/diagnose/causes.py).
        # The host's waits on CPUs; those of the device, by axis, on GPUs.
        host, step = finite(event["collectives"]["least"]), self._state.step_seconds
        if host is None or not step or not self._alerts.communication_most:
            return
        share = (waits := max(host, least_exposed(event))) / step
        due = self._rows.judge(kinds.COMMUNICATION, share > self._alerts.communication_most)
        if due:
            yield Sign(
                kind=kinds.COMMUNICATION,
                goes_on=True,
                evidence=f"every rank waits in collectives for {share:.0%} of a step and more "
                f"({format_seconds(waits)} of {format_seconds(step)}), above {self._alerts.communication_most:.0%}"
                + _axis_words(event, step),
                since=self._state.step,
                value=share,
                limit=self._alerts.communication_most,
                lost=share - self._alerts.communication_most,
            )
        elif due is False:
            yield End(kinds.COMMUNICATION, why=f"{share:.0%} of a step is communication")

    def _goodput_share(self) -> Iterator[Verdict]:
        share, least = self._goodput.share(_GOODPUT_AFTER_SECONDS), self._alerts.goodput_least
        if share is None or not least:
            return
        due = self._rows.judge(kinds.GOODPUT, share < least)
        if due:
            passed = min(self._goodput.elapsed, self._alerts.goodput_seconds)
            yield Sign(
                kind=kinds.GOODPUT,
                goes_on=True,
                evidence=f"steps that count took {share:.0%} of the last {format_seconds(passed)}, below {least:.0%}: "
                "the rest went to restarts, repeated steps, saves and evaluations",
                value=share,
                limit=least,
                lost=1 - share,
            )
        elif due is False:
            yield End(kinds.GOODPUT, why=f"the goodput is {share:.0%}")

    # -- data --

    def _mix(self, values: Mapping[str, Any], samples: int = 0) -> Iterator[Verdict]:
        """Judge the shares of sources. samples: of which they are; 0: nobody knows, and chance is left out."""
        limit = self._alerts.mix_drift
        for name, value in list(values.items())[:_MOST_SOURCES] if limit else ():
            match, share = _SHARE.fullmatch(str(name)), finite(value)
            if match is None or share is None:
                continue
            source = metric_part(match[1] or match[2])
            if source not in self._weights:
                if self._run.data.weights or len(self._weights) >= _MOST_SOURCES:
                    continue
                self._weights[source] = share  # without weights, the first share is that of the sizes
            wanted = self._weights[source]
            chance = _DEVIATIONS * math.sqrt(max(wanted * (1 - wanted), 0.0) / samples) if samples else 0.0
            due = self._rows.judge(kinds.MIX_DRIFT, abs(share - wanted) > limit + chance, source)
            if due:
                yield Sign(
                    kind=kinds.MIX_DRIFT,
                    goes_on=True,
                    subject=source,
                    evidence=f"source {source} has {share:.1%} of the samples, and its weight is {wanted:.1%}",
                    since=self._state.step,
                    value=share,
                    limit=wanted,
                )
            elif due is False:
                yield End(kinds.MIX_DRIFT, source, f"it has {share:.1%} of the samples")

    # -- money --

    def _cost(self, event: Mapping[str, Any]) -> Iterator[Verdict]:
        spent, budget = finite(event.get("cost_usd")), self._alerts.budget_usd
        if spent is None or not budget:
            return
        if spent > budget:
            yield End(kinds.BUDGET_FORECAST, why="the budget is spent")
            yield Sign(
                kind=kinds.OVER_BUDGET,
                goes_on=True,
                evidence=f"the run has cost {format_usd(spent)}, above its budget of {format_usd(budget)}",
                value=spent,
                limit=budget,
            )
            return
        eta = finite(event.get("eta_seconds"))
        if eta is None or not self._state.settled:
            return
        goodput = self._goodput.share(_GOODPUT_AFTER_SECONDS) or 1.0
        end = spent + self._state.usd_per_hour * eta / 3600 / goodput
        due = self._rows.judge(kinds.BUDGET_FORECAST, end > budget)
        if due:
            yield Sign(
                kind=kinds.BUDGET_FORECAST,
                goes_on=True,
                evidence=f"the run will have cost {format_usd(end)} at its end, above its budget of "
                f"{format_usd(budget)}; {format_usd(spent)} are spent",
                since=self._state.step,
                value=end,
                limit=budget,
            )
        elif due is False:
            yield End(kinds.BUDGET_FORECAST, why=f"the run will have cost {format_usd(end)} at its end")

    # -- time that passes --

    def _saved_steps(self) -> Iterator[Verdict]:
        """Judge the age of the newest checkpoint in steps, if saves are due by steps."""
        state, interval = self._state, self._run.checkpoint.interval
        age, most = state.step - state.saved_step, self._alerts.checkpoint_intervals * interval.steps
        if most and age > most:
            yield Sign(
                kind=kinds.CHECKPOINT_OLD,
                goes_on=True,
                evidence=f"the newest checkpoint is {age:,} steps old, and one is due every {interval.steps:,} steps",
                since=state.saved_step,
                began=state.saved_time,
                value=float(age),
                limit=most,
            )

    def ages(self, now: float) -> Iterator[Verdict]:
        """Yield the verdicts on the time `now` (Unix seconds), at which no event came."""
        state = self._state
        if not state.alive or state.last_time is None:
            return
        age = now - (state.saved_time or now)
        interval = self._run.checkpoint.interval
        seconds = state.interval_seconds if interval.is_auto else interval.seconds
        most = self._alerts.checkpoint_intervals * seconds
        if most and age > most + state.save_seconds and not state.failed:
            yield Sign(
                kind=kinds.CHECKPOINT_OLD,
                goes_on=True,
                evidence=f"the newest checkpoint is {format_seconds(age)} old, and one is due every "
                f"{format_seconds(seconds)}",
                since=state.saved_step,
                began=state.saved_time,
                value=age,
                limit=most,
            )
        silent, limit = now - state.last_time, self.silent_limit
        if limit and silent > limit:
            yield Sign(
                kind=kinds.RUN_SILENT,
                goes_on=True,
                evidence=f"no event for {format_seconds(silent)}, after step {state.step:,} (the last is "
                f"'{state.last_kind}')",
                since=state.step,
                began=state.last_time,
                value=silent,
                limit=limit,
                lost=1.0,
            )

    @property
    def silent_limit(self) -> float:
        """The seconds without an event after which the run counts as silent; 0: never."""
        if not self._alerts.silent_seconds:
            return 0.0
        if not self._state.lines or self._state.failed:  # as the watchdog waits for a start
            return max(self._alerts.silent_seconds, self._run.launch.watchdog_other_seconds)
        return max(self._alerts.silent_seconds, late_after_seconds(self._run.watch.log_every, self._state.step_seconds))

    def disk(self, path: str, free: float, elapsed: float) -> Iterator[Verdict]:
        """Yield the verdicts on a disk with `free` bytes."""
        state = self._state
        space = self._disks.setdefault(path, _DiskSpace())
        space.add(elapsed, free)
        hours, limit = space.hours_left(), self._alerts.disk_hours
        needed = _ROOM * state.saved_bytes
        if not limit:
            return
        yield End(kinds.DISK_SILENT, path, "it answers again")
        yield End(kinds.DISK_ERROR, path, "it answers without an error")
        if free < needed:
            yield Sign(
                kind=kinds.DISK,
                goes_on=True,
                subject=path,
                evidence=f"{path} has {format_bytes(free)} free, and the next checkpoint needs {format_bytes(needed)}",
                value=free,
                limit=needed,
                severity=CRITICAL,
            )
        # The first checkpoints of an attempt fill the disk up to the number that is kept.
        elif hours is not None and hours < limit and state.saves > self._run.checkpoint.keep:
            yield Sign(
                kind=kinds.DISK,
                goes_on=True,
                subject=path,
                evidence=f"{path} has {format_bytes(free)} free, and at the rate of the last hours is full in "
                f"{format_seconds(hours * 3600)}",
                value=hours,
                limit=limit,
                severity=WARNING,
            )
        else:
            yield End(kinds.DISK, path, f"{format_bytes(free)} are free")

    def broken_disk(self, path: str, error: str, words: str) -> Iterator[Verdict]:
        """Yield the verdicts on a disk that answers with an error, such as "ESTALE"."""
        if not self._alerts.disk_hours:
            return
        yield End(kinds.DISK_SILENT, path, "it answers again")
        if error == "ENOENT":  # a folder that is not there yet
            yield End(kinds.DISK_ERROR, path, "it is not there")
            return
        yield Sign(
            kind=kinds.DISK_ERROR,
            goes_on=True,
            subject=path,
            evidence=f"{path} answers with {error} ({words}): nobody knows its free space",
        )

    def silent_disk(self, path: str, seconds: float) -> Iterator[Verdict]:
        """Yield the verdict on a disk that has not answered for so many seconds."""
        if self._alerts.disk_hours:
            yield Sign(
                kind=kinds.DISK_SILENT,
                goes_on=True,
                subject=path,
                evidence=f"{path} does not answer: nobody knows its free space for {format_seconds(seconds)}",
                value=seconds,
            )
