"""Errors as JSON, so that what a task raised on another process or machine is raised again where people look.

Not pickled: a store is data, and data must not choose what code runs.
"""

import traceback
from typing import Any

from ingot import errors
from ingot.data.tasks.task import Task

_TEXT_CHARACTERS = 20_000


def to_json(error: Exception, task: Task | None = None) -> dict[str, Any]:
    """What a person needs of `error`; of an IngotError all of it."""
    if isinstance(error, errors.IngotError):
        # A kind of one module's own goes as the kind above it that everybody knows.
        known = next(kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
        kept = {"kind": known.__name__, "found": error.found, "rule": error.rule, "fix": error.fix}
    else:
        text = "".join(traceback.format_exception(error))[-_TEXT_CHARACTERS:]
        kept = {"kind": "", "found": f"{type(error).__name__}: {error}"[:_TEXT_CHARACTERS], "traceback": text}
    return kept | {"task": task.label or task.function if task else ""}


def from_json(record: dict[str, Any]) -> Exception:
    """The IngotError that was raised; a RuntimeError with the traceback for any other error."""
    kind = getattr(errors, str(record.get("kind")), None)
    if isinstance(kind, type) and issubclass(kind, errors.IngotError):
        return kind(record["found"], rule=record["rule"], fix=record["fix"])
    where = f" in {record['task']}" if record.get("task") else ""
    return RuntimeError(f"{record['found']}{where}\nin a worker:\n{record.get('traceback', '')}")
