"""The paths inside a run folder, in one place, so that trainer, supervisor, report and status agree; and the processes
of its job."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from ingot.schema.checkpoint import FULL, WEIGHTS, SaveKind

CHECKPOINTS = "checkpoints"  # the subfolder of full checkpoints


def is_folder_name(name: str) -> bool:
    """Return whether `name`, of a run file, can be the name of its run folder."""
    return bool(re.fullmatch(r"[\w][\w.-]*", name))


FOLDER_NAME_RULE = "a name begins with a letter, digit or '_' and has only letters, digits, '_', '-' and '.'"


@dataclass(frozen=True)
class RunFolder:
    """The folder `root` of a run. saves: the subfolder whose saves `checkpoints` and `checkpoint` name."""

    root: Path
    saves: str = CHECKPOINTS

    @property
    def kind(self) -> SaveKind:
        """The kind of the saves that `checkpoints` and `checkpoint` name."""
        return WEIGHTS if self.saves == WEIGHTS else FULL

    @property
    def weights(self) -> "RunFolder":
        """The same run, with the saves of its weights alone in place of its checkpoints."""
        return self.of(WEIGHTS)

    def of(self, kind: SaveKind) -> "RunFolder":
        """Return the same run with the saves of this kind."""
        return replace(self, saves=CHECKPOINTS if kind == FULL else WEIGHTS)

    @property
    def config(self) -> Path:
        """The resolved run file of the run in this folder."""
        return self.root / "run.toml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """A folder with the numbers of every rank and step (schema/metrics.py)."""
        return self.root / "metrics"

    @property
    def measure_layers(self) -> Path:
        """A file by which somebody asks the run to measure its layers in one of the next steps; the run removes it."""
        return self.root / "measure-layers"

    @property
    def alerts(self) -> Path:
        """A file with the alerts that fired, and their ends, an object per line (schema/alert_record.py)."""
        return self.root / "alerts.jsonl"

    @property
    def alerts_sent(self) -> Path:
        """A file with the place in `alerts` up to which each channel has sent them (observe/alerts/outbox.py)."""
        return self.root / "alerts-sent.json"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def checkpoints(self) -> Path:
        return self.root / self.saves

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    @property
    def set_aside(self) -> Path:
        """A folder with what `ingot ckpt rewind` moved out of the way, one numbered subfolder per call."""
        return self.root / "set-aside"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def fallbacks(self) -> Path:
        """The layouts to which the run can change when nodes or memory are missing (schema/fallbacks.py)."""
        return self.root / "fallbacks.json"

    @property
    def leader(self) -> Path:
        """A file that exists while the launcher of a run on several nodes listens for the others."""
        return self.root / "leader.json"

    @property
    def drained(self) -> Path:
        """A file with the machines that were taken out of the run, each with the reason (trainer/launch/health.py)."""
        return self.root / "drained.json"

    @property
    def health_reports(self) -> Path:
        """A file to which ranks add what they find about their machine, an object per line (machine/health)."""
        return self.root / "health-reports.jsonl"

    @property
    def upload_lock(self) -> Path:
        """The lock of a command that uploads a checkpoint, or removes what uploads left."""
        return self.root / "upload-lock"

    @property
    def stop_request(self) -> Path:
        """A file that exists while the supervisor asks the ranks to save and stop."""
        return self.root / "stop-request"

    @property
    def accepted(self) -> Path:
        """A file with the changes of settings that the user accepted with --accept-change, oldest first."""
        return self.root / "accepted-changes.json"

    @property
    def guard(self) -> Path:
        """A file with the measures that the guard took (schema/guard_record.py)."""
        return self.root / "guard.json"

    @property
    def guard_question(self) -> Path:
        """A file that exists while the run waits for a person to choose a measure (schema/guard_answer.py)."""
        return self.root / "guard-question.json"

    @property
    def guard_answer(self) -> Path:
        return self.root / "guard-answer.json"

    @property
    def quarantine(self) -> Path:
        """A file with the tokens that training leaves out (schema/quarantine_record.py)."""
        return self.root / "quarantine.json"

    @property
    def logs(self) -> Path:
        """A folder with the standard error of the launcher and its ranks, one file per attempt."""
        return self.root / "logs"

    @property
    def sinks(self) -> Path:
        """A folder with what sinks keep (ingot/observe): for each, how far it has read, and a subfolder of its own."""
        return self.root / "sinks"

    @property
    def incidents(self) -> Path:
        """A folder with the evidence of each hang (trainer/launch/evidence.py), one subfolder per hang."""
        return self.root / "incidents"


@dataclass(frozen=True, kw_only=True)
class Job:
    """`processes` ranks of the Python module `module` with `arguments`, each with `env` added to the environment.

    preload: modules that are imported once, before the ranks are forked.
    """

    module: str
    arguments: tuple[str, ...]
    processes: int
    env: dict[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
