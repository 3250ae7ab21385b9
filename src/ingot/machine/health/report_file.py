"""Health reports from a file that the site's own monitor writes: a JSON object per line."""

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from ingot.config import from_dict
from ingot.errors import ConfigError
from ingot.machine.health.report import KINDS, HealthReport, node_name

_MOST_BYTES = 1 << 20  # of one call


def add_report(path: Path, report: HealthReport) -> None:
    """Add a report to a file, from which a ReportFile reads it."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(report)) + "\n")


class ReportFile:
    """The lines that are added to `path` from now on, each as {"kind": "xid", "code": 79, "device": "GPU 0"}, with the
    fields of HealthReport. The file may come later. Lines with a "node" are for the machine of this name only."""

    def __init__(self, path: Path):
        self._path, self._node = path, node_name()
        self.name = str(path)
        self._position = path.stat().st_size if path.exists() else 0

    def poll(self) -> list[HealthReport]:
        """Return the reports since the last call; a line that is none is a report itself."""
        added = b""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            if file.seek(0, 2) < self._position:
                self._position = 0  # another file took its place
            file.seek(self._position)
            added = file.read(_MOST_BYTES)
        whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        found = [self._read(line.decode(errors="replace")) for line in whole.splitlines() if line.strip()]
        return [report for report in found if report.node == self._node]

    def close(self) -> None: ...

    def _read(self, line: str) -> HealthReport:
        try:
            report = from_dict(HealthReport, json.loads(line))
        except (ValueError, TypeError, RecursionError, ConfigError):
            words = f"a line is no report with a kind of {', '.join(KINDS)}: {line[:80]}"
            return HealthReport(kind="silent_source", device=self.name, words=words, node=self._node)
        return report if report.node else HealthReport(**{**vars(report), "node": self._node})
