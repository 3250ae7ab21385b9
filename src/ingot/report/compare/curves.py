"""A run as curves over steps, tokens, FLOPs or time, for a comparison with other runs. No torch.

Steps that the run went back from, and has not trained again, are in no curve.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np

from ingot.errors import DataError, UsageError
from ingot.events import read_events
from ingot.report.evaluations import evaluated, newest_by_step
from ingot.report.facts import RunData, drop_after, no_run_folder, read_run_events, require_log
from ingot.report.readable import is_finite
from ingot.report.run_state import state_of, waits_for_nodes
from ingot.schema import events
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import TokenManifest, read_token_manifest
from ingot.theory.flops import train_flops_per_token
from ingot.theory.goodput import GoodputMeter, goodput_share
from ingot.theory.rules import recorded_run
from ingot.trainer.resilience.lock import is_locked

Axis = Literal["tokens", "flops", "steps", "time"]
AXES: tuple[Axis, ...] = ("tokens", "flops", "steps", "time")
AxisFunction = Callable[[Sequence[float] | np.ndarray], np.ndarray]  # steps -> values of the axis
_STDERR = "_stderr"


class Curve(NamedTuple):
    """Values by x: float64 arrays of equal length, in the order of x."""

    x: np.ndarray
    y: np.ndarray


@dataclass(kw_only=True)
class ValidData(RunData):
    """The data of a run without the steps and log lines that it went back from.

    went_back: for each time that it did, the number of faults, roll-backs and vetoes before, and the step. last_times:
    number of attempts -> Unix seconds of the newest step before the next attempt began. headless: the first event of a
    step, if the log has no start before it.
    """

    went_back: list[tuple[tuple[int, int, int], int]] = field(default_factory=list)
    last_times: dict[int, float] = field(default_factory=dict)
    headless: dict | None = None

    def go_back(self, step: int) -> None:
        """Drop what is after `step`, too: it was not trained again yet."""
        self.note_head()
        newest = [table[next(reversed(table))]["time"] for table in (self.steps, self.progress) if table]
        attempts = len(self.starts)
        self.last_times[attempts] = max(*newest, self.last_times.get(attempts, 0.0), 0.0)
        self.went_back.append(((len(self.faults), len(self.roll_backs), len(self.vetoes)), step))
        super().go_back(step)
        drop_after(self.steps, step)

    def note_head(self) -> None:
        """Note the first step, if the log has it without the start of its attempt."""
        first = [table[next(iter(table))] for table in (self.steps, self.progress) if table]
        if first and not self.starts and self.headless is None:
            self.headless = min(first, key=itemgetter("time"))

    def trained_seconds(self, times: np.ndarray) -> np.ndarray:
        """Return the time that the run had trained at the Unix seconds `times`: that of all attempts, from the start of
        each to its last step, without the pauses between them. If the log lacks the first start, its first step counts
        as one."""
        began = [start["time"] for start in self.starts]
        ends = [self.last_times.get(number, 0.0) for number in range(1, len(began))]
        if self.headless:
            ends = [self.last_times.get(0, 0.0)] * bool(began) + ends
            began = [self.headless["time"], *began]
        starts = np.maximum.accumulate(np.array(began, float))
        before = np.concatenate([[0.0], np.cumsum(np.maximum(np.array(ends, float) - began[: len(ends)], 0.0))])
        attempt = np.maximum(np.searchsorted(starts, times, side="right") - 1, 0)
        return before[attempt] + np.maximum(times - np.array(began)[attempt], 0.0)


class ComparedRun:
    """A run of a comparison.

    path: its folder, as it was named. config: its settings. data: its valid events. tokens, heldout: the manifests of
    its token folders; None if they cannot be read. running: a process trains it now. first_step: the first one with a
    finite loss. bytes_per_token: bits per byte are
    the loss divided by it and by ln 2; None if the log has none.
    Raises UsageError for a folder without a run, without an event log, or without a step in it; DataError or
    ConfigError for files that cannot be read.
    """

    def __init__(self, path: Path):
        self.path, folder = path, RunFolder(path)
        if not folder.config.is_file():
            raise no_run_folder(path)
        require_log(folder)
        self.config: RunConfig = recorded_run(folder.config)
        self.data = ValidData(folder=folder)
        read_run_events(self.data)
        self.data.note_head()
        self.running = is_locked(folder.lock)
        steps = [step for step, event in self.data.steps.items() if math.isfinite(event["loss"])]
        if not steps:
            wait = f"wait for the first log line (ingot status {path}), or leave this run out"
            began_anew = "leave this run out: it is finished, and its log has no step, as after it came from its store"
            raise UsageError(
                "E-COMPARE-NO-STEPS",
                f"{path} has no step {'with a finite loss in its log' if self.data.steps else 'in its log'}",
                rule="a comparison needs the loss of some steps, which are logged every watch.log_every steps",
                fix=began_anew if self.data.finished else wait,
                run=str(path),
            )
        self.first_step = min(steps)
        self.tokens = _manifest(path / self.config.data.tokens)
        self.heldout = _manifest(path / self.config.data.heldout) if self.config.data.heldout else None
        ratios = [one["loss"] / one["bpb"] / math.log(2) for one in self._lines("loss", "bpb") if one["bpb"] > 0]
        self.bytes_per_token = median(ratios) if ratios else None

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def step(self) -> int:
        """The last valid step in the log."""
        return self.data.last_step

    @property
    def state(self) -> str:
        """The state in a word (report/run_state.py)."""
        waits = waits_for_nodes(self.data.stepped_down, self.config)
        return state_of(running=self.running, end=self.data.end, steps=len(self.data.steps), waits=waits)

    def _lines(self, *names: str) -> list[dict]:
        """Return the valid log lines that have these fields as finite numbers, in the order of steps."""
        lines = (self.data.progress[step] for step in sorted(self.data.progress))
        return [line for line in lines if all(is_finite(line.get(name)) for name in names)]

    # -- axes --

    def axis(self, by: Axis) -> AxisFunction:
        """Return the function from steps to tokens, FLOPs, steps, or seconds of training."""
        steps, x = {"tokens": self._tokens, "flops": self._flops, "steps": self._steps, "time": self._time}[by]()
        x = np.maximum.accumulate(x)
        return lambda wanted: np.interp(np.asarray(wanted, float), steps, x)

    def _steps(self) -> tuple[np.ndarray, np.ndarray]:
        ends = np.array([0.0, max(self.step, 1)])
        return ends, ends

    def _tokens(self) -> tuple[np.ndarray, np.ndarray]:
        lines = self._lines("tokens")
        steps, tokens = [0.0, *(float(one["step"]) for one in lines)], [0.0, *(float(one["tokens"]) for one in lines)]
        if self.step > steps[-1]:
            tokens.append(tokens[-1] + (self.step - steps[-1]) * self.config.tokens_per_step)
            steps.append(float(self.step))
        return np.array(steps), np.array(tokens)

    def _flops(self) -> tuple[np.ndarray, np.ndarray]:
        steps, tokens = self._tokens()
        rates: list[tuple[float, Any]] = []
        for one in self.data.starts:
            rates = [rate for rate in rates if rate[0] < one["from_step"]]  # of steps that were trained again
            rates.append((float(one["from_step"]), one.get("flops_per_token")))
        if not all(is_finite(rate) and rate > 0 for _, rate in rates) or not rates:
            rates = [(0.0, train_flops_per_token(self.config.model, self.config.train.seq_len))]
        every = np.unique([*steps, *(step for step, _ in rates if step <= steps[-1])])
        grown = np.diff(np.interp(every, steps, tokens))
        attempt = np.searchsorted([step for step, _ in rates], every[:-1], side="right") - 1
        rate = np.array([rate for _, rate in rates], float)[np.maximum(attempt, 0)]
        return every, np.concatenate([[0.0], np.cumsum(grown * rate)])

    def _time(self) -> tuple[np.ndarray, np.ndarray]:
        data = self.data
        begin = data.headless["step"] if data.headless else data.starts[0]["from_step"]
        # Steps are written with the next log line, so only the last one of a line has its own time.
        found = {step: event["time"] for step, event in data.progress.items() if step > begin}
        if self.step > max(found, default=begin):
            found[self.step] = data.steps[self.step]["time"]
        steps = sorted(found)
        seconds = data.trained_seconds(np.array([found[step] for step in steps], float))
        return np.array([begin, *steps], float), np.array([0.0, *seconds])

    # -- curves, by step --

    def of_steps(self, name: str) -> Curve:
        """Return a field of the `step` events: "loss", "grad_norm" or "lr"; without values that are not finite."""
        values = [(step, self.data.steps[step][name]) for step in sorted(self.data.steps)]
        return _curve((step, value) for step, value in values if math.isfinite(value))

    def of_lines(self, name: str, *, first_lines: bool = False) -> Curve:
        """Return a field of the log lines, like "mfu". first_lines: with the first of each attempt, which has the time
        of the start in its speeds."""
        steps = sorted(self.data.progress)
        times = np.maximum.accumulate(np.array([self.data.progress[step]["time"] for step in steps], float))
        places = np.searchsorted(times, [one["time"] for one in self.data.starts])
        first = {steps[place] for place in places if place < len(steps)}
        lines = (one for one in self._lines(name) if first_lines or one["step"] not in first)
        return _curve((one["step"], one[name]) for one in lines)

    def evaluations(self) -> tuple[dict[str, Curve], dict[str, Curve]]:
        """Return the results on held-out text and tasks, and the standard errors of those that have one, both by the
        names of metrics: "eval/bpb", "eval/TASK/METRIC"."""
        values: dict[str, list[tuple[float, float]]] = {}
        errors: dict[str, list[tuple[float, float]]] = {}
        for one in evaluated(self.data):
            if math.isfinite(one["bpb"]):
                values.setdefault("eval/bpb", []).append((one["step"], one["bpb"]))
        for event in newest_by_step(self.data.task_scores):
            for name, value, error in _scores(event):
                values.setdefault(name, []).append((event["step"], value))
                if error is not None:
                    errors.setdefault(name, []).append((event["step"], error))
        return (
            {name: _curve(found) for name, found in values.items()},
            {name: _curve(found) for name, found in errors.items()},
        )

    def goodput(self) -> Curve:
        """Return the goodput of the run so far, by step (theory/goodput.py); steps that are void now count as lost."""
        meter, found = GoodputMeter(math.inf), {}
        kinds = (events.RUN_STARTED, events.PROGRESS, events.STOPPED, events.FINISHED)
        for event in read_events(self.data.folder.events, *kinds):
            try:
                meter.take(event)
                if event["kind"] == events.PROGRESS:
                    found[event["step"]] = meter.elapsed
            except (KeyError, TypeError, ValueError):  # it was not used by the other curves either
                continue
        productive, shares, borders = 0.0, [], sorted(self.data.progress)
        if borders and found.get(borders[0], 0.0) > 0:  # it was trained again: the clock ran since the line before
            borders.insert(0, min((start["from_step"] for start in self.data.starts), default=borders[0]))
        for before, step in pairwise(borders):
            productive += self.data.trained_between(before, step) * max(self.data.progress[step]["step_seconds"], 0.0)
            if (share := goodput_share(productive, found.get(step, 0.0))) is not None:
                shares.append((step, share))
        return _curve(shares)

    def incidents(self) -> Mapping[str, Sequence[int]]:
        """Return faults, roll-backs and skipped updates by the names of their counts, each as the last valid step that
        the run had trained before it."""
        lost = [[one.fault_step - 1 if one.resumed_from is None else one.resumed_from] for one in self.data.faults]
        back = [[one["to_step"]] for one in self.data.roll_backs]
        skipped = [[step - 1 for step in one["steps"]] for one in self.data.vetoes]
        names, found = ("run/faults", "run/roll_backs", "run/skipped_steps"), {}
        for kind, (name, each) in enumerate(zip(names, (lost, back, skipped), strict=True)):
            later = [[to for counts, to in self.data.went_back if counts[kind] > number] for number in range(len(each))]
            found[name] = [min([step, *to]) for steps, to in zip(each, later, strict=True) for step in steps]
        return found


def _curve(points: Iterable[tuple[float, float]]) -> Curve:
    found = np.array([*points], float).reshape(-1, 2)
    return Curve(found[:, 0], found[:, 1])


def _scores(event: dict) -> Iterable[tuple[str, float, float | None]]:
    """Yield (name, value, standard error or None) of the scores of a `task_scores` event."""
    scores = event.get("scores")
    for task, values in scores.items() if isinstance(scores, dict) else ():
        for metric, value in values.items() if isinstance(values, dict) else ():
            if _STDERR in metric or not is_finite(value):
                continue
            name, _, filtered = metric.partition(",")
            error = values.get(name + _STDERR + (f",{filtered}" if filtered else ""))
            yield f"eval/{task}/{metric}", float(value), float(error) if is_finite(error) and error > 0 else None


def _manifest(folder: Path) -> TokenManifest | None:
    try:
        return read_token_manifest(folder) if (folder / "manifest.json").is_file() else None
    except (DataError, OSError):
        return None
