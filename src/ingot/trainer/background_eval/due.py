"""The save to evaluate in the background and the time for it, by the events of the run. No torch."""

import math
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import IngotError
from ingot.schema import events
from ingot.schema.checkpoint import FULL, WEIGHTS, SaveKind
from ingot.schema.evaluate import BPB, BackgroundEvaluation
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.manifest import candidate_folders, files_elsewhere, grade_of_doubt, read_manifest

KINDS = (
    events.RUN_STARTED,
    events.ROLLED_BACK,
    events.CHECKPOINT,
    events.WEIGHTS_SAVED,
    events.EVALUATION,
    events.EVALUATION_SIZED,
    events.BACKGROUND_EVALUATION,
    events.EVALUATION_SKIPPED,
    events.BEST_CHECKPOINT,
)
_SAVES: dict[str, SaveKind] = {events.CHECKPOINT: FULL, events.WEIGHTS_SAVED: WEIGHTS}
_UNFINISHED, _ELSEWHERE = "E-CKPT-UNFINISHED", "E-CKPT-ELSEWHERE"


@dataclass(frozen=True, kw_only=True)
class BestCheckpoint:
    """The checkpoint with the best value of a metric so far. pinned: its pin is one of this rule, not of a user."""

    step: int
    metric: str
    value: float
    pinned: bool


@dataclass(frozen=True, kw_only=True)
class UnusableSave:
    """A save that is due and cannot be evaluated: it is damaged, in a format of another version, or elsewhere. code,
    reason: of the error."""

    step: int
    kind: SaveKind
    code: str
    reason: str


