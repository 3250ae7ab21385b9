"""The event log and the artifacts of a run, read once into a `RunData`, without torch.

If an artifact is missing, its field is empty and the report leaves out its section. Events that lack a field that their
kind requires are counted in `unreadable_events` and not used.
"""

import json
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.config import from_dict
from ingot.errors import DataError, UsageError
from ingot.events import read_events
from ingot.observe.scalars import scalars_of
from ingot.report.faults import FaultReader, FaultRecord
from ingot.report.incidents import MARKED, MOST_INCIDENTS, Incident, incident_of
from ingot.report.readable import is_passed_line, is_readable
from ingot.report.run_state import ENDS, stepped_down
from ingot.report.silence import LogSilence
from ingot.report.timeline import KINDS
from ingot.schema import events as kinds
from ingot.schema.corpus import CorpusManifest
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import TokenManifest, read_token_manifest
from ingot.storage import sha256_file
from ingot.theory.rules import recorded_run
from ingot.trainer.checkpoint.resumable import find_resume_point
from ingot.trainer.resilience.lock import is_locked

# Events by which the ranks show that they run.
_OF_RANKS = (kinds.STEP, kinds.PROGRESS, kinds.CHECKPOINT, kinds.EVALUATION, kinds.SAMPLE, kinds.FINISHED)
VOID = "void"
_MOST_MEASURED = 1024  # names; a damaged log may have any number
LOSS_BEFORE, LOSS_AFTER = "loss_before", "loss_after"  # of a roll-back


@dataclass(frozen=True, kw_only=True)
class Twin:
    """The content of `twin.json`: the comparison of a run with the same run without a fault, over the steps first_step
    to last_step (included).

    kill_step: the step at which a rank was killed. resumed_from: the step of the checkpoint from which the run
    continued. max_difference: the largest difference of a loss or gradient norm.
    """

    first_step: int
    last_step: int
    steps: int
    equal: bool
    max_difference: float
    kill_step: int
    resumed_from: int


