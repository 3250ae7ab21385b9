"""The state that the process of a sink keeps between two starts: how far it read the event log, and its counts."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.config import from_dict
from ingot.errors import ConfigError

_BYTES = 256  # of the file, always: it is written in place, which needs no room on a full disk


@dataclass(kw_only=True)
class SinkState:
    """position: of the event log, after the last event that was given to the sink. begun: starts of ranks and
    roll-backs until there. sent, left_out: calls that returned, and those that raised or did not return.
    pending: the calls of the event before `position` that have not returned."""

    position: int = 0
    begun: int = 0
    sent: int = 0
    left_out: int = 0
    pending: int = 0

    @property
    def attempt(self) -> int:
        return max(self.begun - 1, 0)


class SinkStateFile:
    """The file of a SinkState, which is written before each event and after it: a process that is killed during a call
    does not repeat it."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)

    def read(self) -> SinkState:
        """Return the recorded state, with the calls that a killed process did not finish among those left out; a new
        one if there is none."""
        try:
            state = from_dict(SinkState, json.loads(os.pread(self._fd, _BYTES, 0)))
        except (ValueError, ConfigError):
            return SinkState()
        state.left_out, state.pending = state.left_out + state.pending, 0
        return state

    def write(self, state: SinkState) -> None:
        """Record `state`, if that can be written."""
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, json.dumps(asdict(state)).ljust(_BYTES - 1).encode() + b"\n", 0)


def read_sink_state(path: Path) -> SinkState:
    """Return the state that the file of a sink has; a new one if there is no file."""
    return SinkStateFile(path).read() if path.exists() else SinkState()
