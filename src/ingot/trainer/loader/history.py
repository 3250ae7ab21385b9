"""Which mixtures a run was trained on, step by step: its run file says the last one, accepted changes those before.

A change of data.weights is accepted after a step (launch/continuity.py) and written into the run folder. Not every
record was trained on: one may be taken back, or replaced, before the next step. So the way goes backwards from the
weights of the run file, over the records that led to them.
"""

import json
from collections.abc import Mapping

from ingot.errors import DataError
from ingot.schema.run_folder import RunFolder

KEY = "data.weights"
Weights = Mapping[str, float]


def earlier_weights(folder: RunFolder, weights: Weights) -> list[tuple[int, dict[str, float]]]:
    """(last step, weights) of every mixture before `weights`, oldest first; empty for a run that kept its own.

    Raises DataError when what is written about changes cannot be read.
    """
    if not folder.accepted.exists():
        return []
    try:
        records = json.loads(folder.accepted.read_text(encoding="utf-8"))
        changes = [(int(one["step"]), *one["changes"][KEY]) for one in records if KEY in one["changes"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder.accepted} cannot be read ({error})",
            rule="it says which mixtures the steps of this run were trained on",
            fix="restore it from a copy of the run folder",
        ) from None
    found: list[tuple[int, dict[str, float]]] = []
    now, before_step = dict(weights), float("inf")
    for step, old, new in reversed(changes):
        if new == now and step < before_step:
            found.append((step, dict(old)))
            now, before_step = dict(old), step
    return found[::-1]
