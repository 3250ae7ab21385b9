"""The kinds of alerts: how severe each is, and the command that helps."""

import shlex
from dataclasses import dataclass

from ingot.schema import alert as guard
from ingot.schema.alert_record import CRITICAL, WARNING, Severity

SPIKE = "spike"
NOT_FINITE = "not finite"
GUARD_MEASURE = "guard measure"
GUARD_STOPPED = "guard stopped"
GUARD_ASKS = "guard asks"
STATE_DAMAGED = "state damaged"
SUSPECT_WEIGHTS = "suspect weights"
DAMAGED_DATA = "damaged data"
DATA_TROUBLE = "data trouble"
STRAGGLER = "straggler"
RANK_LOST = "rank lost"
RANK_SILENT = "rank silent"
RUN_SILENT = "run silent"
RUN_ENDED = "run ended"
MACHINE_FAULT = "machine fault"
MACHINE_LOST = "machine lost"
UNFIT_MACHINE = "unfit machine"
NOT_SAVED = "checkpoint not saved"
NOT_STORED = "checkpoint not stored"
CHECKPOINT_REFUSED = "checkpoint refused"
CHECKPOINT_OLD = "checkpoint old"
DISK = "disk filling"
DISK_SILENT = "disk silent"
DISK_ERROR = "disk error"
LOW_MFU = "low mfu"
COMMUNICATION = "communication"
THROUGHPUT = "throughput"
GOODPUT = "goodput"
MIX_DRIFT = "data mix drift"
OVER_BUDGET = "over budget"
BUDGET_FORECAST = "budget forecast"

_EXPLAIN_SPIKE = "ingot explain spike {run} --step {step}"
_SLOW = "ingot explain slow {run}"
_STATUS = "ingot status {run}"
_CHECKPOINTS = "ingot ckpt ls {run}"


@dataclass(frozen=True)
class AlertKind:
    """A kind of alert. command: the one that helps, with {run} and {step}; the step is that of the first sign.
    of_a_running_run: only a run that goes on can have it, so the end of the launcher ends it."""

    severity: Severity
    command: str
    of_a_running_run: bool = False

    def next(self, run: str, step: int) -> str:
        """Return the command for the run folder `run`, as a shell reads it."""
        return self.command.format(run=shlex.quote(run), step=step)


KINDS = {
    SPIKE: AlertKind(WARNING, _EXPLAIN_SPIKE, True),
    NOT_FINITE: AlertKind(WARNING, "ingot explain nan {run}"),
    GUARD_MEASURE: AlertKind(WARNING, "ingot guard {run}"),
    GUARD_STOPPED: AlertKind(CRITICAL, "ingot guard {run}"),
    GUARD_ASKS: AlertKind(CRITICAL, "ingot guard {run}", True),
    guard.LOSS_RATIO: AlertKind(WARNING, _EXPLAIN_SPIKE, True),
    guard.EXPLOSION: AlertKind(WARNING, _EXPLAIN_SPIKE, True),
    guard.VANISHED: AlertKind(WARNING, "ingot report {run}", True),
    guard.PLATEAU: AlertKind(WARNING, "ingot report {run}", True),
    guard.UNIFORM: AlertKind(WARNING, "ingot report {run}", True),
    guard.UNCHANGED: AlertKind(CRITICAL, _STATUS, True),
    guard.LOSS_SCALE: AlertKind(WARNING, "ingot report {run}", True),
    guard.UNDERFLOW: AlertKind(WARNING, "ingot report {run}", True),
    guard.SATURATION: AlertKind(WARNING, "ingot report {run}", True),
    guard.ACTIVATIONS: AlertKind(WARNING, "ingot report {run}", True),
    guard.TRANSIENT: AlertKind(WARNING, "ingot report {run}"),
    STATE_DAMAGED: AlertKind(CRITICAL, "ingot report {run}"),
    SUSPECT_WEIGHTS: AlertKind(WARNING, _CHECKPOINTS),
    DAMAGED_DATA: AlertKind(WARNING, _STATUS),
    DATA_TROUBLE: AlertKind(WARNING, _STATUS, True),
    STRAGGLER: AlertKind(WARNING, _SLOW, True),
    RANK_LOST: AlertKind(CRITICAL, _STATUS),
    RANK_SILENT: AlertKind(CRITICAL, _STATUS, True),
    RUN_SILENT: AlertKind(CRITICAL, _STATUS, True),
    RUN_ENDED: AlertKind(CRITICAL, _STATUS),
    MACHINE_FAULT: AlertKind(CRITICAL, _STATUS),
    MACHINE_LOST: AlertKind(CRITICAL, _STATUS),
    UNFIT_MACHINE: AlertKind(WARNING, _STATUS),
    NOT_SAVED: AlertKind(CRITICAL, _CHECKPOINTS),
    NOT_STORED: AlertKind(WARNING, _CHECKPOINTS),
    CHECKPOINT_REFUSED: AlertKind(CRITICAL, "ingot ckpt verify {run}"),
    CHECKPOINT_OLD: AlertKind(CRITICAL, _CHECKPOINTS, True),
    DISK: AlertKind(CRITICAL, "ingot ckpt gc {run}"),
    DISK_SILENT: AlertKind(CRITICAL, _STATUS),
    DISK_ERROR: AlertKind(CRITICAL, _STATUS),
    LOW_MFU: AlertKind(WARNING, _SLOW, True),
    COMMUNICATION: AlertKind(WARNING, _SLOW, True),
    THROUGHPUT: AlertKind(WARNING, _SLOW, True),
    GOODPUT: AlertKind(WARNING, "ingot report {run}", True),
    MIX_DRIFT: AlertKind(WARNING, "ingot data trace --run {run} --step {step}", True),
    OVER_BUDGET: AlertKind(CRITICAL, _STATUS),
    BUDGET_FORECAST: AlertKind(WARNING, _STATUS, True),
}
