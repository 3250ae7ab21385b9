"""The layout of each attempt of a job: that of the run file, or a fallback layout while nodes are missing. No torch."""

import contextlib
import time
from collections.abc import Callable

from ingot.events import EventLog, read_events
from ingot.schema import events
from ingot.schema.fallbacks import Fallback, Fallbacks, read_fallbacks
from ingot.schema.launch import Launch
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder


def open_layouts(folder: RunFolder, run: RunConfig) -> "Layouts":
    """Return the layouts of a run. Raises ConfigError if its settings need fallback layouts, and the file with them
    cannot be used."""
    return Layouts(folder, run.launch, read_fallbacks(folder.fallbacks, run) if run.launch.min_ranks else None)


class Layouts:
    """The layouts that a job can have. fallbacks: those of the planner; None: there is only that of the run file."""

    def __init__(
        self,
        folder: RunFolder,
        launch: Launch,
        fallbacks: Fallbacks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._folder, self._launch, self._fallbacks, self._clock = folder, launch, fallbacks, clock
        recorded = [event["overrides"] for event in read_events(folder.events, events.LAYOUT)]
        self._recorded = tuple(recorded[-1]) if recorded else ()
        self._grew_at: float | None = None

    def for_nodes(self, present: int) -> Fallback | None:
        """Return the layout for `present` nodes; None if they are enough for that of the run file, or for no other."""
        if self._fallbacks is None or present >= self._launch.nodes:
            return None
        return self._fallbacks.of_nodes(present)

    def wait_seconds(self, *, trained: bool) -> float:
        """Return how long to wait for missing nodes before the run goes on with fewer. trained: it was trained on all
        of them just now, so one is lost, and the others are not still on their way."""
        longest = self._launch.node_wait_seconds
        return min(self._launch.shrink_seconds, longest) if trained else longest

    def can_grow(self, nodes: int, present: int) -> bool:
        """Return whether a job on `nodes` nodes can have more of `present` ones, and the last `grow` is long ago: a
        node that comes and goes must not keep the others from training."""
        better = self.for_nodes(present)
        most = better.nodes if better else min(present, self._launch.nodes)
        waits = self._grew_at is not None and self._clock() < self._grew_at + self._launch.grow_seconds
        return most > nodes and not waits

    def grow(self) -> None:
        """Take in that the job starts again on more nodes."""
        self._grew_at = self._clock()

    def record(self, layout: Fallback | None, ranks: int) -> None:
        """Record the layout of an attempt, if it is another than that of the one before. None: that of the run file.
        ranks: how many take part."""
        overrides = layout.overrides if layout else ()
        if overrides == self._recorded:
            return
        self._recorded = overrides
        nodes = layout.nodes if layout else self._launch.nodes
        facts = {"nodes": nodes, "of_nodes": self._launch.nodes, "ranks": ranks, "overrides": list(overrides)}
        with contextlib.closing(EventLog(self._folder.events)) as log:
            log.write(events.LAYOUT, **facts, reason="nodes" if layout else "")