class DueEvaluation:
    """The state of a run that decides about its evaluations, from its events in order (`take`).

    Events may be taken in twice, if all later ones are, too. best: the step and value of the best checkpoint by
    `keep_best`; None: there is none. wanted: the best checkpoint, until the log says that its pin is set. ours: the
    steps whose pin is, or may be, set by this rule. unusable: the saves that `find` could not use and that were not
    reported before; the caller empties this list. size: the newest choice of how much text is scored (size.py), as its
    event; None: there is none. scored: step -> the tokens of held-out text that were scored in the background.
    """

    def __init__(self, settings: BackgroundEvaluation):
        self._settings = settings
        # Of the steps that the run has trained, without those it went back from: the kind, and the time of the event.
        self._saves: dict[int, tuple[SaveKind, float]] = {}
        self._evaluated = 0  # the newest step that was evaluated, successfully or not
        self._since: float | None = None  # Unix seconds: the begin of the last evaluation, else of the run
        self.best: tuple[int, float] | None = None
        self._kept: tuple[int, float] | None = None  # the newest best one whose pin was set
        self.wanted: BestCheckpoint | None = None
        self.ours: set[int] = set()
        self.unusable: list[UnusableSave] = []
        self.size: dict | None = None
        self.scored: dict[int, int] = {}
        self._reported: dict[int, float] = {}  # step of a save that cannot be used -> the time of its event
        self._are_elsewhere = False  # files of saves are on other nodes, which was reported
        self._fruitless: tuple = ()  # the state of the run folder in which no save that is due could be used

    def take(self, event: dict) -> None:
        """Take in the next event of the run, of a kind in KINDS."""
        kind = event["kind"]
        if kind == events.RUN_STARTED:
            self._go_back(event["from_step"])
            self._since = event["time"] if self._since is None else self._since
        elif kind == events.ROLLED_BACK:
            self._go_back(event["to_step"])
        elif kind in _SAVES:
            self._saves[event["step"]] = _SAVES[kind], event["time"]
        elif kind == events.EVALUATION_SIZED:
            self.size = event
        elif kind == events.EVALUATION:
            if event.get("background"):
                self.scored[event["step"]] = event["tokens"]
        elif kind == events.BACKGROUND_EVALUATION:
            if not event.get("void", False):
                self._evaluated = event["step"]
            self._since = event["time"] - event["seconds"]
            if event.get("best"):
                self._take_wanted(BestCheckpoint(step=event["step"], **event["best"]))
        elif kind == events.EVALUATION_SKIPPED:
            if event["step"] in self._saves:
                self._reported[event["step"]] = self._saves[event["step"]][1]
            self._are_elsewhere = self._are_elsewhere or event["code"] == _ELSEWHERE
        elif kind == events.BEST_CHECKPOINT:
            self._take_pins(event)

    def _take_wanted(self, best: BestCheckpoint) -> None:
        self.wanted = best
        if best.metric == self._settings.keep_best:
            self.best = best.step, best.value
        if best.pinned:
            self.ours.add(best.step)

    def _take_pins(self, event: dict) -> None:
        step, unpinned = event["step"], event["unpinned"]
        if self.wanted is not None and self.wanted.step == step:
            self.wanted = None
        self.ours -= set(unpinned if isinstance(unpinned, list) else [unpinned])  # a step, or null, in earlier logs
        if event.get("reason"):
            self.ours.discard(step)
            self.best = self._kept
            return
        if event["metric"] == self._settings.keep_best:
            self.best = self._kept = step, event["value"]
        if event["pinned"]:
            self.ours.add(step)

    def _go_back(self, step: int) -> None:
        self._saves = {one: save for one, save in self._saves.items() if one <= step}
        self._evaluated = min(self._evaluated, step)
        if self.best is not None and self.best[0] > step:
            self.best = None
        if self._kept is not None and self._kept[0] > step:
            self._kept = None
        if self.wanted is not None and self.wanted.step > step:
            self.wanted = None

    def saved_at(self, step: int) -> float | None:
        """Return the time at which the save of `step` was logged, by which it is known from a later one of the same
        step; None if the run went back before this step."""
        return self._saves[step][1] if step in self._saves else None

    def interval_seconds(self, step: int) -> float:
        """Return the time between two evaluations; if the interval is in steps, that since the last one, or since the
        run began, up to the save of `step`."""
        interval, saved_at = self._settings.interval, self.saved_at(step)
        if interval is None or interval.steps:
            return max((saved_at or 0.0) - (self._since or math.inf), 0.0)
        return interval.seconds

    def due(self, now: float) -> list[int]:
        """Return the steps whose saves may be evaluated now, the newest first. now: in Unix seconds."""
        interval, since = self._settings.interval, self._since
        if interval is None or since is None:
            return []
        steps = [step for step in sorted(self._saves, reverse=True) if step > self._evaluated and self._fits(step)]
        if interval.steps:
            return [step for step in steps if step >= self._evaluated + interval.steps]
        return steps if now >= since + interval.seconds else []

    def _fits(self, step: int) -> bool:
        return self._saves[step][0] == FULL or not self._settings.keep_best

    def find(self, folder: RunFolder, now: float) -> tuple[int, SaveKind, Path] | None:
        """Return the step, kind and folder of the save to evaluate now; None if none is due.

        It is complete and on this machine, and its weights are not in doubt. No hash is computed. Saves that are due
        and cannot be used are added to `unusable`, each once. While the folders of the saves stay as they are, no save
        that was of no use is read again.
        """
        if not (steps := self.due(now)):
            return None
        folders = {kind: folder.of(kind).checkpoints for kind in (FULL, WEIGHTS)}
        state = (*steps, *map(_state_of, (*folders.values(), folder.guard)))
        if state == self._fruitless:
            return None
        there = {path for saves in folders.values() for path in candidate_folders(saves)}
        for step in steps:
            kind = self._saves[step][0]
            path = folder.of(kind).checkpoint(step)
            if path not in there or grade_of_doubt(path):
                continue
            try:
                if not (elsewhere := files_elsewhere(path, read_manifest(path))):
                    return step, kind, path
                self._cannot_use(step, _ELSEWHERE, f"{elsewhere[0]} is not on the disks of this node")
            except IngotError as error:
                self._cannot_use(step, error.code, error.found)
            except OSError:  # it was just removed
                continue
        self._fruitless = state
        return None

    def _cannot_use(self, step: int, code: str, reason: str) -> None:
        kind, saved_at = self._saves[step]
        is_known = self._reported.get(step) == saved_at or (code == _ELSEWHERE and self._are_elsewhere)
        if is_known or code == _UNFINISHED:  # it was just removed
            return
        self._reported[step] = saved_at
        self._are_elsewhere = self._are_elsewhere or code == _ELSEWHERE
        self.unusable.append(UnusableSave(step=step, kind=kind, code=code, reason=reason))


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a save is added to or removed from a folder, or a file is written again."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def is_better(value: float, best: float, *, lower: bool) -> bool:
    """Return whether a value of a metric is better than the best one so far; not-a-number never is."""
    return value < best if lower else value > best


def value_of(metric: str, evaluation: dict | None, tasks: dict | None) -> tuple[float, bool] | None:
    """Return the value of the metric "bpb" or "TASK/METRIC" and whether lower values are better; None if the results
    lack it. evaluation, tasks: the fields of the events `evaluation` and `task_scores`."""
    if metric == BPB:
        return (evaluation["bpb"], True) if evaluation else None
    task, _, name = metric.partition("/")
    value = (tasks or {}).get("scores", {}).get(task, {}).get(name)
    return None if value is None else (value, metric in (tasks or {})["lower_is_better"])
