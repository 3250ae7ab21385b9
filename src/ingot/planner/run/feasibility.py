"""The planner's answer to "does this run work there, and how well", with which `ingot check` begins."""

from collections.abc import Iterator
from dataclasses import dataclass

from ingot.planner.predict.memory.peak_memory import rank_memory_bytes
from ingot.planner.run.plan import make_plan
from ingot.planner.search.candidates import Evaluator
from ingot.planner.search.moves import LayoutChange, best_change, overrides_between
from ingot.planner.search.space import with_context
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT


@dataclass(frozen=True, kw_only=True)
class Feasibility:
    """The prediction for a run as it is, and the one change of its layout that helps most.

    available_bytes: memory of a rank's device. change: None if no single change is faster and fits, or, for a run that
    does not fit, if none takes less memory.
    """

    run: RunConfig
    plan: Plan
    available_bytes: float
    change: LayoutChange | None

    @property
    def fits(self) -> bool:
        return self.has_devices and self.plan.total_memory_bytes <= self.available_bytes

    @property
    def has_devices(self) -> bool:
        """True if the cluster has a device for each rank. Ranks share the cores of a CPU."""
        cluster = self.plan.cluster
        return cluster.device == "cpu" or self.run.parallel.world_size <= cluster.devices

    @property
    def largest(self) -> tuple[str, int]:
        """The kind of memory that takes the most on the fullest rank, and its bytes."""
        return max(self.plan.memory_bytes.items(), key=lambda part: part[1])

    @property
    def exposed(self) -> Iterator[tuple[str, float]]:
        """The lines of the mesh for which a step waits, with seconds, the longest first."""
        seconds = {line: traffic.exposed_seconds for line, traffic in self.plan.communication.items()}
        return ((line, seconds[line]) for line in sorted(seconds, key=lambda line: -seconds[line]) if seconds[line] > 0)

    @property
    def overrides(self) -> tuple[str, ...]:
        """The change as KEY=VALUE for --set: the changed setting first, then those that follow from it."""
        if not self.change:
            return ()
        return overrides_between(self.run, self.change.candidate.run, self.change.setting)

    def facts(self) -> dict:
        """Return the feasibility as plain values, for JSON."""
        plan, change = self.plan, self.change
        kind, size = self.largest
        return {
            "fits": self.fits,
            "ranks": self.run.parallel.world_size,
            "devices": plan.cluster.devices,
            "memory_bytes": plan.total_memory_bytes,
            "available_bytes": self.available_bytes,
            "margin_bytes": self.available_bytes - plan.total_memory_bytes,
            "largest": {"kind": kind, "bytes": size},
            "step_seconds": plan.step_seconds,
            "step_seconds_low": plan.step_seconds_low,
            "step_seconds_high": plan.step_seconds_high,
            "mfu": plan.mfu,
            "bubble": plan.bubble,
            "exposed_seconds": dict(self.exposed),
            "change": change
            and {
                "overrides": self.overrides,
                "fits": change.candidate.memory_bytes <= self.available_bytes,
                "memory_bytes": change.candidate.memory_bytes,
                "step_seconds": change.candidate.step_seconds,
            },
        }


def feasibility(run: RunConfig, cluster: Cluster) -> Feasibility:
    """Return the feasibility of a run with a legal layout, even if it does not fit or its time is unknown."""
    run, _ = with_context(run, cluster)
    candidate = Evaluator(run, cluster, INGOT).candidate(run)
    return Feasibility(
        run=run,
        plan=make_plan(run, cluster),
        available_bytes=rank_memory_bytes(cluster, run.parallel.world_size),
        change=best_change(candidate, cluster),
    )