@dataclass(kw_only=True)
class RunData:
    """The events and artifacts of one run; events are dicts as in schema/events.py.

    steps, waits, experts: the last event of that kind for each step. progress: the log lines of steps that the run did
    not go back from. valid_step: the last step that it did not go back from. newest_line: the last log line, valid or
    not. metrics: (callback, or "loss" for loss terms; name) -> step -> the last value of that step, from `metrics`
    events. measured: name (schema/metrics.py) -> step -> value, from `measured` and `sources` events. vetoes,
    roll_backs, passed, measures, findings: the `skipped`, `rolled_back`, `passed`, `guard` and `finding` events.
    passed_steps: in order, those of the `passed` events that the run did not go back from. timeline: these, and all
    others that have an entry in it (timeline.py), in the order of the log; a `rolled_back` event also has the loss of
    its `to_step` at that time, and (step, loss) of the first step from its `from_step` on that was trained after it,
    None while unknown. sanity: the `sanity` events. ranges: the last `gradient_range` event of each step. health: the
    `health` events. unsaved: the `checkpoint_failed` and `checkpoint_skipped` events. weights_saves, stored, snapshots,
    stragglers: the `weights_saved`, `checkpoint_stored`, `snapshot_kept` and `straggler` events. hashes: the SHA-256 of
    each named item. active_seconds: the time from the start of each attempt to its last event, summed; pauses between
    attempts are not included. incidents: the newest; incident_counts: all, by kind. running: a command trains the run
    now. unused: what is wrong with the newest checkpoint, if training would not resume from it.
    """

    folder: RunFolder
    run: RunConfig | None = None
    plan: Plan | None = None
    corpus: CorpusManifest | None = None
    tokens: TokenManifest | None = None
    twin: Twin | None = None
    hashes: dict[str, str] = field(default_factory=dict)
    starts: list[dict] = field(default_factory=list)
    steps: dict[int, dict] = field(default_factory=dict)
    progress: dict[int, dict] = field(default_factory=dict)
    newest_line: dict | None = None
    valid_step: int = 0
    waits: dict[int, dict] = field(default_factory=dict)
    experts: dict[int, dict] = field(default_factory=dict)
    metrics: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    measured: dict[str, dict[int, float]] = field(default_factory=dict)
    checkpoints: list[dict] = field(default_factory=list)
    weights_saves: list[dict] = field(default_factory=list)
    stored: list[dict] = field(default_factory=list)
    snapshots: list[dict] = field(default_factory=list)
    stragglers: list[dict] = field(default_factory=list)
    refused: list[dict] = field(default_factory=list)
    unsaved: list[dict] = field(default_factory=list)
    changed_settings: list[dict] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)
    samples: list[dict] = field(default_factory=list)
    task_scores: list[dict] = field(default_factory=list)
    background: list[dict] = field(default_factory=list)
    stages: list[dict] = field(default_factory=list)
    faults: list[FaultRecord] = field(default_factory=list)
    vetoes: list[dict] = field(default_factory=list)
    roll_backs: list[dict] = field(default_factory=list)
    passed: list[dict] = field(default_factory=list)
    passed_steps: list[int] = field(default_factory=list)
    measures: list[dict] = field(default_factory=list)
    findings: list[dict] = field(default_factory=list)
    timeline: list[dict] = field(default_factory=list)
    sanity: list[dict] = field(default_factory=list)
    ranges: dict[int, dict] = field(default_factory=dict)
    start_times: list[dict] = field(default_factory=list)
    health: list[dict] = field(default_factory=list)
    incidents: deque[Incident] = field(default_factory=lambda: deque(maxlen=MOST_INCIDENTS))
    incident_counts: Counter[str] = field(default_factory=Counter)
    exported: dict | None = None
    finished: dict | None = None
    stopped: dict | None = None
    end: str = ""  # the kind of the last event of run_state.ENDS
    stepped_down: float | None = None  # when its leader did, in Unix seconds (run_state.py)
    active_seconds: float = 0.0
    unreadable_events: int = 0
    running: bool = False
    unused: str = ""

    @property
    def last_step(self) -> int:
        return max((*self.steps, *self.progress, 0))

    def trained_between(self, before: int, step: int) -> int:
        """Return how many of the steps before+1..step were trained: their data were not passed."""
        return step - before - (bisect_right(self.passed_steps, step) - bisect_right(self.passed_steps, before))

    def pass_steps(self, steps: Iterable[int]) -> None:
        """Take in that the data of these steps were passed."""
        for step in steps:
            place = bisect_left(self.passed_steps, step)
            if self.passed_steps[place : place + 1] != [step]:
                self.passed_steps.insert(place, step)

    def go_back(self, step: int) -> None:
        """Drop the log lines of steps after `step`, and mark their evaluations and samples as void: the run is there
        again."""
        self.valid_step = min(self.valid_step, step)
        drop_after(self.progress, step)
        del self.passed_steps[bisect_right(self.passed_steps, step) :]
        for values in self.measured.values():
            drop_after(values, step)
        if self.finished and self.finished["step"] > step:
            self.finished = None
        for event in (*self.evaluations, *self.samples, *self.task_scores):
            if event["step"] > step:
                event[VOID] = True


