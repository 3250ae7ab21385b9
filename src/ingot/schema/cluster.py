"""The hardware a run is planned for."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`nodes` x `devices_per_node` equal devices.

    memory_bytes: of one device (of the machine, shared by its ranks, for "cpu").
    peak_flops: dense matmul peak per device by dtype, FLOP/s; for "cpu" a measured figure (doctor --bench).
    op_seconds: measured cost of launching one small operation.
    step_overhead_seconds: measured per step besides (collectives, loop).
    runtime_bytes: memory of one process before the model (interpreter, libraries, device context).
    measured: date of the calibration, empty for published figures.
    """

    name: str
    device: str  # "cpu" or "cuda"
    nodes: int = 1
    devices_per_node: int = 1
    memory_bytes: int
    memory_bandwidth: float = 0.0
    peak_flops: dict[str, float] = field(default_factory=dict)
    op_seconds: float = 0.0
    step_overhead_seconds: float = 0.0
    runtime_bytes: int = 0
    usd_per_hour: float = 0.0
    measured: str = ""
