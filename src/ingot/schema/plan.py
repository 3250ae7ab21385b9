"""The planner's prediction for a run, stored next to the run file for the report to compare with measurements."""

from dataclasses import dataclass, field

from ingot.schema.cluster import Cluster
from ingot.schema.software import INGOT, Software


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The traffic along one line of the mesh (an axis or several joined axes) in one optimizer step of the busiest
    rank.

    sent_bytes: bytes that one rank sends. seconds: time of the traffic if nothing else uses its links.
      exposed_seconds: the part of that time that the step waits for. crosses: the line leaves the domain of fast links.
    """

    sent_bytes: float
    seconds: float
    exposed_seconds: float
    crosses: bool = False


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The prediction for a whole run of a plan, with its failures.

    days: wall-clock days. productive_days: the days without failures and checkpoints. goodput: productive_days / days.
    failures: expected number of interruptions. failures_per_node_day, restart_seconds: assumed values.
    checkpoint_every_seconds: time between two checkpoints (Young, Daly). checkpoint_stall_seconds: time for which a
      checkpoint pauses the steps.
    device_hours: wall-clock time summed over all devices. storage_bytes: size of all checkpoints kept at a time.
    spare_nodes: number of spare nodes with which a failed node almost always finds a replacement at once.
    snapshot_bytes_per_node: host memory of the fullest node for copies of its ranks' state, from which checkpoints are
      written while steps continue; 0 if steps wait for the write.
    read_bytes_per_second: rate at which all loaders together read training data.
    usd_by_kind: cost of "devices", "spares", "storage", "egress".
    """

    days: float
    productive_days: float
    goodput: float
    failures: float
    failures_per_node_day: float
    restart_seconds: float
    checkpoint_every_seconds: float
    checkpoint_stall_seconds: float
    device_hours: float
    storage_bytes: float = 0.0
    spare_nodes: int = 0
    snapshot_bytes_per_node: float = 0.0
    read_bytes_per_second: float = 0.0
    usd_by_kind: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A prediction of memory, time and cost.

    memory_bytes: memory of the pipeline rank that needs the most, by kind: "weights", "gradients", "optimizer",
      "activations", "logits", "gathered", "fragmentation", "runtime", and on a CPU "loader and buffers" and, if
      checkpoints are written in the background, "snapshot".
    stage_memory_bytes: the same for each pipeline rank. moments_bytes: the peak of the rank that needs the most at
      "initialisation", "first step", "steady state" and "save".
    active_parameters: parameters that a token uses: all in a dense model; 0 in plans made before ingot had experts.
    step_seconds, mfu: predictions; step_seconds is 0.0 if no rate is known, mfu is None on CPU.
    step_seconds_low, step_seconds_high: error band, from the errors of predictions for published runs (80% of them).
    mfu counts attention as causal (half of all pairs); hfu also counts recomputation (theory/flops.py).
    time_seconds: parts that sum to step_seconds. communication: traffic by mesh line. bubble: share of a step in which
      pipeline ranks wait.
    formulas: quantity -> its formula with the numbers filled in.
    warnings: notes for the user to read before the run.
    """

    version: int = 1
    run_sha256: str
    cluster: Cluster
    software: Software = INGOT
    parameters: int
    active_parameters: int = 0
    flops_per_token: float
    tokens_per_step: int
    steps: int
    memory_bytes: dict[str, int]
    stage_memory_bytes: tuple[dict[str, int], ...] = ()
    moments_bytes: dict[str, int] = field(default_factory=dict)
    step_seconds: float
    step_seconds_low: float = 0.0
    step_seconds_high: float = 0.0
    mfu: float | None = None
    hfu: float | None = None
    time_seconds: dict[str, float] = field(default_factory=dict)
    communication: dict[str, Communication] = field(default_factory=dict)
    bubble: float = 0.0
    outlook: Outlook | None = None
    checkpoint_bytes: int
    usd: float = 0.0
    formulas: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def total_memory_bytes(self) -> int:
        return sum(self.memory_bytes.values())

    @property
    def total_seconds(self) -> float:
        return self.steps * self.step_seconds