def measured_numbers(event: dict, known: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a `measured` or `sources` event by name, without new names beyond a limit. known: the names
    so far."""
    with suppress(OverflowError):  # an integer of hundreds of digits
        found = scalars_of(event)
        new = [name for name in found if name not in known][: max(_MOST_MEASURED - len(known), 0)]
        return {name: value for name, value in found.items() if name in known or name in new}
    return {}


def drop_after(table: dict[int, Any], step: int) -> None:
    """Drop the entries of steps after `step` from a table in the order of steps."""
    while table and next(reversed(table)) > step:
        table.popitem()


def gather(run: Path, *, corpus: Path | None = None, twin: Path | None = None, stages: Path | None = None) -> RunData:
    """Return the data of the run folder `run`.

    corpus: a corpus folder; by default the folder next to the run's tokens, if the tokens were made from it.
    twin: a twin.json file. stages: an event log with `stage` events, if they are not in the log of the run.
    Raises UsageError if `run` has no event log, DataError if an artifact or the log cannot be read.
    """
    data = RunData(folder=RunFolder(run))
    require_log(data.folder)
    _read_artifacts(data, corpus)
    if twin:
        data.twin = _read_json(Twin, twin)
    data.running = is_locked(data.folder.lock)
    read_run_events(data)
    newest = find_resume_point(data.folder)
    if newest.problem:
        data.unused = f"The checkpoint of step {newest.newest_step:,}: {newest.problem}. " + (
            f"Training would resume from step {newest.step:,}." if newest.step else "No usable checkpoint is left."
        )
    if stages:
        data.stages += [event for event in _readable_events(stages, data) if event["kind"] == kinds.STAGE]
    return data


def require_log(folder: RunFolder) -> None:
    """Raise UsageError if a run folder does not exist or has no event log."""
    if not folder.root.is_dir():
        raise no_run_folder(folder.root)
    if not folder.events.is_file():
        raise UsageError(
            "E-RUN-NO-LOG",
            f"{folder.root} has no {folder.events.name}",
            rule="reports and diagnoses are made from the event log that `ingot train` writes into the run folder",
            fix="name the run folder: ingot report RUN, ingot explain slow RUN",
            run=str(folder.root),
        )


def no_run_folder(root: Path) -> UsageError:
    """Return the error for a folder that has no run.toml."""
    found = "has no run.toml: no run was started in it" if root.is_dir() else "does not exist"
    return UsageError(
        "E-RUN-FOLDER",
        f"{root} {found}",
        rule="a run folder has a run.toml, which `ingot train` writes",
        fix="name the run folder, or start a run: ingot train RUN_FILE",
        run=str(root),
    )


def _read_artifacts(data: RunData, corpus: Path | None) -> None:
    folder = data.folder
    if folder.config.is_file():
        data.run = recorded_run(folder.config)
        data.hashes["run.toml"] = sha256_file(folder.config)
        manifest = folder.root / data.run.data.tokens / "manifest.json"
        if manifest.is_file():
            data.tokens = read_token_manifest(manifest.parent)
            data.hashes["token stream found"] = data.tokens.fingerprint()
            data.hashes["tokenizer"] = data.tokens.tokenizer_sha256
            data.hashes["corpus"] = data.tokens.corpus_sha256
            beside = manifest.parent.parent.parent / "corpus"
            if corpus is None and (beside / "corpus.json").is_file():
                same = sha256_file(beside / "corpus.json") == data.tokens.corpus_sha256
                corpus = beside if same else None
    if folder.plan.is_file():
        data.plan = _read_json(Plan, folder.plan)
    if corpus:
        data.corpus = _read_json(CorpusManifest, corpus / "corpus.json")
        data.hashes["corpus"] = sha256_file(corpus / "corpus.json")


def _json(path: Path) -> dict:
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            "E-ARTIFACT-UNREADABLE",
            f"{path} cannot be read: {error}",
            rule="artifacts are JSON objects",
            fix=f"restore {path.name} from a copy, or make it again with the command that wrote it",
            path=str(path),
        ) from None
    return values


def _read_json(kind, path: Path):
    return from_dict(kind, _json(path), where=lambda key: f"{path} ({key})")


def read_run_events(data: RunData) -> None:
    """Read the event log of `data.folder` into `data`. Raises DataError if no event can be read."""
    reader = EventReader(data)
    used = [reader.take(event) for event in read_events(data.folder.events)]
    if not any(used):
        raise DataError(
            "E-LOG-NO-EVENTS",
            f"{data.folder.events} has no event that can be read",
            rule="reports and diagnoses are made from the event log",
            fix="restore the file from a copy; checkpoints do not depend on the event log",
            path=str(data.folder.events),
        )


class EventReader:
    """Takes the events of a log, in order, into `data`. One that lacks what its kind requires is counted there, and not
    used. silence: how long the run has been silent."""

    def __init__(self, data: RunData):
        self._data, self._faults, self.silence = data, FaultReader(data.steps), LogSilence()
        self._back: dict | None = None  # the last roll-back, until the run is where it went back from
        self._started = self._alive = None  # of this attempt, in Unix seconds
        self._earlier_seconds = 0.0
        self._lists = {
            kinds.CHECKPOINT: data.checkpoints,
            kinds.WEIGHTS_SAVED: data.weights_saves,
            kinds.CHECKPOINT_STORED: data.stored,
            kinds.SNAPSHOT_KEPT: data.snapshots,
            kinds.STRAGGLER: data.stragglers,
            kinds.CHECKPOINT_REFUSED: data.refused,
            kinds.CHECKPOINT_FAILED: data.unsaved,
            kinds.CHECKPOINT_SKIPPED: data.unsaved,
            kinds.SETTING_CHANGED: data.changed_settings,
            kinds.EVALUATION: data.evaluations,
            kinds.SAMPLE: data.samples,
            kinds.TASK_SCORES: data.task_scores,
            kinds.BACKGROUND_EVALUATION: data.background,
            kinds.STAGE: data.stages,
            kinds.RUN_STARTED: data.starts,
            kinds.SKIPPED: data.vetoes,
            kinds.ROLLED_BACK: data.roll_backs,
            kinds.PASSED: data.passed,
            kinds.GUARD: data.measures,
            kinds.FINDING: data.findings,
            kinds.SANITY: data.sanity,
            kinds.START_TIMES: data.start_times,
            kinds.HEALTH: data.health,
        }
        self._by_step = {
            kinds.STEP: data.steps,
            kinds.PROGRESS: data.progress,
            kinds.WAITS: data.waits,
            kinds.EXPERTS: data.experts,
            kinds.GRADIENT_RANGE: data.ranges,
        }

    def take(self, event) -> bool:
        """Take in an event, as it was read. Return whether it is used."""
        data = self._data
        if not is_readable(event):
            data.unreadable_events += 1
            return False
        kind = event["kind"]
        self._faults.see(event)
        self.silence.see(event)
        data.faults = self._faults.found
        if kind in KINDS:
            data.timeline.append(event)
        data.stepped_down = stepped_down(data.stepped_down, event)
        if kind in ENDS:
            data.end = kind
        if kind == kinds.ROLLED_BACK:
            event[LOSS_BEFORE], event[LOSS_AFTER] = data.steps.get(event["to_step"], {}).get("loss"), None
            self._back = event
        elif kind == kinds.STEP and self._back and event["step"] >= self._back["from_step"]:
            self._back[LOSS_AFTER] = event["step"], event["loss"]
            self._back = None
        if kind in (kinds.ROLLED_BACK, kinds.RUN_STARTED):
            data.go_back(event["to_step" if kind == kinds.ROLLED_BACK else "from_step"])
            data.stopped = None
        if kind == kinds.PASSED:
            data.pass_steps(event["steps"])
        if kind in self._lists:
            self._lists[kind].append(event)
        elif is_passed_line(event):
            data.valid_step = event["step"]
        elif kind in self._by_step:
            self._by_step[kind][event["step"]] = event
            if kind in (kinds.STEP, kinds.PROGRESS):
                data.valid_step = event["step"]
            if kind == kinds.PROGRESS:
                data.newest_line = event
        elif kind == kinds.METRICS:
            for name, value in event["values"].items():
                data.metrics.setdefault((event["by"], name), {})[event["step"]] = value
        elif kind in (kinds.MEASURED, kinds.SOURCES):
            for name, value in measured_numbers(event, data.measured).items():
                data.measured.setdefault(name, {})[event["step"]] = value
        elif kind in (kinds.FINISHED, kinds.STOPPED, kinds.EXPORTED):
            setattr(data, kind, event)
        self._count_time(kind, event)
        if kind in MARKED:
            self._mark(kind, event)
        return True

    def _mark(self, kind: str, event: dict) -> None:
        with suppress(AttributeError, KeyError, TypeError, ValueError, OverflowError):  # of another version
            if (incident := incident_of(event, self._data.valid_step)) is not None:
                self._data.incidents.append(incident)
                self._data.incident_counts[kind] += 1

    def _count_time(self, kind: str, event: dict) -> None:
        if kind == kinds.RUN_STARTED:
            self._earlier_seconds = self._data.active_seconds
            self._started = self._alive = event["time"]
        elif kind in _OF_RANKS and not event.get("background") and not event.get("late"):  # late: of an earlier time
            self._alive = event["time"]
        if self._started and self._alive:
            self._data.active_seconds = self._earlier_seconds + max(self._alive - self._started, 0.0)


def _readable_events(path: Path, data: RunData) -> Iterator[dict]:
    """Yield the events of the log `path` that have the fields that their kind requires; count the others in `data`."""
    for event in read_events(path):
        if is_readable(event):
            yield event
        else:
            data.unreadable_events += 1
