"""The layout of each attempt of a job: that of the run file, or a fallback layout while nodes are missing, or after a
rank ran out of memory. No torch."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ingot.errors import ConfigError, RunFailed
from ingot.events import EventLog, read_events
from ingot.schema import events
from ingot.schema.fallbacks import Fallback, Fallbacks, pasted, read_fallbacks
from ingot.schema.launch import Launch
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.trainer.resilience.incidents import JobIncident
from ingot.units import format_bytes


def open_layouts(folder: RunFolder, run: RunConfig) -> "Layouts":
    """Return the layouts of a run. Raises ConfigError if its settings need fallback layouts, and the file with them
    cannot be used."""
    try:
        return Layouts(folder, run.launch, read_fallbacks(folder.fallbacks, run))
    except ConfigError:
        if run.launch.min_ranks or run.launch.on_oom == "adapt":
            raise
        return Layouts(folder, run.launch)


def _known_too_much(recorded: Sequence[Mapping[str, Any]], fallbacks: Fallbacks) -> float:
    """Return the memory [bytes] that a rank did not have in an earlier job of the run, by its recorded layouts:
    infinite if the newest of them was not taken for memory."""
    newest = next((event for event in reversed(recorded) if event["reason"] != "nodes"), None)
    if newest is None:
        return math.inf
    base = fallbacks.base_of(newest["nodes"])
    ladder = fallbacks.ladder(base) if base else ()
    return next((a.memory_bytes for a, b in pairwise(ladder) if list(b.overrides) == newest["overrides"]), math.inf)


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
        recorded = list(read_events(folder.events, events.LAYOUT))
        self._recorded = tuple(recorded[-1]["overrides"]) if recorded else ()
        # A layout that is predicted to need this memory [bytes] is not tried: with as much, a rank ran out of it.
        self._too_much = _known_too_much(recorded, fallbacks) if fallbacks and launch.on_oom == "adapt" else math.inf
        self._ladder = self._of(None)  # the layouts on the nodes of this attempt, and its own
        self._now = self._fitting()
        self._kills: list[float] = []  # when the kernel killed a rank for lack of memory
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

    @property
    def adapted(self) -> tuple[str, ...]:
        """The settings of this attempt, or of the first one on all nodes, if it has others for lack of memory."""
        return self._now.overrides if self._now and self._now is not self._ladder[0] else ()

    def _of(self, layout: Fallback | None) -> tuple[Fallback, ...]:
        """Return the layout of fewer nodes, or that of the run file, and those with less memory on as many nodes."""
        return self._fallbacks.ladder(layout or self._fallbacks.own) if self._fallbacks else ()

    def _fitting(self) -> Fallback | None:
        """Return the first layout with less memory than was too much; the one with the least if none has."""
        fitting = (entry for entry in self._ladder if entry.memory_bytes < self._too_much)
        return next(fitting, self._ladder[-1] if self._ladder else None)

    def begin(self, layout: Fallback | None, ranks: int) -> tuple[str, ...]:
        """Return the settings in which an attempt differs from the run file. They are recorded if the attempt before
        had others.

        layout: that of fewer nodes; None: all take part. ranks: how many take part.
        """
        self._ladder = self._of(layout)
        self._now = self._fitting()
        overrides = self._now.overrides if self._now else ()
        if overrides != self._recorded:
            self._recorded = overrides
            nodes = layout.nodes if layout else self._launch.nodes
            facts = {"nodes": nodes, "of_nodes": self._launch.nodes, "ranks": ranks, "overrides": list(overrides)}
            with EventLog(self._folder.events) as log:
                log.write(events.LAYOUT, **facts, reason="memory" if self.adapted else "nodes" if layout else "")
        return overrides

    def respond(self, incident: JobIncident) -> JobIncident:
        """Take the next layout with less memory if a rank ran out of it and launch.on_oom permits that; otherwise
        return the incident with the error that shows it.

        One kill by the kernel is an accident: it may be due to another process of the machine.
        """
        if incident.kind != "memory" or incident.error or self._is_accident(incident):
            return incident
        too_much = min(self._too_much, self._now.memory_bytes) if self._now else self._too_much
        change = next((entry for entry in self._ladder if entry.memory_bytes < too_much), None)
        if change is None or self._launch.on_oom == "stop":
            return replace(incident, error=self._out_of_memory(incident, change))
        self._too_much = too_much
        cause = f"{incident.cause}; goes on with {' '.join(change.overrides)}"
        return replace(incident, adapted=True, cause=cause)

    def _is_accident(self, incident: JobIncident) -> bool:
        if incident.signature:  # an error of the rank itself
            return False
        now = self._clock()
        self._kills = [at for at in self._kills if at > now - self._launch.restart_window_seconds] + [now]
        return len(self._kills) == 1

    def _out_of_memory(self, incident: JobIncident, change: Fallback | None) -> RunFailed:
        found = self._fallbacks
        who = f"rank {incident.rank}" if incident.rank >= 0 else "the job"
        bill = found.bill_of(incident.rank) if found and incident.rank >= 0 and self._now is found.own else {}
        parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in bill.items() if size)
        predicted = f"; it needs {parts}, as predicted: {format_bytes(sum(bill.values()))}" if bill else ""
        there = f" of {format_bytes(found.available_bytes)}" if found and bill else ""
        fix = "lower train.micro_batch or seq_len, recompute activations, or use more ranks"
        if self.adapted:
            taken = self._ladder[1 : self._ladder.index(self._now) + 1] if self._now else ()
            tried = "; ".join(" ".join(one.overrides) for one in taken)
            predicted += f", the last of the layouts with less memory that the planner found: {tried}"
            fix = "use more ranks, or lower train.seq_len; `ingot check` shows what else needs less"
        if found and change:
            adapt = "--set launch.on_oom=adapt, which goes on with such layouts"
            of_all = change.nodes == self._launch.nodes  # otherwise the settings would keep the run on fewer nodes
            options = f"{pasted(change.overrides)} or {adapt}" if of_all else adapt
            fix = f"give the command again with {options}: {change.text(found.own)}"
        return RunFailed(
            "E-RUN-MEMORY",
            f"{who} {incident.cause} near step {incident.step}{predicted}{there}",
            rule="a rank needs the memory of its layout; with the same layout it fails again",
            fix=fix,
            rank=incident.rank,
            step=incident.step,
            cause=incident.cause,
            bytes=bill,
            overrides=list(change.overrides) if change else [],
        )
