"""The hardware of a published run: what its row says, and of what it leaves out, what is known of the device."""

import math
import re
from dataclasses import replace

from ingot.planner.published.foreign.row import Row
from ingot.schema.cluster import Cluster
from ingot.theory.devices import Device, cluster_of, find_device

# Of accelerators that nobody here knows: FLOP of the 16-bit peak per byte of memory bandwidth (V100 139, A100 156,
# MI300X 247, H100 295), and what large matrix products reach of that peak.
_FLOP_PER_BYTE = 200
_UNKNOWN_EFFICIENCY = 0.75
_DAYS = 30  # that a run took whose number of devices nobody says


def known_device(name: str) -> Device | None:
    """By what people call it: "A100-80", "TPUv4", "H100-HBM2e-96-500W"."""
    spaced = re.sub(r"tpu[\s-]*v", "tpu v", name.lower())
    sized = re.sub(r"[-_ ](\d{2,3})(?:gb)?\b", r" \1gb", spaced)
    return find_device(re.sub(r"\bmi250\b", "mi250x", sized.replace("_", " ")))


def devices_of(row: Row, notes: list[str]) -> int | None:
    """How many devices; of whole runs with device-hours alone, a usual number."""
    if (count := row.count("cluster", "n_gpus")) is not None:
        return count
    hours = row.number("measured", "gpu_hours")
    if hours is None:
        return None
    days = row.number("measured", "days") or _DAYS
    count = 2 ** max(round(math.log2(hours / (24 * days))), 0)
    notes.append(f"{count} devices, with which the run takes about {days:g} days")
    return count


def slices_of(row: Row) -> int:
    """Slices of TPUs, which a slow network joins."""
    found = re.search(r"(\d+)[- ](?:slices?|pods?)\b", row.words) if "tpu" in row.text("cluster", "gpu") else None
    return max(int(found[1]), 1) if found else 1


def cluster_for(row: Row, count: int, notes: list[str]) -> Cluster | None:
    """None when the device is unknown and the row has no peak."""
    name = row.text("cluster", "gpu")
    device = known_device(name) or _described(row, name, notes)
    if device is None:
        return None
    per_node = min(row.count("cluster", "gpus_per_node") or device.node, count)
    whole = -(-count // per_node) * per_node
    if whole != count:
        notes.append(f"{count} devices fill {whole // per_node} nodes of {per_node}")
    domain = count // slices_of(row) if device.device == "tpu" else 0
    cluster = cluster_of(device, whole, name=name or "unknown", per_node=per_node, domain=domain)
    return _as_stated(row, cluster)


def _as_stated(row: Row, cluster: Cluster) -> Cluster:
    peaks = dict(cluster.peak_flops)
    if peak := row.number("cluster", "peak_tflops"):
        peaks |= {"bf16": peak * 1e12, "fp16": peak * 1e12}
    if peak := row.number("cluster", "peak_fp8_tflops"):
        peaks["fp8"] = peak * 1e12
    link, network = row.number("cluster", "intra_bw"), row.number("cluster", "inter_bw")
    return replace(
        cluster,
        peak_flops=peaks,
        link_bandwidth=link * 1e9 if link else cluster.link_bandwidth,
        network_bandwidth=network * 1e9 if network else cluster.network_bandwidth,
        network_kind="ethernet" if re.search(r"roce|ethernet", row.words) else cluster.network_kind,
    )


def _described(row: Row, name: str, notes: list[str]) -> Device | None:
    peak = row.number("cluster", "peak_tflops")
    if peak is None:
        return None
    notes.append(f"{name or 'the device'} is unknown: its memory bandwidth is taken as peak / {_FLOP_PER_BYTE} FLOP/B")
    return Device(
        device_name=name,
        words=(),
        source="the row itself",
        bf16=peak,
        memory="79 GiB",
        memory_bandwidth=peak * 1e12 / _FLOP_PER_BYTE,
        link_bandwidth=(row.number("cluster", "intra_bw") or 64) * 1e9,
        network_bandwidth=(row.number("cluster", "inter_bw") or 12.5) * 1e9,
        host_bandwidth=26e9,
        matmul_efficiency=_UNKNOWN_EFFICIENCY,
        attention_efficiency=0.4,
    )
