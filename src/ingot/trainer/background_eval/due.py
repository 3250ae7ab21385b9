"""The save to evaluate in the background and the time for it, by the events of the run. No torch."""

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
    events.BACKGROUND_EVALUATION,
    events.BEST_CHECKPOINT,
)
_SAVES: dict[str, SaveKind] = {events.CHECKPOINT: FULL, events.WEIGHTS_SAVED: WEIGHTS}


class DueEvaluation:
    """The state of a run that decides about its evaluations, from its events in order (`take`).

    Events may be taken in twice, if all later ones are, too. best: the step and value of the best checkpoint by
    `keep_best`; None: there is none. pinned: the step of the checkpoint that was pinned as the best; None: none.
    """

    def __init__(self, settings: BackgroundEvaluation):
        self._settings = settings
        # Of the steps that the run has trained, without those it went back from: the kind, and the time of the event.
        self._saves: dict[int, tuple[SaveKind, float]] = {}
        self._evaluated = 0  # the newest step that was evaluated, successfully or not
        self._since: float | None = None  # Unix seconds: the begin of the last evaluation, else of the run
        self.best: tuple[int, float] | None = None
        self.pinned: int | None = None

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
        elif kind == events.BACKGROUND_EVALUATION:
            if not event.get("void", False):
                self._evaluated = event["step"]
            self._since = event["time"] - event["seconds"]
        elif kind == events.BEST_CHECKPOINT:
            if event["metric"] == self._settings.keep_best:
                self.best = event["step"], event["value"]
            self.pinned = event["step"] if event["pinned"] else None

    def _go_back(self, step: int) -> None:
        self._saves = {one: save for one, save in self._saves.items() if one <= step}
        self._evaluated = min(self._evaluated, step)
        if self.best is not None and self.best[0] > step:
            self.best = None

    def saved_at(self, step: int) -> float | None:
        """Return the time at which the save of `step` was logged, by which it is known from a later one of the same
        step; None if the run went back before this step."""
        return self._saves[step][1] if step in self._saves else None

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

        It is complete and on this machine, and its weights are not in doubt. No hash is computed.
        """
        for step in self.due(now):
            kind, _ = self._saves[step]
            path = folder.of(kind).checkpoint(step)
            if path in candidate_folders(path.parent) and not grade_of_doubt(path):
                try:
                    if not files_elsewhere(path, read_manifest(path)):
                        return step, kind, path
                except (IngotError, OSError):  # it is not complete, or was just removed
                    continue
        return None


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
