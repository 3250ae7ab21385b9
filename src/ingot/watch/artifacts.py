"""The files of a run folder besides its logs, read again when they change: run file, plan, tokens, numbers of ranks."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingot.config import from_dict
from ingot.errors import IngotError
from ingot.report.facts import RunData
from ingot.schema.metrics import NewestRow, newest_rows
from ingot.schema.plan import Plan
from ingot.schema.tokens import read_token_manifest
from ingot.theory.rules import recorded_run

_RANKS_SECONDS = 2.0  # between two looks at the numbers of the ranks


class RunArtifacts:
    """The files of a run. data: gets the run file, the plan and the manifest of the tokens.

    ranks: the newest row of each rank. problems: what cannot be read, in words, by the name of the file.
    """

    def __init__(self, data: RunData):
        self._data, self._folder = data, data.folder
        self.ranks: dict[int, NewestRow] = {}
        self.problems: dict[str, str] = {}
        self._states: dict[Path, tuple[int, int] | None] = {}
        self._ranks_read = 0.0

    def read(self) -> int:
        """Read what has changed since the last call. Return how many files did."""
        changed = 0
        if self._has_changed(self._folder.config):
            changed += 1
            self._data.run = self._read("run.toml", lambda: recorded_run(self._folder.config))
            if self._data.run:
                tokens = self._folder.root / self._data.run.data.tokens
                if (tokens / "manifest.json").is_file():
                    self._data.tokens = self._read("tokens", lambda: read_token_manifest(tokens))
        if self._has_changed(self._folder.plan):
            changed += 1
            self._data.plan = self._read("plan.json", self._plan)
        return changed + self._read_ranks()

    def _plan(self) -> Plan:
        return from_dict(Plan, json.loads(self._folder.plan.read_bytes()), where=lambda key: f"plan.json ({key})")

    def _read(self, name: str, read: Callable[[], Any]) -> Any:
        self.problems.pop(name, None)
        try:
            return read()
        except IngotError as error:
            self.problems[name] = error.found
        except (OSError, ValueError, RecursionError, TypeError) as error:
            self.problems[name] = f"{name} cannot be read: {error}"
        return None

    def _has_changed(self, path: Path) -> bool:
        try:
            found = path.stat()
            state = (found.st_mtime_ns, found.st_ino)
        except OSError:
            state = None
        before = self._states.get(path)
        self._states[path] = state
        return state is not None and state != before

    def _read_ranks(self) -> bool:
        """Look at the numbers of the ranks now and then. Return whether they are new."""
        now = time.monotonic()
        if now - self._ranks_read < _RANKS_SECONDS and self.ranks:
            return False
        self._ranks_read = now
        with suppress(OSError, ValueError):  # segments are removed while they are read
            found = newest_rows(self._folder.metrics)
            if found != self.ranks:
                self.ranks = found
                return True
        return False
