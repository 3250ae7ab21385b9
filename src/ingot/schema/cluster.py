"""The hardware that a run is planned for."""

from dataclasses import dataclass, field

from ingot.ranges import Bytes, Degree, Factor, PositiveBytes, PositiveDegree, Rate, Seconds, Usd, Watts

MOST_DEVICES = 1_000_000
# (bandwidth, the units that people write it in by mistake, an example of the right way)
_UNITS = (
    ("memory_bandwidth", "GB or TB", "3.35 TB/s as 3.35e12"),
    ("link_bandwidth", "GB", "450 GB/s as 450e9 (one direction)"),
    ("network_bandwidth", "Gb or GB", "400 Gb/s as 50e9"),
    ("host_bandwidth", "GB", "52 GB/s as 52e9"),
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`nodes` x `devices_per_node` equal devices.

    device: the planner accepts "tpu", but ingot's trainer does not run on TPUs.
    memory_bytes: memory of one device; for "cpu", memory of the machine, which its ranks share.
    host_memory_bytes: memory of one node's host, beside that of its devices; 0: unknown. Not used for "cpu".
    peak_flops: dense matmul peak per device by dtype, FLOP/s; for "cpu" a measured rate (doctor --bench).
    op_seconds: measured time to launch one small operation.
    step_overhead_seconds: measured time of a step that nothing else accounts for (collectives, training loop).
    runtime_bytes: memory of one process before the model is built (interpreter, libraries, device context).
    device_name: name as the driver prints it ("NVIDIA H200"), empty for "cpu".
    matmul_efficiency: share of `peak_flops` that large matrix products reach; 1.0 if the peak itself was measured.
    attention_efficiency: the same for attention (above 1 if the peak was measured on small products).
    fragmentation: bytes that the allocator has reserved but cannot use, as a share of the live bytes.
    link_bandwidth, network_bandwidth: bytes/s of one device in one direction, inside a node and between nodes.
    domain_devices: number of devices that fast links join: 72 in an NVL72 rack, a whole slice of TPUs; 0: one node.
    link_seconds, network_seconds: latency of one message inside the domain, and between domains.
    link_kind: "nvswitch" (all pairs at full rate), "pairs" (each pair has its own slower link), "pcie", "torus".
    network_kind: "infiniband", "ethernet" (RoCE), "dcn" (between slices of TPUs). `ingot explain comms` shows both
      kinds; the bandwidths decide predictions.
    sharp: switches do the additions (NVLink SHARP inside a domain), so each rank sends its data once per all-reduce.
    host_bandwidth: bytes/s between one device and the host's memory. watts: power limit of one device.
    price_source: source and date of usd_per_hour.
    resolution: relative error of fitted rates on the shapes that they were measured with; 0 for published rates.
    measured: date of the calibration, empty for published rates.
    """

    name: str
    device: str  # "cpu", "cuda" or "tpu"
    nodes: PositiveDegree = 1
    devices_per_node: PositiveDegree = 1
    memory_bytes: PositiveBytes
    host_memory_bytes: Bytes = 0
    memory_bandwidth: Rate = 0.0
    peak_flops: dict[str, Rate] = field(default_factory=dict)
    op_seconds: Seconds = 0.0
    step_overhead_seconds: Seconds = 0.0
    runtime_bytes: Bytes = 0
    usd_per_hour: Usd = 0.0
    device_name: str = ""
    matmul_efficiency: Factor = 1.0
    attention_efficiency: Factor = 1.0
    fragmentation: Factor = 0.0
    link_bandwidth: Rate = 0.0
    network_bandwidth: Rate = 0.0
    domain_devices: Degree = 0
    link_seconds: Seconds = 0.0
    network_seconds: Seconds = 0.0
    link_kind: str = "nvswitch"
    network_kind: str = "infiniband"
    sharp: bool = False
    host_bandwidth: Rate = 0.0
    watts: Watts = 0.0
    price_source: str = ""
    resolution: Factor = 0.0
    measured: str = ""

    def problems(self):
        if self.devices > MOST_DEVICES:
            yield "nodes", f"is {self.nodes:,}: together {self.devices:,} devices, must be at most {MOST_DEVICES:,}"
        for name in ("matmul_efficiency", "attention_efficiency"):
            if getattr(self, name) <= 0:
                yield name, f"is {getattr(self, name)}, must be positive"
        if self.device not in ("cpu", "cuda", "tpu"):
            yield "device", f'is {self.device!r}, must be "cpu", "cuda" or "tpu"'
        for name, wrong, right in _UNITS:
            value = getattr(self, name)
            if 0 < value < 1e6 and self.device != "cpu":
                yield name, f"is {value:g} bytes/s; it counts bytes, not {wrong}: write {right}"
        for dtype, rate in self.peak_flops.items():
            if 0 < rate < 1e6:
                yield "peak_flops", f"{dtype} is {rate:g} FLOP/s; 989 TFLOP/s are 989e12"

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def domain(self) -> int:
        """The number of devices that fast links join.

        If the devices do not fill whole racks, each rack has an equal part: of 256 devices in racks of 72, each has 64.
        """
        most, devices = self.domain_devices or self.devices_per_node, self.devices
        return most if devices <= most else next(size for size in range(most, 0, -1) if devices % size == 0)
