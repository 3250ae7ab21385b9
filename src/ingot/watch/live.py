"""The record of a run folder, read as it grows, in bounded memory. No torch; nothing is written.

A `LiveRun` keeps the numbers of every step as arrays (series.py), and of all else the newest: what the report needs
(report/facts.py), incidents to mark, and alerts. Logs may be cut, damaged, of other versions, or of several runs.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ingot.observe.scalars import SCALARS, USES, traffic_of
from ingot.report.facts import EventReader, RunData, measured_numbers
from ingot.report.ranks import open_stragglers
from ingot.report.run_state import state_of, waits_for_nodes
from ingot.schema import events
from ingot.schema.alert_record import ShownAlert, add_record, record_of
from ingot.schema.metrics import NewestRow
from ingot.schema.run_folder import RunFolder
from ingot.trainer.resilience.lock import is_locked
from ingot.watch.artifacts import RunArtifacts
from ingot.watch.columns import EXPERT_COLUMNS, LINE_COLUMNS, STEP_COLUMNS, TRAFFIC_COLUMNS, number_of, over_layers
from ingot.watch.growing import GrowingFile, parsed
from ingot.watch.series import MOST_ROWS, StepSeries

_READ_BYTES = 256 << 10  # of a file in one look, or a longer line: readers wait for it, for about 10 ms
_TAIL_BYTES = 256 << 10  # of a long log, which are read first
_MOST_EVENTS, _MOST_STEPS, _MOST_ALERTS, _MOST_SERIES = 2_000, 20_000, 1_000, 64
_MOST_NAMED = 1 << 12  # rows of a number of one layer or source: there are hundreds of these
_MOST_TEXT = 8_000  # characters of a sample or document
_JUMP_SECONDS = 60.0
_LATE_SECONDS = 10.0  # of silence after which a run that is late counts as changed: readers show how long it lasts


class LiveRun:
    """A run folder as it is. Call `refresh` now and then; hold `lock` while you read, if another thread refreshes.

    generation: counts how often numbers became void or were read anew; until then, rows are only added. version: counts
    the looks that found anything new. steps: loss, gradient norm and learning rate of every logged step. lines: the
    numbers of log lines. uses, uses_most: the seconds per step of each use of a rank's time, mean over ranks and of the
    rank with the most. experts: over layers (means; largest and least load). own: numbers of callbacks and loss terms,
    as BY/NAME. measured: numbers of schema/metrics.py that `measured` and `sources` events have, by name. data: what
    the sections of the report need; of events of a kind, the newest. incidents: the newest; incident_counts: all, by
    kind. left_out: how many older events of a list of `data` were dropped, by its name. alerts: the newest, by id;
    alerts_left_out: how many older ones. ranks: the newest row of each rank. memo: for what takes long to find, which
    readers keep here. names: of the runs in the log. problems: what cannot be read, in words. shares_name: its name
    shows its folder, because another run is shown that has the same one (`distinguish`). clock_jumps: how often the
    clock went back. last_event: Unix seconds of the newest event. tail: the run by the end of its log alone, while the
    rest of a long one is not read yet; None otherwise.

    newest: read the lines within so many bytes before the end of the log, and what is added; None: the whole log.
    """

    def __init__(self, root: Path, newest: int | None = None):
        self.folder, self._newest = RunFolder(root), newest
        self.lock = threading.RLock()
        self.generation = self.version = 0
        self.shares_name = False
        self._begin()

    def _begin(self) -> None:
        """Forget everything: the log is read from its beginning."""
        self.generation += 1
        self.version += 1
        self.steps = StepSeries(*STEP_COLUMNS)
        self.lines = StepSeries(*LINE_COLUMNS)
        self.uses, self.traffic = StepSeries(*USES), StepSeries(*TRAFFIC_COLUMNS)
        self.experts = StepSeries(*EXPERT_COLUMNS)
        self.own: dict[str, StepSeries] = {}
        self.measured: dict[str, StepSeries] = {}
        self.data = RunData(folder=self.folder)
        self.left_out: Counter[str] = Counter()
        self.alerts: dict[str, ShownAlert] = {}
        self.alerts_left_out = self.clock_jumps = 0
        self.ranks: dict[int, NewestRow] = {}
        self.names: dict[str, None] = {}
        self.problems: dict[str, str] = {}
        self.memo: dict[str, Any] = {}
        self.last_event: float | None = None
        self.running = False
        self._state: tuple = (False, None, "")
        self._reader, self._artifacts = EventReader(self.data), RunArtifacts(self.data)
        self.tail: LiveRun | None = None
        self._log = GrowingFile(self.folder.events, _READ_BYTES, self._newest)
        self._alert_lines = GrowingFile(self.folder.alerts, _READ_BYTES)

    # -- looks --

    def refresh(self) -> bool:
        """Read what was added since the last look, some megabytes at most. Return whether anything is new; then look
        again soon, because more may be there."""
        return self._look(with_tail=True)

    def _look(self, *, with_tail: bool) -> bool:
        before = self.version
        with self.lock:
            self._read_log()
            self.version += self._artifacts.read()
            self.ranks, self.problems = self._artifacts.ranks, self._artifacts.problems
            position = self._alert_lines.position
            if (lines := self._alert_lines.read_lines()) is None:
                self.alerts.clear()
                self.alerts_left_out = 0
            elif lines:
                self._take_alerts(parsed(lines))
            self.version += self._alert_lines.position != position
            before_state, self.running = self._state, is_locked(self.folder.lock)
            self.data.running = self.running
            still = self.still_seconds()
            late = None if still is None else int(still / _LATE_SECONDS)
            self._state = self.running, late, self.log_problem
            self.version += self._state != before_state
            self._read_tail(wanted=with_tail)
        return self.version > before

    def _read_log(self) -> None:
        position, lines = self._log.position, self._log.read_lines()
        if lines is None:
            self._begin()
            position, lines = self._log.position, self._log.read_lines()
        self._take(parsed(lines or []))
        self.data.unreadable_events += self._log.too_long
        self.version += self._log.position != position  # also within a line that is left out: more is there to read

    def read_all(self) -> "LiveRun":
        """Read the whole record, and return this object."""
        while self._look(with_tail=False) and self.unread:
            pass
        return self

    @property
    def unread(self) -> float:
        """The share of the event log and of the alerts that is not read yet, as of the last look: 0 to 1."""
        files = (self._log, self._alert_lines)
        return sum(file.left_bytes for file in files) / max(sum(file.size for file in files), 1)

    @property
    def log_problem(self) -> str:
        """The reason for which the last look could not read the event log; "" if it could."""
        return self._log.problem

    # -- the state --

    @property
    def name(self) -> str:
        """The name of the run, that of its folder without a run file; both if another run that is shown has it, too."""
        name = self.data.run.name if self.data.run else self.folder.root.resolve().name
        return f"{name} ({self.folder.root})" if self.shares_name else name

    @property
    def last_step(self) -> int:
        """The newest step that is not void; 0 without one."""
        return max(self.steps.last_step, self.lines.last_step)

    @property
    def total_steps(self) -> int:
        """The steps of the run file; 0 if it cannot be read."""
        return self.data.run.train.steps if self.data.run else 0

    @property
    def state(self) -> str:
        """The state in a word (report/run_state.py)."""
        waits = waits_for_nodes(self.data.stepped_down, self.data.run)
        return state_of(running=self.running, end=self.data.end, steps=self.last_step, waits=waits)

    def still_seconds(self, now: float | None = None) -> float | None:
        """Return the time without a step of a running run, if the next log line is late (report/silence.py); else
        None. now: Unix seconds; None: the time of the call."""
        if not (self.running and self.data.run):
            return None
        return self._reader.silence.seconds(self.data.run, time.time() if now is None else now)

    def slow_ranks(self) -> dict[int, dict]:
        """Return the `straggler` events of the ranks that are slow, by rank."""
        return open_stragglers(self.data)

    def all_series(self) -> Iterable[StepSeries]:
        """Yield every series of the log."""
        yield from (
            self.steps,
            self.lines,
            self.uses,
            self.traffic,
            self.experts,
            *self.own.values(),
            *self.measured.values(),
        )

    # -- events --

    def _take(self, found: list) -> None:
        pending: list[dict] = []
        for event in found:
            if not self._reader.take(event):
                continue
            if event["kind"] == events.STEP:
                pending.append(event)
                continue
            self._take_steps(pending)
            pending = []
            with suppress(AttributeError, KeyError, TypeError, ValueError, OverflowError):  # of another version
                self._take_event(event)
        self._take_steps(pending)
        self._prune()

    def _take_steps(self, found: list[dict]) -> None:
        if not found:
            return
        rows = self.steps.new_rows(len(found))
        rows["step"] = [event["step"] for event in found]
        rows["time"] = [event["time"] for event in found]
        rows["values"] = [[number_of(event[name]) for name in STEP_COLUMNS] for event in found]
        self._add_rows(self.steps, rows)
        self._see_time(found[0])
        self._see_time(found[-1])

    def _take_event(self, event: dict) -> None:
        kind = event["kind"]
        self._see_time(event)
        if kind == events.RUN_STARTED:
            self.names[str(event.get("run", ""))[:200]] = None
            self._go_back(event["from_step"])
        elif kind == events.ROLLED_BACK:
            self._go_back(event["to_step"])
        elif kind == events.PROGRESS:
            self._add(self.lines, event, LINE_COLUMNS)
        elif kind == events.WAITS:
            self._add(self.uses, {**event, **{use: (event.get(use) or {}).get("mean") for use in USES}}, tuple(USES))
            if by_axis := traffic_of(event):
                self._add(self.traffic, {"step": event["step"], "time": event["time"], **by_axis}, TRAFFIC_COLUMNS)
        elif kind == events.EXPERTS:
            self._add(self.experts, over_layers(event), EXPERT_COLUMNS)
        elif kind == events.METRICS:
            for name, value in event["values"].items():
                name = f"{event['by']}/{name}"[:200]
                if len(self.own) < _MOST_SERIES or name in self.own:
                    self._add(self.own.setdefault(name, StepSeries("value")), {**event, "value": value}, ("value",))
        elif kind in (events.MEASURED, events.SOURCES):
            for name, value in measured_numbers(event, self.measured).items():
                if name not in self.measured:
                    self.measured[name] = StepSeries("value", most_rows=MOST_ROWS if name in SCALARS else _MOST_NAMED)
                self._add(self.measured[name], {**event, "value": value}, ("value",))
        elif kind == events.SAMPLE:
            for field in ("prompt", "text"):
                if len(text := str(event.get(field, ""))) > _MOST_TEXT:
                    event[field] = text[:_MOST_TEXT] + " …"

    def _add(self, series: StepSeries, event: Mapping, columns: tuple[str, ...]) -> None:
        row = series.new_rows(1)
        row["step"], row["time"], row["values"] = (
            event["step"],
            event["time"],
            [number_of(event.get(c)) for c in columns],
        )
        self._add_rows(series, row)

    def _add_rows(self, series: StepSeries, rows: np.ndarray) -> None:
        before, thinned = series.last_step, series.skipped
        series.extend(rows)
        if rows["step"][0] <= before or series.skipped > thinned or np.any(np.diff(rows["step"]) <= 0):
            self.generation += 1

    def _go_back(self, step: int) -> None:
        went = [series.go_back(step) for series in self.all_series()]
        if any(went):
            self.generation += 1

    def _see_time(self, event: Mapping) -> None:
        seconds = event["time"]
        before = seconds if self.last_event is None else self.last_event
        if seconds < before - _JUMP_SECONDS and event.get("late") is not True:  # late: kept until it could be written
            self.clock_jumps += 1
            self.last_event = seconds
        else:
            self.last_event = max(seconds, before)

    def _prune(self) -> None:
        """Leave of the events of each kind the newest ones."""
        for name, found in vars(self.data).items():
            most = _MOST_STEPS if name == "steps" else _MOST_EVENTS
            if isinstance(found, list) and len(found) > 2 * most:
                self.left_out[name] += len(found) - most
                del found[:-most]
            elif isinstance(found, dict) and name != "hashes" and len(found) > 2 * most:
                for key in list(found)[:-most]:
                    del found[key]
        for values in (*self.data.metrics.values(), *self.data.measured.values()):
            if len(values) > 2 * _MOST_EVENTS:
                for key in list(values)[:-_MOST_EVENTS]:
                    del values[key]

    def _take_alerts(self, found: list) -> None:
        for values in found:
            with suppress(KeyError, TypeError, ValueError, OverflowError):
                add_record(self.alerts, record_of(values))
        if len(self.alerts) > 2 * _MOST_ALERTS:  # those that are over first, then the oldest
            ids = sorted(self.alerts, key=lambda one: self.alerts[one].over is None)
            for one in ids[: len(ids) - _MOST_ALERTS]:
                del self.alerts[one]
                self.alerts_left_out += 1

    def _read_tail(self, *, wanted: bool) -> None:
        """Read the end of a log that is not read yet; of the other files the tail has what this run read."""
        if not wanted or not self._log.left_bytes:
            self.tail = None
            return
        tail = self.tail = self.tail or LiveRun(self.folder.root, _TAIL_BYTES)
        tail._read_log()
        tail.data.run, tail.data.tokens, tail.data.plan = self.data.run, self.data.tokens, self.data.plan
        tail.ranks, tail.running = self.ranks, self.running


def distinguish(runs: Sequence[LiveRun]) -> None:
    """Give runs of one name names with their folders."""
    for run in runs:
        run.shares_name = False
    names = Counter(run.name for run in runs)
    for run in runs:
        run.shares_name = names[run.name] > 1
