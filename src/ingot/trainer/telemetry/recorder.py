"""The recorder of a rank: it takes the numbers of each step from the training thread, and writes them to RUN/metrics/
from a thread of its own (schema/metric_files.py), which also thins what earlier attempts wrote. No torch.

Nothing that happens to the files slows or ends a step. If the disk is slower than the rows, the queue fills and rows
are dropped; if it is full, or the folder is gone, the rest of the attempt is not recorded. Both are an event.
"""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ingot.errors import ResourceError
from ingot.schema import events
from ingot.schema.metric_files import RUN_TABLE, TableWriter, lineage_folder, rank_table, read_lineages
from ingot.schema.metric_thinning import thin_lineages
from ingot.trainer.telemetry.device_watch import DeviceWatch
from ingot.trainer.telemetry.goodput import Goodput

QUEUE_ROWS = 4096
_FLUSH_SECONDS = 0.5  # a killed process loses the rows of this time
_CLOSE_SECONDS = 5.0  # a disk that hangs does not keep the run from its end
_THIN_SECONDS = 5.0  # between two lineages that are thinned: thousands of ranks list folders of one file system

_Row = tuple[int, float, Mapping[str, float]]


class LineageKey(NamedTuple):
    """The identity of a lineage (schema/metric_files.py)."""

    epoch: int
    number: int
    first_step: int


def next_lineage(metrics: Path, epoch: int, first_step: int) -> LineageKey:
    """Return the lineage that begins now: later than all in the folder `metrics`, even if the record of leases was lost
    and `epoch` begins anew. Lists one folder."""
    try:
        newest = read_lineages(metrics)[-1:]
    except OSError:  # the thread that writes the rows finds the same, and reports it
        newest = []
    number = 1 + max((lineage.number for lineage in newest), default=0)
    return LineageKey(max([epoch, *(lineage.epoch for lineage in newest)]), number, first_step)


class TableRecorder:
    """The rows of one table, from the training thread to its files. `Recorder` owns it.

    name: of the table. dropped: rows that the queue had no room for.
    """

    def __init__(self, metrics: Path, name: str, names: Sequence[str], facts: Mapping[str, object], keep: int):
        self._metrics, self._name, self._names, self._facts, self._keep = metrics, name, names, facts, keep
        self._queue: deque[tuple[LineageKey, _Row]] = deque()
        self._newest: tuple[LineageKey, int] | None = None
        self._writer: TableWriter | None = None
        self.written: LineageKey | None = None  # the lineage that the writer has
        self.dropped = 0

    def put(self, lineage: LineageKey, row: _Row) -> None:
        """Add a row; it is left out if the table has a row of this step. Waits for nothing."""
        if self._newest is not None and self._newest[0] == lineage and row[0] <= self._newest[1]:
            return
        self._newest = lineage, row[0]
        if len(self._queue) >= QUEUE_ROWS:
            self.dropped += 1
        else:
            self._queue.append((lineage, row))

    def write(self) -> None:
        """Write the rows of the queue. Raises OSError if that fails."""
        while self._queue:
            lineage, (step, at, values) = self._queue.popleft()
            if self.written != lineage:
                self._begin(lineage)
            assert self._writer is not None
            self._writer.add(step, at, values)
        if self._writer is not None:
            self._writer.flush()

    def _begin(self, lineage: LineageKey) -> None:
        self.close()
        folder = lineage_folder(self._metrics, lineage.number, lineage.first_step, lineage.epoch)
        self._writer = TableWriter(folder / self._name, self._names, self._facts, self._keep)
        self.written = lineage

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @property
    def trained(self) -> int:
        """The steps of the lineage that is being written, so far."""
        written = self.written
        return 0 if self._writer is None or written is None else self._writer.last_step - written.first_step + 1

    @property
    def segments(self) -> int:
        return 0 if self._writer is None else self._writer.segments

    @property
    def waiting(self) -> int:
        return len(self._queue)


