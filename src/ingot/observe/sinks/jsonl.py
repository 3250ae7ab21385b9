"""Rows of JSON, one per call that has numbers or a text: for a program of one's own, or a line of DuckDB."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.plugins.sink import Sink, SinkPlace
from ingot.plugins.sink_options import JsonlOptions


class JsonlSink(Sink):
    """A file with rows {"run", "attempt", "step", "tokens", name: number ..} and {"run", "attempt", "step", "name",
    "text"}. Each is on the disk when the call returns."""

    def __init__(self, place: SinkPlace, options: JsonlOptions):
        path = place.run / options.file if options.file else place.own / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._end_torn_row(path)
        self._of: dict[str, Any] = {"run": "", "attempt": 0}

    def _end_torn_row(self, path: Path) -> None:
        """End a row that a killed process, or a full disk, cut."""
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - 1, 0))
            if size and file.read() != b"\n":
                self._file.write(b"\n")

    def open(self, run_id: str, attempt: int, config: Mapping[str, Any]) -> None:
        self._of = {"run": run_id, "attempt": attempt}

    def scalars(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        shown = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self._write(self._of | {"step": step, "tokens": tokens} | shown)

    def text(self, step: int, name: str, text: str) -> None:
        self._write(self._of | {"step": step, "name": name, "text": text})

    def _write(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        if (written := self._file.write(line)) < len(line):
            self._file.truncate(self._file.seek(0, 2) - written)
            raise OSError(f"only {written} of {len(line)} bytes of a row could be written")
