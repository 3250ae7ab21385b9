"""guard-question.json and guard-answer.json of a run folder: the guard asks a person which measure to take, and is
answered. A question is there while a run waits; after a stop, the last measure of the record is one, too. No torch.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ingot.schema.guard_record import ACCEPT, EARLIER, LOWER, PASS, STOP, Action, Measure, measure_of
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_json

ANSWERS: tuple[Action, ...] = (PASS, EARLIER, LOWER, ACCEPT, STOP)


def write_question(path: Path, measure: Measure, until: float) -> None:
    """Ask for a measure in place of `measure`, which stops the run. until: the end of the wait, Unix seconds."""
    write_json(path, {"measure": asdict(measure), "until": until})


def question_of_waiting(folder: RunFolder) -> tuple[Measure, float] | None:
    """Return the measure that an answer would replace, and until when the run waits for it, in Unix seconds. None if it
    does not wait."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        asked = json.loads(folder.guard_question.read_bytes())
        return measure_of(asked["measure"]), float(asked["until"])
    return None


def question_of_stopped(measures: Sequence[Measure]) -> Measure | None:
    """Return the last of the measures of a run if it stopped the run. It is a question as long as no checkpoint was
    saved after it (trainer/checkpoint/resumable.py)."""
    return measures[-1] if measures and measures[-1].action == STOP else None


def write_answer(folder: RunFolder, question: Measure, action: Action) -> None:
    """Answer `question`. The run takes the measure at once if it waits, or when it starts again."""
    write_json(folder.guard_answer, {"first": question.first, "last": question.last, "action": action})


def given_answer(folder: RunFolder, question: Measure) -> Action | None:
    """Return the answer to `question` that the run has not taken yet; None if there is none, or one to another one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found: Mapping[str, Any] = json.loads(folder.guard_answer.read_bytes())
        if (found["first"], found["last"]) == (question.first, question.last) and found["action"] in ANSWERS:
            return found["action"]
    return None


def take_answer(folder: RunFolder, question: Measure) -> Action | None:
    """Return the answer to `question`, and remove it; None if there is none. One to another question is removed."""
    answer = given_answer(folder, question)
    folder.guard_answer.unlink(missing_ok=True)
    return answer