class Recorder:
    """The recorder of this rank.

    metrics: the folder, in a run folder that exists. rank, ranks: this one, and their number. lineage: its first
    lineage, the same on all ranks; a step back begins the next one. names, run_names: the values of this rank, and
    those of the run, on rank 0; () elsewhere. extra_names: those of EXTRA_TABLES, on rank 0. line_steps: steps per log
    line. keep_steps: see metric_files.thin. log: writes an event. goodput: of the run, on rank 0. device: the watch of
    its GPU, which it ends.
    """

    def __init__(
        self,
        metrics: Path,
        *,
        rank: int,
        ranks: int,
        lineage: LineageKey,
        attempt: int,
        names: Sequence[str],
        run_names: Sequence[str],
        extra_names: Mapping[str, Sequence[str]],
        line_steps: int,
        keep_steps: int,
        log: Callable[..., None],
    ):
        self._metrics, self._rank, self._ranks, self._keep, self._log = metrics, rank, ranks, keep_steps, log
        self._lineage, self._last = lineage, lineage.first_step - 1
        facts = {"rank": rank, "attempt": attempt, "line_steps": line_steps}
        self._own = TableRecorder(metrics, rank_table(rank), names, facts, keep_steps)
        self._run = TableRecorder(metrics, RUN_TABLE, run_names, facts, keep_steps) if run_names else None
        self._extra = {
            table: TableRecorder(metrics, table, own, facts | {"line_steps": 1}, keep_steps)
            for table, own in extra_names.items()
            if own
        }
        self._tables = [table for table in (self._own, self._run, *self._extra.values()) if table is not None]
        self._ends, self._ended, self._reported = threading.Event(), False, 0
        self._held: tuple[int, float, dict[str, float]] | None = None
        self._noted: dict[str, float] = {}
        self.goodput: Goodput | None = None
        self.device: DeviceWatch | None = None
        self._thread = threading.Thread(target=self._write_rows, name="metrics", daemon=True)
        self._thread.start()

    # -- in the training thread: no method waits, or raises --

    def step(self, step: int, values: Mapping[str, float], *, is_open: bool = False) -> None:
        """Record the numbers of this rank in a step that ends now. is_open: a log line may still add to them: the row
        is kept until `release`, which the next step calls, too."""
        self.release()
        noted, self._noted = self._noted, {}
        device = self.device.values() if self.device is not None else {}
        self._held = step, time.time(), {**values, **device, **noted}
        if not is_open:
            self.release()

    def amend(self, values: Mapping[str, float]) -> None:
        """Replace numbers of the step that is open, if there is one."""
        if self._held is not None:
            self._held[2].update(values)

    def release(self) -> None:
        """Record the numbers of the step that is open."""
        held, self._held = self._held, None
        if held is not None:
            self._put(self._own, *held)

    def note(self, name: str, value: float) -> None:
        """Add a number to the row of the next step."""
        self._noted[name] = value

    def run_steps(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Record numbers of the run: (step, its values) of the steps since the last log line. On rank 0."""
        if self._run is not None:
            now = time.time()
            for step, values in rows:
                self._put(self._run, step, now, values)

    def extra(self, table: str, step: int, values: Mapping[str, float]) -> None:
        """Record numbers of the run that few steps have, in one of EXTRA_TABLES. On rank 0."""
        if values and table in self._extra:
            self._put(self._extra[table], step, time.time(), values)

    def went_back(self, first_step: int) -> None:
        """Begin another lineage: the run continues with `first_step`. On all ranks."""
        self.release()
        self._lineage = LineageKey(self._lineage.epoch, self._lineage.number + 1, first_step)
        if self.goodput is not None:
            self.goodput.went_back(first_step - 1)

    def _put(self, table: TableRecorder, step: int, at: float, values: Mapping[str, float]) -> None:
        if not self._ended:
            self._last = step
            table.put(self._lineage, (step, at, values))

    def close(self) -> None:
        """Write what is left, and end the thread. Waits some seconds at most."""
        self.release()
        if self.device is not None:
            self.device.close()
        self._ends.set()
        self._thread.join(_CLOSE_SECONDS)
        self._log = _silent  # the log is closed next, and the thread may hang in a write

    # -- in the thread --

    def _write_rows(self) -> None:
        try:
            self._metrics.mkdir(exist_ok=True)
            thinning = self._thinning()
            thin_at = time.monotonic()
            while not self._ends.wait(_FLUSH_SECONDS):
                self._write()
                if time.monotonic() >= thin_at:
                    with contextlib.suppress(OSError):  # then nothing is thinned in this attempt
                        next(thinning, None)
                    thin_at = time.monotonic() + _THIN_SECONDS
            self._write()
            for table in self._tables:
                table.close()
            self._report("the disk is slower than the rows", ended=True)
        except Exception as error:  # nothing that observes ends a run
            self._ended = True
            self._report(f"{type(error).__name__}: {error}", ended=True, always=True)

    def _thinning(self) -> Iterator[None]:
        """Thin the lineages before that of the newest row, one per step of the iterator: all at the start, and again
        whenever a lineage or a segment begins."""
        own, done = self._own, None
        while True:
            if own.written is not None and done != (own.written, own.segments):
                done = own.written, own.segments
                yield from thin_lineages(
                    self._metrics,
                    own.written[:2],
                    own.trained,
                    rank=self._rank,
                    ranks=self._ranks,
                    keep_steps=self._keep,
                )
            yield

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
