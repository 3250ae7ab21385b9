"""Accelerators by name: published peaks, memory, links and prices (devices.toml), and clusters of them.

Peaks are dense rates at the full power limit, and the denominator of MFU. A card with a lower power limit cannot reach
  its peak, so its MFU is lower.
"""

import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from ingot.config import from_dict
from ingot.schema.cluster import Cluster
from ingot.units import parse_bytes

# Memory of a process on a GPU before its model: device context, cuBLAS workspaces, NCCL buffers. Reports say 1-5 GB.
_RUNTIME_BYTES = 2 * 1024**3
# Caching allocators lose 5-10% to fragmentation.
_FRAGMENTATION = 0.08
# Time between two kernels that Python launches one by one.
_LAUNCH_SECONDS = 6e-6
# Latency of one message, including the library's own work: over fast links, and through network cards.
_LINK_SECONDS, _NETWORK_SECONDS = 3e-6, 8e-6


@dataclass(frozen=True, kw_only=True)
class Device:
    """An entry of devices.toml; the fields are documented in that file. key: the entry's name."""

    key: str = ""
    device_name: str
    words: tuple[str, ...]
    device: str = "cuda"
    source: str
    bf16: float
    fp8: float = 0.0
    fp4: float = 0.0
    fp32: float = 0.0
    memory: str
    memory_bandwidth: float
    link_bandwidth: float
    link_kind: str = "nvswitch"
    network_bandwidth: float
    network_kind: str = "infiniband"
    sharp: bool = False
    host_bandwidth: float
    node: int = 8
    domain: int = 0
    matmul_efficiency: float
    attention_efficiency: float
    watts: float = 0.0
    usd_per_hour: float = 0.0
    price: str = field(default="")

    @property
    def peaks(self) -> dict[str, float]:
        """The dense peak in FLOP/s of each dtype whose peak is known."""
        tera = {"bf16": self.bf16, "fp16": self.bf16, "fp8": self.fp8, "fp4": self.fp4, "fp32": self.fp32}
        return {dtype: rate * 1e12 for dtype, rate in tera.items() if rate}


@cache
def devices() -> dict[str, Device]:
    """Return all devices by their short names, such as "h100"."""
    text = resources.files("ingot.theory").joinpath("devices.toml").read_text(encoding="utf-8")
    return {
        key: from_dict(Device, {"key": key, **values}, where=lambda name: f"devices.toml ({name})")
        for key, values in tomllib.loads(text).items()
    }


def find_device(device_name: str) -> Device | None:
    """Return the device whose words all occur in `device_name`, the name that the driver prints ("NVIDIA H100 80GB
    HBM3").

    If several match, the device with the longest words is returned. None for an unknown device or a MIG slice.
    """
    name = device_name.lower()
    if " mig " in f" {name} ":
        return None
    known = [d for d in devices().values() if all(re.search(rf"\b{re.escape(word)}\b", name) for word in d.words)]
    return max(known, key=lambda device: sum(map(len, device.words)), default=None)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the dense peak of one device in FLOP/s, or None if devices.toml does not have it.

    dtype: "bf16", "fp16", "fp8", "fp4" or "fp32". Show None as "MFU n/a", and never replace it by a guess.
    """
    device = find_device(device_name)
    return device.peaks.get(dtype) if device else None


def cluster_of(device: Device, count: int, *, name: str, per_node: int = 0, domain: int = 0) -> Cluster:
    """Return a cluster of `count` devices with the published rates of `device`.

    per_node: devices per node; 0: the published number. `count` must be a multiple of the devices per node, or fewer.
    domain: number of devices that fast links join; 0: the published number.
    """
    per_node = min(per_node or device.node, count)
    tpu = device.device == "tpu"
    return Cluster(
        name=name,
        device=device.device,
        nodes=count // per_node,
        devices_per_node=per_node,
        memory_bytes=parse_bytes(device.memory),
        memory_bandwidth=device.memory_bandwidth,
        peak_flops=device.peaks,
        op_seconds=0.0 if tpu else _LAUNCH_SECONDS,  # a TPU runs one compiled program
        runtime_bytes=_RUNTIME_BYTES // 4 if tpu else _RUNTIME_BYTES,
        usd_per_hour=device.usd_per_hour,
        price_source=device.price,
        device_name=device.device_name,
        matmul_efficiency=device.matmul_efficiency,
        attention_efficiency=device.attention_efficiency,
        fragmentation=0.0 if tpu else _FRAGMENTATION,
        link_bandwidth=device.link_bandwidth,
        network_bandwidth=device.network_bandwidth,
        domain_devices=min(domain or device.domain, count),
        link_seconds=_LINK_SECONDS,
        network_seconds=_NETWORK_SECONDS,
        link_kind=device.link_kind,
        network_kind=device.network_kind,
        sharp=device.sharp,
        host_bandwidth=device.host_bandwidth,
        watts=device.watts,
    )


def priced_devices(ranks: int, machines: int, *, on_gpu: bool) -> int:
    """Return the number of devices that a price per hour counts: GPUs, one per rank, or machines without any."""
    return ranks if on_gpu else max(machines, 1)
