"""The error of a run that has to go back and has no checkpoint yet."""

from typing import Any

from ingot.errors import RunFailed
from ingot.schema.accepted import command_with_rate, rate_to_try
from ingot.schema.guard_record import Measure
from ingot.schema.run_folder import RunFolder
from ingot.trainer.guard.ladder import explanation

_EARLIER = "a lower checkpoint.every or checkpoint.every_steps saves the first checkpoint earlier"


def no_checkpoint(folder: RunFolder, lr: float, measure: Measure | None) -> RunFailed:
    """Return the error. With a measure of the guard, the launcher starts the run again from its first step, because
    each measure is taken once (launch/supervise.py). lr: optim.lr. measure: the guard's; None: damage, or a callback.
    """
    facts: dict[str, Any] = {}
    if measure is None:
        fix = f"the same command begins again; {_EARLIER}. `ingot doctor` looks for faults of a machine"
    else:
        rate = command_with_rate(folder.root, rate_to_try(folder.accepted, lr))
        fix = (
            f"look for the cause: {explanation(folder, measure)}. If it is the learning rate: {rate}. Otherwise the "
            f"same command begins again, with the measure {measure.action!r}; {_EARLIER}"
        )
        facts = {"step": measure.first, "measure": measure.action, "found": list(measure.found)}
    return RunFailed(
        "E-ROLLBACK-NO-CHECKPOINT",
        "the run has to roll back, but there is no checkpoint yet",
        rule="after rows of skipped steps, or if its state is damaged, a run rolls back to its newest checkpoint",
        fix=fix,
        run=str(folder.root),
        **facts,
    )
