"""The recorder of a rank: it takes the numbers of each step from the training thread, and writes them to RUN/metrics/
from a thread of its own (schema/metric_files.py). No torch.

Nothing that happens to the files slows or ends a step. If the disk is slower than the rows, the queue fills and rows
are dropped; if it is full, or the folder is gone, the rest of the attempt is not recorded. Both are an event.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ingot.errors import ResourceError
from ingot.schema import events
from ingot.schema.metric_files import TableWriter, lineage_folder, read_lineages, thin
from ingot.trainer.telemetry.goodput import Goodput

QUEUE_ROWS = 4096
_FLUSH_SECONDS = 0.5  # a killed process loses the rows of this time
_CLOSE_SECONDS = 5.0  # a disk that hangs does not keep the run from its end

_Row = tuple[int, float, Mapping[str, float]]


def next_lineage(metrics: Path) -> int:
    """Return the number of a lineage that begins now: larger than all in the folder `metrics`."""
    try:
        return max((lineage.number for lineage in read_lineages(metrics)), default=0) + 1
    except OSError:  # the thread that writes the rows finds the same, and reports it
        return 1


class TableRecorder:
    """The rows of one table, from the training thread to its files. `Recorder` owns it.

    rank: None for the table of the run. dropped: rows that the queue had no room for.
    """

    def __init__(self, metrics: Path, rank: int | None, names: Sequence[str], facts: Mapping[str, object], keep: int):
        self._metrics, self._rank, self._names, self._facts, self._keep = metrics, rank, names, facts, keep
        self._queue: deque[tuple[int, int, _Row]] = deque()
        self._writer: TableWriter | None = None
        self._written = (0, 0)  # the lineage that the writer has
        self.dropped = 0

    def put(self, lineage: tuple[int, int], row: _Row) -> None:
        """Add a row of the lineage (number, first step). Waits for nothing."""
        if len(self._queue) >= QUEUE_ROWS:
            self.dropped += 1
        else:
            self._queue.append((*lineage, row))

    def write(self) -> None:
        """Write the rows of the queue. Raises OSError if that fails."""
        while self._queue:
            number, first_step, (step, at, values) = self._queue.popleft()
            if self._written != (number, first_step):
                self._begin(number, first_step)
            assert self._writer is not None
            self._writer.add(step, at, values)
        if self._writer is not None:
            self._writer.flush()

    def _begin(self, number: int, first_step: int) -> None:
        self.close()
        for lineage in read_lineages(self._metrics):
            thin(lineage.table(self._rank), first_step, self._keep)
        folder = lineage_folder(self._metrics, number, first_step)
        table = folder / ("run" if self._rank is None else f"rank-{self._rank:05}")
        self._writer = TableWriter(table, self._names, self._facts, self._keep)
        self._written = number, first_step

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @property
    def waiting(self) -> int:
        return len(self._queue)


class Recorder:
    """The recorder of this rank.

    metrics: the folder, in a run folder that exists. lineage: the number of its first lineage, the same on all ranks; a
    step back begins the next one. first_step: the next step. names, run_names: the values of this rank, and those of
    the run, on rank 0; () elsewhere. line_steps: steps per log line. keep_steps: see metric_files.thin. log: writes an
    event. goodput: of the run, on rank 0.
    """

    def __init__(
        self,
        metrics: Path,
        *,
        rank: int,
        lineage: int,
        attempt: int,
        first_step: int,
        names: Sequence[str],
        run_names: Sequence[str],
        line_steps: int,
        keep_steps: int,
        log: Callable[..., None],
    ):
        self._metrics, self._rank, self._log = metrics, rank, log
        self._lineage, self._last = (lineage, first_step), first_step - 1
        facts = {"rank": rank, "attempt": attempt, "line_steps": line_steps}
        self._own = TableRecorder(metrics, rank, names, facts, keep_steps)
        self._run = TableRecorder(metrics, None, run_names, facts, keep_steps) if run_names else None
        self._tables = [table for table in (self._own, self._run) if table is not None]
        self._ends, self._ended, self._reported = threading.Event(), False, 0
        self._noted: dict[str, float] = {}
        self.goodput: Goodput | None = None
        self._thread = threading.Thread(target=self._write_rows, name="metrics", daemon=True)
        self._thread.start()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of this rank in a step that ends now. Waits for nothing, and raises nothing."""
        self._put(self._own, step, time.time(), {**values, **self._noted})
        self._noted.clear()

    def note(self, name: str, value: float) -> None:
        """Add a number to the row of the next step."""
        self._noted[name] = value

    def run_steps(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Record numbers of the run: (step, its values) of the steps since the last log line. On rank 0."""
        if self._run is not None:
            now = time.time()
            for step, values in rows:
                self._put(self._run, step, now, values)

    def went_back(self, first_step: int) -> None:
        """Begin another lineage: the run continues with `first_step`. On all ranks."""
        self._lineage = self._lineage[0] + 1, first_step
        if self.goodput is not None:
            self.goodput.went_back(first_step - 1)

    def _put(self, table: TableRecorder, step: int, at: float, values: Mapping[str, float]) -> None:
        if not self._ended:
            self._last = step
            table.put(self._lineage, (step, at, values))

    def close(self) -> None:
        """Write what is left, and end the thread. Waits some seconds at most."""
        self._ends.set()
        self._thread.join(_CLOSE_SECONDS)
        self._log = _silent  # the log is closed next, and the thread may hang in a write

    # -- in the thread --

    def _write_rows(self) -> None:
        try:
            self._metrics.mkdir(exist_ok=True)
            while not self._ends.wait(_FLUSH_SECONDS):
                self._write()
            self._write()
            for table in self._tables:
                table.close()
            self._report("the disk is slower than the rows", ended=True)
        except Exception as error:  # nothing that observes ends a run
            self._ended = True
            self._report(f"{type(error).__name__}: {error}", ended=True, always=True)

    def _write(self) -> None:
        for table in self._tables:
            table.write()
        if not self._reported:
            self._report("the disk is slower than the rows", ended=False)

    def _report(self, reason: str, *, ended: bool, always: bool = False) -> None:
        """Write an event if rows were lost since the last one, or `always`."""
        lost = sum(table.dropped for table in self._tables)
        if lost > self._reported or always:
            self._reported = lost
            facts = {"rank": self._rank, "step": self._last, "rows": lost, "reason": reason, "ended": ended}
            try:
                self._log(events.METRICS_LOST, **facts)
            except (OSError, ResourceError) as error:  # the same disk
                print(f"rank {self._rank}: metrics  {reason}; {error}", file=sys.stderr, flush=True)


def _silent(*_, **__) -> None:
    """Write nothing."""
