"""The scores of a model on tasks of lm-eval, which is imported only when tasks are scored."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.errors import require
from ingot.trainer.trained import Trained


@dataclass(frozen=True)
class TaskScores:
    """The results of tasks. scores: task -> metric -> value; "acc_stderr" is the standard error of "acc".
    lower_is_better: "task/metric" of those metrics. examples: task -> number of examples."""

    scores: dict[str, dict[str, float]]
    lower_is_better: list[str]
    examples: dict[str, int]

    def facts(self) -> dict:
        """Return the fields of a `task_scores` event (schema/events.py), without the step."""
        return asdict(self)


def score_tasks(trained: Trained, tasks: Sequence[str], folder: Path | None = None, examples: int = 0) -> TaskScores:
    """Score a model on tasks of lm-eval.

    folder: a folder of task files (YAML); None: the tasks of lm-eval alone. examples: of each task, at most; 0: all.
    Raises UsageError for a task that there is not, ConfigError without a tokenizer, MissingPartError without lm-eval,
    and what lm-eval raises.
    """
    require("lm_eval", "eval")
    from ingot.trainer.background_eval.tasks import run_tasks

    return scores_of(run_tasks(trained, tasks, folder, examples))


def scores_of(found: dict[str, Any]) -> TaskScores:
    """Return the scores in the results of lm-eval."""
    lower = [
        f"{task}/{metric}"
        for task, metrics in found["higher_is_better"].items()
        for metric, higher in metrics.items()
        if higher is False
    ]
    counted = {task: int(number["effective"]) for task, number in found["n-samples"].items()}
    return TaskScores({task: dict(_numbers(values)) for task, values in found["results"].items()}, lower, counted)


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (metric, value) of the results of a task, whose keys are "metric,filter". The filter "none" is left out."""
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if filtered and isinstance(value, int | float) and math.isfinite(value):
            yield metric if filtered == "none" else key, float(value)
