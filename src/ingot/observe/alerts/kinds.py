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
    """A kind of alert. command: the one that helps, with {run} and {step}; the step is that of the first sign."""

    severity: Severity
    command: str

    def next(self, run: str, step: int) -> str:
        """Return the command for the run folder `run`, as a shell reads it."""
        return self.command.format(run=shlex.quote(run), step=step)


KINDS = {
    SPIKE: AlertKind(WARNING, _EXPLAIN_SPIKE),
    NOT_FINITE: AlertKind(WARNING, "ingot explain nan {run}"),
    GUARD_MEASURE: AlertKind(WARNING, "ingot guard {run}"),
    GUARD_STOPPED: AlertKind(CRITICAL, "ingot guard {run}"),
    GUARD_ASKS: AlertKind(CRITICAL, "ingot guard {run}"),
    guard.LOSS_RATIO: AlertKind(WARNING, _EXPLAIN_SPIKE),
    guard.EXPLOSION: AlertKind(WARNING, _EXPLAIN_SPIKE),
    guard.VANISHED: AlertKind(WARNING, "ingot report {run}"),
    guard.PLATEAU: AlertKind(WARNING, "ingot report {run}"),
    guard.UNIFORM: AlertKind(WARNING, "ingot report {run}"),
    guard.UNCHANGED: AlertKind(CRITICAL, _STATUS),
    guard.LOSS_SCALE: AlertKind(WARNING, "ingot report {run}"),
    guard.UNDERFLOW: AlertKind(WARNING, "ingot report {run}"),
    guard.SATURATION: AlertKind(WARNING, "ingot report {run}"),
    STATE_DAMAGED: AlertKind(CRITICAL, "ingot report {run}"),
    SUSPECT_WEIGHTS: AlertKind(WARNING, _CHECKPOINTS),
    DAMAGED_DATA: AlertKind(WARNING, _STATUS),
    DATA_TROUBLE: AlertKind(WARNING, _STATUS),
    STRAGGLER: AlertKind(WARNING, _SLOW),
    RANK_LOST: AlertKind(CRITICAL, _STATUS),
    RANK_SILENT: AlertKind(CRITICAL, _STATUS),
    RUN_SILENT: AlertKind(CRITICAL, _STATUS),
    RUN_ENDED: AlertKind(CRITICAL, _STATUS),
    MACHINE_FAULT: AlertKind(CRITICAL, _STATUS),
    MACHINE_LOST: AlertKind(CRITICAL, _STATUS),
    UNFIT_MACHINE: AlertKind(WARNING, _STATUS),
    NOT_SAVED: AlertKind(CRITICAL, _CHECKPOINTS),
    NOT_STORED: AlertKind(WARNING, _CHECKPOINTS),
    CHECKPOINT_REFUSED: AlertKind(CRITICAL, "ingot ckpt verify {run}"),
    CHECKPOINT_OLD: AlertKind(CRITICAL, _CHECKPOINTS),
    DISK: AlertKind(CRITICAL, "ingot ckpt gc {run}"),
    LOW_MFU: AlertKind(WARNING, _SLOW),
    COMMUNICATION: AlertKind(WARNING, _SLOW),
    THROUGHPUT: AlertKind(WARNING, _SLOW),
    GOODPUT: AlertKind(WARNING, "ingot report {run}"),
    MIX_DRIFT: AlertKind(WARNING, "ingot data trace --run {run} --step {step}"),
    OVER_BUDGET: AlertKind(CRITICAL, _STATUS),
    BUDGET_FORECAST: AlertKind(WARNING, _STATUS),
}
