"""Health reports from nvidia-smi: counters of memory errors, remapped rows, heat. Its process runs beside this one."""

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence

from ingot.machine.health.report import HealthReport, Kind, node_name

SECONDS = 30.0  # between two calls, each about half a second of processor time in the driver
ANSWER_SECONDS = 60.0  # a call that takes longer hangs in the driver
_FIELDS: tuple[str, ...] = (
    "pci.bus_id",
    "ecc.errors.corrected.volatile.total",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "clocks_throttle_reasons.hw_thermal_slowdown",
)
_COUNTERS: tuple[tuple[str, Kind], ...] = (
    ("ecc.errors.corrected.volatile.total", "ecc_corrected"),
    ("ecc.errors.uncorrected.volatile.total", "ecc_uncorrected"),
)
_STATES: tuple[tuple[str, Kind, str], ...] = (
    ("remapped_rows.pending", "row_remap_pending", "a row of memory is replaced at the next reset"),
    ("remapped_rows.failure", "row_remap_failure", "no spare row is left for a bad one"),
    ("clocks_throttle_reasons.hw_thermal_slowdown", "temperature", "slows itself down because it is too hot"),
)


class NvidiaSmi:
    """The state of the GPUs by nvidia-smi, asked every `SECONDS`. Raises OSError where there is no nvidia-smi.

    command: that is run; its output is the table of `_FIELDS` without a header. clock: seconds that never jump.
    """

    name = "nvidia-smi"

    def __init__(self, command: Sequence[str] = (), clock: Callable[[], float] = time.monotonic):
        if not command and not shutil.which("nvidia-smi"):
            raise FileNotFoundError("nvidia-smi is not installed")
        query = f"--query-gpu={','.join(_FIELDS)}"
        self._command = list(command) or ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        self._clock, self._due, self._began = clock, 0.0, 0.0
        self._running: subprocess.Popen | None = None
        self._before: dict[tuple[str, str], int] = {}  # device and counter -> its last value

    def poll(self) -> list[HealthReport]:
        """Return the reports of the call that has ended, if one has, and begin the next one when it is due."""
        now = self._clock()
        if self._running is None:
            if now >= self._due:
                self._due, self._began = now + SECONDS, now
                self._running = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            return []
        if self._running.poll() is None:
            return self._overdue() if now > self._began + ANSWER_SECONDS else []
        output, _ = self._running.communicate()
        self._running = None
        return self._read(output)

    def close(self) -> None:
        if self._running is not None:
            self._running.kill()  # not waited for: in a driver that hangs, it does not end
            self._running = None

    def _overdue(self) -> list[HealthReport]:
        self.close()
        self._due = self._clock() + SECONDS
        words = f"nvidia-smi has not answered for {ANSWER_SECONDS:.0f} s: the driver hangs"
        return [HealthReport(kind="silent_source", device="GPU driver", words=words, node=node_name())]

    def _read(self, output: str) -> list[HealthReport]:
        reports, node = [], node_name()
        rows = [[word.strip() for word in line.split(",")] for line in output.splitlines()]
        if not any(len(row) == len(_FIELDS) for row in rows):  # fields that this driver does not know, or no device
            words = f"nvidia-smi shows no GPU: {output.strip()[:120]}"
            return [HealthReport(kind="silent_source", device="nvidia-smi", words=words, node=node)]
        for row in rows:
            if len(row) != len(_FIELDS):
                continue  # a message
            values = dict(zip(_FIELDS, row, strict=True))
            device = f"GPU {values['pci.bus_id']}"
            for field, kind in _COUNTERS:  # "[N/A]" without ECC
                if not values[field].isdigit():
                    continue
                total, key = int(values[field]), (device, field)
                new = total - self._before.get(key, total)
                self._before[key] = total
                if new > 0:
                    words = f"{new} more, {total} since the driver was loaded"
                    reports.append(HealthReport(kind=kind, device=device, count=new, words=words, node=node))
            for field, kind, words in _STATES:
                if values[field] in ("Yes", "1", "Active"):
                    reports.append(HealthReport(kind=kind, device=device, words=words, node=node))
        return reports
