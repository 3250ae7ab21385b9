"""The state of a run, read from its event log and its lock, while the run may be training. Nothing is written."""

import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ingot.errors import DataError
from ingot.events import read_events
from ingot.report.facts import no_run_folder
from ingot.report.faults import FaultReader, fault_of
from ingot.report.readable import has_values, is_finite, is_passed_line, is_readable
from ingot.report.robust import shown_range
from ingot.report.run_state import ENDS, state_of, stepped_down, waits_for_nodes
from ingot.report.silence import LogSilence
from ingot.report.timeline import KINDS, TimelineEntry, entry_of
from ingot.schema import events
from ingot.schema.alert import alert_of
from ingot.schema.alert import described as alert_text
from ingot.schema.checkpoint import FULL, WEIGHTS
from ingot.schema.guard import Guard
from ingot.schema.guard_answer import given_answer
from ingot.schema.guard_record import described, measure_of, read_measures
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import recorded_run
from ingot.trainer.checkpoint.health import health_of_step
from ingot.trainer.checkpoint.manifest import MANIFEST
from ingot.trainer.checkpoint.resumable import find_resume_point, open_question
from ingot.trainer.resilience.failure_kinds import VALUES
from ingot.trainer.resilience.lock import is_locked

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 24


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The state of a run, for `ingot status`. Times are Unix seconds; a value is None if it is not known yet.

    state: "running", "waiting" (its leader stepped down, and waits for other nodes), "finished", "stopped" (on
    request), "failed" (the last attempt ended in a fault), "interrupted" (the process ended without an event, as after
    a power loss), "not started", or "unknown" (checkpoints exist, but the event log is missing or unreadable: see
    `log_damage`; `step` is then the step of the newest checkpoint).
    faults: each with its rank, cause and step. failure: of a failed run, its last fault in words.
    checkpoint_step, checkpoint_time: the checkpoint that training would resume from, by manifests and file sizes.
    checkpoint_health: of its weights, in words (trainer/checkpoint/health.py); "" without one.
    unused_step, unused_reason: the newest checkpoint that was saved, if training would not resume from it; else None.
    fault: of a failed run, the `fault` event that ended it: failure, code, cause, step; None in every other state.
    failed_step, failed_reason: the newest save that failed, if none succeeded since; else None.
    weights_step, weights_time: the newest save of the weights alone.
    last_save: the newest `checkpoint` event: step, bytes, and the seconds of stall, snapshot, write and verify.
    kept_step, kept_time, kept_nodes: the newest snapshot in memory, and how many nodes have each part of it, at least.
    kept_seconds: how long its copies took.
    stored_step, stored_time: the newest checkpoint in the run's store. stored_seconds: how long its upload took; None
    if an earlier attempt sent it. unstored_reason: why the last upload failed.
    skipped_steps: the steps whose updates the policy skipped. roll_backs: (from step, to step) of each roll-back.
    happened: the newest entry of the timeline (timeline.py): what the guards of the run found or did last.
    damaged_ranks: the ranks whose state or gradients were found damaged, and those among which a damaged one is.
    guard: the last measure of the guard, in words; "": none. alerts: the last of each kind, in words, the newest last.
    quarantined: what the run leaves out of its tokens: the `quarantined` events, oldest first.
    losses: the loss of every step, in order; the value of a repeated step replaces the first value.
    still_seconds: the time without a step, if the job runs and that time is far longer than usual (silence.py); else
    None.
    tokens_per_second and eta_seconds are then None, because those of the newest step are no longer true.
    layout: the mesh axes larger than 1 of the last attempt, with "ep" and "context" (schema/events.py).
    fallback: the newest `layout` event, if the job does not have the layout of the run file.
    experts: the last `experts` event (layers, load_cv, max_load, dropped, fallback, ... as lists with one value per
    layer; telemetry/progress.py), without the load of every expert.
    start_times: the newest `start_times` event: its seconds by phase (resilience/start_times.py) and total_seconds.
    restart_seconds: the total of each restart that was measured. stragglers: the newest `straggler` event of each rank
    that is slow. drained: the `health` events after which a machine left the run, or was to leave it, oldest first.
    spares: the newest `spares` event: how many spare machines wait, of how many that the run wants.
    fleet_check: the newest `fleet_check` event: the machines as they were measured, and which are unfit.
    passed: the data of the newest steps were passed, so they have no loss.
    metrics: callback, or "loss" for loss terms -> metric -> its newest value.
    mfu: of the newest log line; None on CPUs.
    """

    name: str
    state: str
    steps: int
    step: int
    ranks: int
    loss: float | None
    bpb: float | None
    heldout_bpb: float | None
    tokens_per_second: float | None
    eta_seconds: float | None
    last_event: float | None
    checkpoint_step: int | None
    checkpoint_time: float | None
    restarts: int
    faults: tuple[str, ...]
    fault: dict | None
    failure: str
    losses: tuple[float, ...]
    still_seconds: float | None = None
    checkpoint_health: str = ""
    unused_step: int | None = None
    unused_reason: str = ""
    failed_step: int | None = None
    failed_reason: str = ""
    weights_step: int | None = None
    weights_time: float | None = None
    last_save: dict | None = None
    kept_step: int | None = None
    kept_time: float | None = None
    kept_nodes: int = 0
    kept_seconds: float | None = None
    stored_step: int | None = None
    stored_time: float | None = None
    stored_seconds: float | None = None
    unstored_reason: str = ""
    skipped_steps: tuple[int, ...] = ()
    roll_backs: tuple[tuple[int, int], ...] = ()
    guard: str = ""
    happened: dict | None = None
    damaged_ranks: tuple[int, ...] = ()
    alerts: tuple[str, ...] = ()
    quarantined: tuple[dict, ...] = ()
    log_damage: str = ""
    layout: dict[str, int | str] = field(default_factory=dict)
    fallback: dict | None = None
    experts: dict | None = None
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    start_times: dict | None = None
    restart_seconds: tuple[float, ...] = ()
    stragglers: tuple[dict, ...] = ()
    drained: tuple[dict, ...] = ()
    spares: dict | None = None
    fleet_check: dict | None = None
    passed: bool = False
    mfu: float | None = None


def read_status(root: Path, now: float | None = None) -> RunStatus:
    """Return the status of the run folder `root`. now: the time of it, in Unix seconds; None: that of the call.

    Raises UsageError if the folder has no run.toml."""
    folder = RunFolder(root)
    if not folder.config.is_file():
        raise no_run_folder(root)
    run, log = recorded_run(folder.config), _Log()
    for event in read_events(folder.events):
        if isinstance(event, dict):
            log.take(event)
    last, losses = log.last, log.losses
    progress, weights = last.get(events.PROGRESS, {}), last.get(events.WEIGHTS_SAVED, {})
    kept, stored = last.get(events.SNAPSHOT_KEPT, {}), log.stored.get(FULL, {})
    failed = log.failures.get(FULL) or log.failures.get(WEIGHTS) or {}
    running, resumes = is_locked(folder.lock), find_resume_point(folder)
    still = log.silence.seconds(run, time.time() if now is None else now) if running else None
    # Without a log of the start, the newest checkpoint is all that is known of the run.
    unlogged = resumes.newest_step if not (losses or "end" in last) else 0
    waits = waits_for_nodes(log.stepped_down, run, now)
    state = state_of(running=running, end=last.get("end", {}).get("kind", ""), steps=len(losses), waits=waits)
    state = "unknown" if unlogged and not running else state
    return RunStatus(
        name=run.name,
        state=state,
        failure=fault_of(last["end"]).text if state == "failed" and is_readable(last["end"]) else "",
        steps=run.train.steps,
        step=max(log.reached, unlogged),
        ranks=last.get(events.RUN_STARTED, {}).get("world_size", run.parallel.world_size),
        loss=losses[max(losses)] if losses else None,
        bpb=progress.get("bpb"),
        mfu=mfu if is_finite(mfu := progress.get("mfu")) else None,
        heldout_bpb=last.get(events.EVALUATION, {}).get("bpb"),
        tokens_per_second=progress.get("tokens_per_second") if still is None else None,
        eta_seconds=progress.get("eta_seconds") if running and still is None else None,
        last_event=log.latest,
        checkpoint_step=resumes.step or None,
        checkpoint_time=_time_of(folder, resumes.step),
        checkpoint_health=_health(folder, resumes.step, run.guard),
        still_seconds=still,
        unused_step=resumes.newest_step if resumes.problem else None,
        unused_reason=resumes.problem,
        failed_step=failed.get("step"),
        failed_reason=str(failed.get("reason", "")),
        weights_step=weights.get("step"),
        weights_time=weights.get("time"),
        last_save=_without_kind(last.get(events.CHECKPOINT), "path", "store"),
        kept_step=kept.get("step"),
        kept_time=kept.get("time"),
        kept_nodes=kept.get("nodes", 0),
        kept_seconds=kept.get("seconds"),
        stored_step=stored.get("step"),
        stored_time=stored.get("time"),
        stored_seconds=stored.get("seconds") if stored.get("bytes") else None,
        unstored_reason=log.unstored.get(FULL) or log.unstored.get(WEIGHTS, ""),
        restarts=log.restarts,
        faults=tuple(f"{fault.text}, step {fault.fault_step:,}" for fault in log.faults.found),
        fault=_without_kind(last["end"]) if state == "failed" else None,
        skipped_steps=tuple(sorted(log.skipped)),
        roll_backs=tuple(log.roll_backs),
        guard=log.asked or log.guard,
        passed=log.passed_step == log.reached,
        happened=asdict(log.happened) if log.happened else None,
        damaged_ranks=tuple(sorted(log.damaged)),
        alerts=tuple(log.alerts.values()),
        quarantined=tuple(_without_kind(event) or {} for event in log.quarantined),
        losses=tuple(losses[step] for step in sorted(losses)),
        log_damage=_log_damage(folder) if unlogged else "",
        layout=last.get(events.RUN_STARTED, {}).get("layout", {}),
        fallback=_without_kind(last.get(events.LAYOUT)) if last.get(events.LAYOUT, {}).get("overrides") else None,
        experts=_without_kind(last.get(events.EXPERTS), "loads"),
        metrics=log.metrics,
        start_times=_without_kind(last.get(events.START_TIMES)),
        restart_seconds=tuple(log.restart_seconds),
        spares=_without_kind(last.get(events.SPARES)),
        fleet_check=_without_kind(last.get(events.FLEET_CHECK)),
        stragglers=tuple(_without_kind(log.slow[rank]) or {} for rank in sorted(log.slow)),
        drained=tuple(_without_kind(event) or {} for event in log.drained),
    )


@dataclass(kw_only=True)
class _Log:
    """The sum of the events of a run. last: the last event of each kind; its key "end" has the last event of the
    start or end of an attempt. reached: the step at which the run is, which has no loss if the attempt began or ended
    with a checkpoint from a store. failures, stored, unstored: by the kind of the save."""

    latest: float | None = None
    last: dict[str, dict] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    reached: int = 0
    failures: dict[str, dict] = field(default_factory=dict)
    stored: dict[str, dict] = field(default_factory=dict)
    unstored: dict[str, str] = field(default_factory=dict)
    restarts: int = 0
    restart_seconds: list[float] = field(default_factory=list)
    slow: dict[int, dict] = field(default_factory=dict)
    drained: list[dict] = field(default_factory=list)
    faults: FaultReader = field(default_factory=FaultReader)
    silence: LogSilence = field(default_factory=LogSilence)
    skipped: set[int] = field(default_factory=set)
    roll_backs: list[tuple[int, int]] = field(default_factory=list)
    guard: str = ""
    asked: str = ""
    passed_step: int = -1
    stepped_down: float | None = None
    happened: TimelineEntry | None = None
    damaged: set[int] = field(default_factory=set)
    alerts: dict[str, str] = field(default_factory=dict)
    quarantined: list[dict] = field(default_factory=list)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)

    def take(self, event: dict) -> None:
        """Take in the next event."""
        kind = event.get("kind", "")
        if is_readable(event):
            self.faults.see(event)
        self.silence.see(event)
        self.latest = event.get("time", self.latest)
        if is_passed_line(event):
            self.passed_step = event.get("step", 0)
            self.reached = self.passed_step
        elif kind != events.EVALUATION or event.get("step", 0) >= self.last.get(kind, {}).get("step", 0):
            self.last[kind] = event  # an evaluation in the background may come after one of a later step
        if kind in KINDS:
            with suppress(AttributeError, KeyError, TypeError, ValueError):  # of a version that wrote other fields
                self.happened = entry_of(event) or self.happened
                self.damaged |= {event["rank"]} if kind == events.STATE_DAMAGED else set()
        if kind == events.NODE and event.get("action") == "leads":
            self.last.pop(events.SPARES, None)  # it counts them anew
        if kind == events.STEP:
            self.losses[event["step"]] = event["loss"]
            self.reached = event["step"]
        elif kind == events.RUN_STARTED:
            self.slow.clear()
            self._go_back(event["from_step"])  # steps after the checkpoint from which this attempt started are repeated
        elif kind == events.METRICS and has_values(event):
            self.metrics.setdefault(event["by"], {}).update(event["values"])
        elif kind == events.SKIPPED:
            self.skipped.update(event["steps"])
        elif kind == events.QUARANTINED:
            self.quarantined.append(event)
        elif kind == events.GUARD:
            self.guard, self.asked = described(measure_of(event)), ""
        elif kind == events.GUARD_ASKED and isinstance(event.get("until"), int | float):
            clock = time.strftime("%H:%M:%S", time.localtime(event["until"]))
            self.asked = f"waits until {clock} for an answer about steps {event['first']}-{event['last']} (ingot guard)"
        elif kind == events.ALERT:
            alert = alert_of(event)
            self.alerts.pop(alert.alert, None)
            self.alerts[alert.alert] = alert_text(alert)
        elif kind == events.ROLLED_BACK:
            self.roll_backs.append((event["from_step"], event["to_step"]))
            self._go_back(event["to_step"])
        elif kind == events.RESTART:
            self.restarts += 1
        elif kind == events.STRAGGLER:
            self.slow.pop(event["rank"], None)
            if not event["ended"]:
                self.slow[event["rank"]] = event
        elif kind == events.HEALTH and event.get("verdict") in ("drain", "discard"):
            self.drained.append(event)
        elif kind == events.START_TIMES:
            if event["seconds"].get("kill") is not None:
                self.restart_seconds.append(event["total_seconds"])
        else:
            self._take_save(kind, event)
        if kind in (events.STOPPED, events.FINISHED):
            self.reached = event.get("step", self.reached)
        self.stepped_down = stepped_down(self.stepped_down, event)
        if kind in ENDS:
            self.asked = ""
            self.last["end"] = event

    def _take_save(self, kind: str, event: dict) -> None:
        what = event.get("what", FULL)
        if kind == events.CHECKPOINT:
            self.failures.clear()
        elif kind == events.WEIGHTS_SAVED:
            self.failures.pop(WEIGHTS, None)
        elif kind == events.CHECKPOINT_FAILED:
            self.failures[what] = event
        elif kind == events.CHECKPOINT_NOT_STORED:
            self.unstored[what] = str(event.get("reason", ""))
        elif kind == events.CHECKPOINT_STORED:
            self.stored[what] = event
            self.unstored.pop(what, None)

    def _go_back(self, to: int) -> None:
        self.reached = to
        for step in [step for step in self.losses if step > to]:
            del self.losses[step]
        if self.last.get(events.EVALUATION, {}).get("step", 0) > to:
            del self.last[events.EVALUATION]


def _time_of(folder: RunFolder, step: int) -> float | None:
    try:
        return (folder.checkpoint(step) / MANIFEST).stat().st_mtime if step else None
    except OSError:  # it was just removed
        return None


def _health(folder: RunFolder, step: int, guard: Guard) -> str:
    found = health_of_step(folder, step, guard) if step else None
    return found.text if found else ""


def _without_kind(event: dict | None, *others: str) -> dict | None:
    """Return the fields of an event without those that all events have, and without `others`."""
    return event and {name: value for name, value in event.items() if name not in ("kind", "time", *others)}


def _log_damage(folder: RunFolder) -> str:
    damage = "is damaged" if folder.events.exists() else "is missing"
    return f"{folder.events.name} {damage}: the step is that of the newest checkpoint"


def command_after(fault: dict | None, root: Path) -> str:
    """Return the command to give after the `fault` event that ended the run in `root`; None: it ended otherwise."""
    fault, folder = fault or {}, RunFolder(root)
    if fault.get("failure") != "numerics":
        return f"ingot train {root}"
    code = fault.get("code", "")  # logs of earlier versions have none
    if not code or code == "E-GUARD-STOPPED":
        with suppress(DataError, OSError):  # of a record that cannot be read, which `ingot train` reports
            if (question := open_question(folder, read_measures(folder.guard))) is not None:
                return f"ingot {'guard' if given_answer(folder, question) is None else 'train'} {root}"
    return f"ingot explain nan {root}" if not code or code in VALUES else f"ingot train {root}"


def sparkline(values: tuple[float, ...], width: int = _SPARK_WIDTH) -> str:
    """Return a line of at most `width` bars, each the mean of an equal part of `values`; '×' for a mean that is not
    finite, '↑' and '↓' for one so far from the others that it would flatten them."""
    if not values:
        return ""
    width = min(width, len(values))
    means = []
    for i in range(width):
        part = values[i * len(values) // width : (i + 1) * len(values) // width]
        means.append(sum(part) / len(part))
    finite = [m for m in means if abs(m) != float("inf") and m == m]
    low, high = shown_range(finite) if finite else (0.0, 0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0

    def bar(mean: float) -> str:
        if mean not in finite:
            return "×"
        return "↑" if mean > high else "↓" if mean < low else _BARS[round((mean - low) * scale)]

    return "".join(map(bar, means))
