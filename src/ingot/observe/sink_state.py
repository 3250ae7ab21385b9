"""The state that the process of a sink keeps between two starts: how far it read the event log, and its counts."""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_BYTES = 512  # of the file, always: it is written in place, which needs no room on a full disk


@dataclass(kw_only=True)
class SinkState:
    """position: of the event log, after the last event of which the sink has everything. begun: starts of ranks and
    roll-backs until there. done: the calls of the next event that returned, or were left out. tried: calls that began
    in processes which ended before they returned, as [position, done, number of processes], by place. They may be
    further on than `position`, which is before a call that waits. sent, left_out: all calls that returned, and all
    that never will."""

    position: int = 0
    begun: int = 0
    done: int = 0
    sent: int = 0
    left_out: int = 0
    tried: list[list[int]] = field(default_factory=list)


MOST_TRIED = 8  # places of SinkState.tried: that is what the file has room for
_NUMBERS = ("position", "begun", "done", "sent", "left_out")


def _state_of(found: Mapping[str, Any]) -> SinkState:  # of other versions, too
    tried = [[max(int(number), 0) for number in place] for place in found.get("tried", [])]
    if any(len(place) != 3 for place in tried):
        raise ValueError(f"tried {tried}")
    return SinkState(**{name: max(int(found.get(name, 0)), 0) for name in _NUMBERS}, tried=tried[-MOST_TRIED:])


class SinkStateFile:
    """The file of a SinkState, which is written before each call and after the last one of an event."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)

    def read(self) -> SinkState:
        """Return the recorded state; a new one if there is none that can be read."""
        try:
            return _state_of(json.loads(os.pread(self._fd, _BYTES, 0)))
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
