"""Growth of processes over their lives: memory, open files, sockets that listen. No torch.

A soak has many launchers, one after the other. Each is compared with itself only.
"""

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ingot.drill.listening import listening, open_files
from ingot.machine.processes import identity_of

SAMPLE_SECONDS = 1.0
_WARM_SECONDS = 5.0  # of a process, in which its memory grows by imports and first uses
_LEAST_SECONDS = 60.0  # of all lives together, for a slope
_LEAST_SAMPLES = 12
_MOST_BYTES_PER_MINUTE = 1e6
_MOST_FILES = 2
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Growth:
    """Samples of processes: `sample` takes one of each, at most once a second."""

    def __init__(self):
        self._lives: dict[str, list[tuple[float, int, int, int]]] = defaultdict(list)
        self._first: dict[str, float] = {}
        self._last = 0.0

    def sample(self, *processes: int) -> None:
        """Take a sample of each of these processes that lives."""
        now = time.monotonic()
        if now - self._last < SAMPLE_SECONDS:
            return
        self._last = now
        for pid in processes:
            with suppress(OSError, IndexError):
                name = identity_of(pid)
                if now - self._first.setdefault(name, now) < _WARM_SECONDS:
                    continue
                memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
                self.add(name, now, memory, len(open_files(pid)), len(listening(pid)))

    def add(self, process: str, at: float, memory: int, files: int, listening: int) -> None:
        """Add a sample. process: its name. at: seconds. memory: resident bytes."""
        self._lives[process].append((at, memory, files, listening))

    def memory_slope(self) -> float | None:
        """Return the growth of memory in bytes per minute, one slope fitted to all lives (least squares, each with its
        own start); None if they are too short together."""
        lives = [life for life in self._lives.values() if len(life) > 1]
        if sum(life[-1][0] - life[0][0] for life in lives) < _LEAST_SECONDS:
            return None
        above = below = 0.0
        for life in lives:
            mean_at = sum(one[0] for one in life) / len(life)
            mean_memory = sum(one[1] for one in life) / len(life)
            above += sum((one[0] - mean_at) * (one[1] - mean_memory) for one in life)
            below += sum((one[0] - mean_at) ** 2 for one in life)
        return above / below * 60

    def files(self) -> int:
        """Return by how many the open files of a process grew at most: from the most in the first quarter of its life
        to the fewest in the last, because some are open for moments."""
        return max((_grown([one[2] for one in life]) for life in self._lives.values()), default=0)

    def ports(self) -> int:
        """Return by how many the listening sockets of a process grew at most, as `files` does."""
        return max((_grown([one[3] for one in life]) for life in self._lives.values()), default=0)

    def problem(self) -> str:
        """Return what grew too much, "" if nothing did."""
        slope = self.memory_slope() or 0.0
        if slope > _MOST_BYTES_PER_MINUTE:
            return f"memory grows by {slope / 1e6:.2f} MB per minute, more than {_MOST_BYTES_PER_MINUTE / 1e6:.0f}"
        if self.files() > _MOST_FILES:
            return f"{self.files()} more files are open, more than {_MOST_FILES}"
        return f"{self.ports()} more sockets listen" if self.ports() > 0 else ""


def _grown(counts: Sequence[int]) -> int:
    if len(counts) < _LEAST_SAMPLES:
        return 0
    quarter = len(counts) // 4
    return max(min(counts[-quarter:]) - max(counts[:quarter]), 0)
