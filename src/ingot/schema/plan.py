"""What the planner predicts for a run, kept beside the run file so that the report can hold it against measurements."""

from dataclasses import dataclass, field

from ingot.schema.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Plan:
    """memory_bytes: per rank, by kind: "weights", "gradients", "optimizer", "activations", "logits", "gathered",
    "fragmentation", "runtime", and on a CPU "loader and buffers".

    active_parameters: those that a token meets; all of a dense model, 0 in plans from before there were experts.
    step_seconds, mfu: predicted; step_seconds is 0.0 when no rate is known, mfu is None on CPU.
    formulas: quantity -> the formula with its numbers filled in.
    warnings: what a user should know before starting.
    """

    version: int = 1
    run_sha256: str
    cluster: Cluster
    parameters: int
    active_parameters: int = 0
    flops_per_token: float
    tokens_per_step: int
    steps: int
    memory_bytes: dict[str, int]
    step_seconds: float
    mfu: float | None = None
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
