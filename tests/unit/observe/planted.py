"""Run folders with a run file and events, as a run would write them, for tests of what observes runs."""

import time
from collections.abc import Callable
from pathlib import Path
from socket import create_server
from typing import Any

from tests.unit.plugins.test_registry import RUN

from ingot.events import EventLog
from ingot.observe.ranks import RANK_METRICS
from ingot.schema import events
from ingot.schema.metric_files import TableWriter, lineage_folder
from ingot.schema.run_folder import RunFolder

SINK = """
from ingot.plugins.sink import SINKS, Sink, SinkPart
import os, pathlib, time

class Own(Sink):
    def __init__(self, place, options): self.place = place
    def scalars(self, step, tokens, values): pass
"""


def planted(root: Path, settings: str = "", plugin: str = "") -> RunFolder:
    """A run folder. settings: further tables of its run file. plugin: the rest of a plug-in `own` with sinks."""
    folder = RunFolder(root / "run")
    folder.root.mkdir()
    if plugin:
        (folder.root / "own.py").write_text(SINK + plugin)
        settings += '\n[plugins]\nmodules = ["own"]\n'
    folder.config.write_text(RUN + settings)
    return folder


class PlantedRun:
    """The writer of the events of a run in a folder."""

    def __init__(self, folder: RunFolder, world_size: int = 2):
        self.log, self.world_size = EventLog(folder.events), world_size

    def write(self, kind: str, **facts: Any) -> None:
        self.log.write(kind, **facts)

    def start(self, from_step: int = 0) -> None:
        for rank in range(self.world_size):
            self.write(events.RANK_STARTED, rank=rank, pid=1, host=f"node{rank // 4}", attempt=0)
        self.write(events.RUN_STARTED, run="x", attempt=0, world_size=self.world_size, from_step=from_step)

    def line(self, step: int, loss: float = 2.0) -> None:
        self.write(events.STEP, step=step, loss=loss, grad_norm=1.0, lr=1e-3)
        facts = {"bpb": loss / 2, "tokens": step * 16, "tokens_per_second": 100.0, "mfu": None, "cost_usd": None}
        self.write(events.PROGRESS, step=step, steps=10, loss=loss, **facts)
        most = {"mean": 0.5, "least": 0.25, "most": 0.75, "rank": self.world_size - 1}
        self.write(events.WAITS, step=step, steps=1, computing=most, data=most | {"rank": 0})


def write_ranks(folder: RunFolder, ranks: int, step: int = 3) -> None:
    """Write a row for every rank: rank r has r + 1 in all its numbers."""
    folder.metrics.mkdir(exist_ok=True)
    for rank in range(ranks):
        table = TableWriter(
            lineage_folder(folder.metrics, 1, 1) / f"rank-{rank:05}", list(RANK_METRICS), {"line_steps": 1}
        )
        table.add(step, time.time(), dict.fromkeys(RANK_METRICS, rank + 1.0))
        table.close()


def free_port() -> int:
    with create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def eventually(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `holds()`; fail if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
