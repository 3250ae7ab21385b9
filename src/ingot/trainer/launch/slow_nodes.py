"""Nodes of a job that are drained because a rank on them stays slow, as the leader decides. No torch.

The ranks decide that the evidence suffices (telemetry/slow_machines.py), the leader whether the run gains by it: a slow
node that nothing can replace trains on.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.events import read_events
from ingot.machine.health.report import HealthReport, HealthVerdict
from ingot.machine.health.rules import HealthFinding
from ingot.schema import events
from ingot.schema.run_folder import RunFolder

# If the next machine in the same place is slow within this time, its ranks have more to do than the others.
_SAME_CAUSE_SECONDS = 86_400.0
_RANK = "rank "


@dataclass(frozen=True)
class SlowRank:
    """A rank that was slow for long enough to drain its machine. factor: its own time, divided by that of its peers.
    since: the first slow step. slowdown: the factor by which the steps of the run are longer because of it."""

    rank: int
    factor: float
    since: int
    slowdown: float

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> "SlowRank | None":
        """Return the rank of a `straggler` event; None if its machine may not be drained for it."""
        if not event.get("slowdown"):
            return None
        return cls(event["rank"], event["factor"], event["since"], event["slowdown"])


NONE_SLOW: Mapping[int, SlowRank] = {}


class SlowNodes:
    """Decides which slow nodes leave a job. ranks: of each node."""

    def __init__(self, folder: RunFolder, ranks: int):
        self._folder, self._ranks = folder, ranks
        self._stay: set[tuple[int, str]] = set()  # the reported places of nodes, each with the reason why it stays
        self._drained: dict[int, float] | None = None  # by place: when a node there was, the last time

    def judge(self, slow: SlowRank, node: str, hindrance: str) -> HealthFinding | None:
        """Return what follows for a node; None if that was reported before.

        node: its name. hindrance: why the job cannot go on without it, or would be slower; "": it gains by that.
        """
        place = slow.rank // self._ranks
        if not hindrance and self._was_replaced(place):
            hindrance = (
                "the machine before it in the same place was slow, too, so its ranks have more to do than others"
            )
        words = f"rank {slow.rank} takes {slow.factor:.1f} times as long as its peers since step {slow.since}"
        report = HealthReport(kind="slow", device=f"{_RANK}{slow.rank}", words=words, node=node)
        if not hindrance:
            self._drain_times()[place] = time.time()
            return HealthFinding(HealthVerdict.DRAIN, report, words)
        if (place, hindrance) in self._stay:
            return None
        self._stay.add((place, hindrance))
        return HealthFinding(HealthVerdict.WARN, report, f"{words}; it stays: {hindrance}")

    def _was_replaced(self, place: int) -> bool:
        """Return whether a node in this place was drained a short time ago because it was slow."""
        return self._drain_times().get(place, 0.0) > time.time() - _SAME_CAUSE_SECONDS

    def _drain_times(self) -> dict[int, float]:
        if self._drained is None:  # the whole log is read once: the leader asks several times a second
            self._drained = {
                int(event["device"].removeprefix(_RANK)) // self._ranks: event["time"]
                for event in read_events(self._folder.events, events.HEALTH)
                if event["report"] == "slow" and event["verdict"] == "drain" and event["device"].startswith(_RANK)
            }
        return self._drained
