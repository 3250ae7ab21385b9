"""A run folder as an object: `ingot.Run`."""

from collections.abc import Iterator
from html import escape
from pathlib import Path

from ingot.events import read_events
from ingot.report.facts import no_run_folder
from ingot.report.status import RunStatus, read_status
from ingot.report.write import Report, write_report
from ingot.schema import events
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.theory import rules
from ingot.trainer.checkpoint.manifest import ListedCheckpoint, list_checkpoints
from ingot.trainer.launch.inspect import Inspected, inspect_checkpoints


class Run:
    """A run folder: its settings, state, metrics and checkpoints. It is read without torch, also during training.

    path: the folder. paths: the paths of its files. config: the settings in its run.toml. Everything else is read from
    disk when it is asked for. Raises UsageError if the folder has no run.toml, ConfigError if that breaks a rule.

        run = ingot.Run("runs/demo")
        run.status().state, run.metrics()["loss"][-1], run.checkpoints()[-1].step
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.paths = RunFolder(self.path)
        if not self.paths.config.is_file():
            raise no_run_folder(self.path)
        self.config: RunConfig = rules.recorded_run(self.paths.config)

    @property
    def name(self) -> str:
        """The name of the run, which its run file gives."""
        return self.config.name

    def status(self) -> RunStatus:
        """Return the state of the run: step, loss, speed, newest checkpoint, faults, as `ingot status` shows them."""
        return read_status(self.path)

    def events(self, *kinds: str) -> Iterator[dict]:
        """Yield the events of the log in order; with `kinds` ("progress", "evaluation", ...) only these.

        The fields of each kind are described in `ingot.schema.events`.
        """
        return (event for event in read_events(self.paths.events, *kinds) if isinstance(event, dict))

    def metrics(self) -> dict[str, list]:
        """Return columns of equal length, one value per logged step, ascending: step, loss (nats per token), grad_norm,
        lr. `pandas.DataFrame(run.metrics())` is a table.

        A step that was trained again has its last values. A value that was not logged is None.
        """
        rows: dict[int, dict] = {}
        for event in self.events(events.STEP, events.RUN_STARTED, events.ROLLED_BACK):
            if event["kind"] == events.STEP:
                rows[event["step"]] = event
            else:  # the steps after the checkpoint from which training went on are trained again
                last = event.get("from_step" if event["kind"] == events.RUN_STARTED else "to_step", 0)
                rows = {step: row for step, row in rows.items() if step <= last}
        names = dict.fromkeys(["step", "loss", "grad_norm", "lr", *(name for row in rows.values() for name in row)])
        columns = [name for name in names if name not in ("kind", "time")]
        return {name: [rows[step].get(name) for step in sorted(rows)] for name in columns}

    def checkpoints(self) -> list[ListedCheckpoint]:
        """Return the checkpoints, oldest first, each with path, step, bytes, and `damage` if it cannot be used.

        Manifests and file sizes are read; `verify` reads every byte.
        """
        return list_checkpoints(self.paths.checkpoints)[::-1]

    def verify(self) -> Inspected:
        """Read every byte of all checkpoints and compare it with its hash. Raises UsageError or CheckpointError if
        there is no checkpoint; damage is in the result.
        """
        return inspect_checkpoints(self.path, hash_files=True)

    def report(self, out: str | Path | None = None) -> Report:
        """Write report.html and report.md into `out` (default: the run folder), and return their paths and figures.

        Raises UsageError if nothing was trained yet, DataError for artifacts that cannot be read.
        """
        return write_report(self.path, out=Path(out) if out is not None else None)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        status = self.status()
        loss = "" if status.loss is None else f"{status.loss:.4f}"
        saved = "" if status.checkpoint_step is None else f"{status.checkpoint_step:,}"
        cells = {
            "run": status.name,
            "state": status.state,
            "step": f"{status.step:,}/{status.steps:,}",
            "loss": loss,
            "checkpoint": saved,
        }
        return html_table([list(cells), list(cells.values())])


def html_table(rows: list[list[str]]) -> str:
    """Return an HTML table whose first row has the headings; every text is escaped."""
    head, *body = (
        "".join(f"<{tag}>{escape(text)}</{tag}>" for text in row)
        for tag, row in zip(["th", *["td"] * len(rows)], rows, strict=False)
    )
    return "<table><tr>" + "</tr><tr>".join([head, *body]) + "</tr></table>"


def load_run(path: str | Path) -> Run:
    """Return the run in a run folder, or in the folder that contains its run file.

    Raises UsageError if there is no run.toml, ConfigError if it breaks a rule.

        ingot.load_run("runs/demo").config.train.steps
    """
    path = Path(path)
    return Run(path.parent if path.is_file() else path)


def folder_of(run: "str | Path | Run") -> Path:
    """Return the path of a run or checkpoint that an argument names."""
    return run.path if isinstance(run, Run) else Path(run)
