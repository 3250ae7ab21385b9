"""The state that the process of a sink keeps between two starts: how far it read the event log, and its counts."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

_BYTES = 256  # of the file, always: it is written in place, which needs no room on a full disk


@dataclass(kw_only=True)
class SinkState:
    """position: of the event log, after the last event of which the sink has everything. begun: starts of ranks and
    roll-backs until there. done: the calls of the next event that returned, or were left out. tries: the processes that
    began the next call of it, and ended before it returned. sent, left_out: all calls that returned, and all that never
    will."""

    position: int = 0
    begun: int = 0
    done: int = 0
    tries: int = 0
    sent: int = 0
    left_out: int = 0


_NAMES = tuple(one.name for one in fields(SinkState))


class SinkStateFile:
    """The file of a SinkState, which is written before each call and after the last one of an event."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)

    def read(self) -> SinkState:
        """Return the recorded state; a new one if there is none that can be read."""
        try:
            found = json.loads(os.pread(self._fd, _BYTES, 0))
            return SinkState(**{name: max(int(found.get(name, 0)), 0) for name in _NAMES})  # of other versions, too
        except (OSError, ValueError, TypeError, AttributeError, OverflowError):
            return SinkState()

    def write(self, state: SinkState) -> None:
        """Record `state`, if that can be written."""
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, json.dumps(asdict(state)).ljust(_BYTES - 1).encode() + b"\n", 0)

    def close(self) -> None:
        os.close(self._fd)


def read_sink_state(path: Path) -> SinkState:
    """Return the state that the file of a sink has; a new one if there is no file."""
    if not path.exists():
        return SinkState()
    with contextlib.closing(SinkStateFile(path)) as file:
        return file.read()
