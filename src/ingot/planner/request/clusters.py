"""The cluster of a plan: by name, from a file, or this machine.

h200              one device
8xh100            one node with 8 devices; 1024xh100: as many full nodes as 1024 devices need
128x8xh100        128 nodes with 8 devices each
72xgb200          one rack in which fast links join all devices; 16x72xgb200: 16 such racks
v5p-256, 4xv5e-256    a TPU slice by its product name; four such slices (planning only)
machine.json      a file that `doctor --bench` wrote, or your own file with the fields of schema/cluster.py
"""

import difflib
import re
from dataclasses import replace
from pathlib import Path

from ingot.errors import UsageError
from ingot.machine.facts import read_cluster, read_machine, this_cluster
from ingot.planner.request.presets import unknown
from ingot.schema.cluster import MOST_DEVICES, Cluster
from ingot.theory.devices import Device, cluster_of, devices, find_device

MACHINE_FILE = "machine.json"
# The names of these TPU slices count cores, and a chip has two cores: v4-128 has 64 chips.
_TWO_CORES = ("v3", "v4", "v5p")
_RACK = "nvl72"  # 72 GB200
_ALIASES = {"a100-80": "a100", "h100-sxm": "h100", "h100-80": "h100", "v5litepod": "tpu-v5e"}
_WAYS = "write 8xh100, 128x8xh100, 16x72xgb200, v5p-256, or give a machine.json"


def find_cluster(name_or_file: str | None, folder: Path = Path()) -> Cluster:
    """Return the cluster that a name or a file describes.

    name_or_file: if None, the cluster is read from machine.json (of `doctor --bench`) in `folder` or the working
    directory; without such a file it is this machine with published rates. Raises UsageError, for a file ConfigError.
    """
    if name_or_file:
        path = Path(name_or_file)
        return read_cluster(path) if path.suffix == ".json" or path.exists() else load_cluster(name_or_file)
    for place in (folder, Path()):
        if (place / MACHINE_FILE).is_file():
            return read_cluster(place / MACHINE_FILE)
    return with_published_rates(this_cluster(read_machine()))


def load_cluster(name: str) -> Cluster:
    """Return the cluster with a name of the forms listed at the top of this file. Raises UsageError, which proposes
    the nearest names."""
    name = name.strip().lower()
    sizes, kind = re.fullmatch(r"((?:\d+x){0,2})(.*)", name).groups()  # type: ignore[union-attr]
    counts = [int(n) for n in sizes.split("x") if n]
    slice_ = re.fullmatch(r"(?:tpu-?)?(v\d\w*?)-(\d+)", kind)
    if slice_ and f"tpu-{slice_[1]}" in devices():
        chips = int(slice_[2]) // (2 if slice_[1] in _TWO_CORES else 1)
        if len(counts) == 2:
            raise _bad_cluster(name, f"{slice_[0]} names a whole slice", f"write 4x{slice_[0]}")
        kind, counts = f"tpu-{slice_[1]}", [*(counts or [1]), chips]
    if kind == _RACK:
        if len(counts) == 2:
            raise _bad_cluster(name, f"{_RACK} names a whole rack", f"write {counts[0]}x{_RACK}")
        kind, counts = "gb200", [*(counts or [1]), devices()["gb200"].domain]
    key = {_plain(other): key for other, key in (*((key, key) for key in devices()), *_ALIASES.items())}.get(
        _plain(kind)
    )
    if key is None:
        raise unknown("E-DEVICE-UNKNOWN", "device", kind or name, tuple(devices()), _WAYS, near=_neighbors(kind))
    if 0 in counts:
        raise _bad_cluster(name, "a cluster has at least 1 device", _WAYS, "has no devices")
    return _sized(name, devices()[key], counts)


def _plain(kind: str) -> str:
    """Return the name of a device without what people write in different ways: case, dashes, spaces, the vendor."""
    return re.sub(r"[\s_-]", "", kind.lower()).removeprefix("nvidia").removeprefix("amd")


def _neighbors(kind: str) -> list[str]:
    """Return the devices whose names are most like `kind`: those that begin with the same letters, one per family."""
    plain = _plain(kind)[:100]
    letters = re.match("[a-z]*", plain)[0]  # type: ignore[index]
    scores = {key: difflib.SequenceMatcher(None, plain, _plain(key)).ratio() for key in devices()}
    alike = [key for key in devices() if letters and re.match("[a-z]*", _plain(key))[0] == letters]  # type: ignore[index]
    alike = alike or [key for key in devices() if scores[key] >= 0.6]
    found: dict[str, str] = {}
    for key in sorted(alike, key=lambda key: (-scores[key], len(key), key)):
        family = key if key.startswith("tpu") else key.partition("-")[0]
        found.setdefault(family, family if family in devices() else key)
    return list(found.values())[:3]


def _sized(name: str, device: Device, counts: list[int]) -> Cluster:
    """Return a cluster of one kind of device. counts: [] for one device, [devices], or [groups, devices per group],
    where a group is a node or a domain of fast links."""
    groups, each = (counts[0], counts[1]) if len(counts) == 2 else (1, counts[0] if counts else 1)
    if groups * each > MOST_DEVICES:
        found = f"has {groups * each:,} devices"
        raise _bad_cluster(name, f"at most {MOST_DEVICES:,} devices", "use fewer nodes", found)
    node, domain = device.node, max(device.domain, device.node)
    if len(counts) == 2 and each > domain:
        found = f"has {each} {device.device_name} in one {'slice' if device.device == 'tpu' else 'node'}"
        better = f"{groups * each // node}x{node}x{device.key}" if groups * each % node == 0 else f"{node}x{device.key}"
        rule = f"fast links join at most {domain} {device.device_name}"
        raise _bad_cluster(name, rule, f"write {better}", found)
    if each <= node:
        return cluster_of(device, groups * each, name=name, per_node=each)
    if each % node:
        low = each // node * node
        found = f"has {each} {device.device_name}, which do not fill nodes of {node}"
        raise _bad_cluster(name, "all devices of a node are used", f"use {low} or {low + node} devices", found)
    return cluster_of(device, groups * each, name=name, domain=each if len(counts) == 2 else 0)


def _bad_cluster(name: str, rule: str, fix: str, found: str = "") -> UsageError:
    return UsageError("E-CLUSTER-SHAPE", f"cluster {name!r} {found}".rstrip(), rule=rule, fix=fix, cluster=name)


def with_published_rates(cluster: Cluster) -> Cluster:
    """Return the cluster with the published rates of its GPUs; its size and memory stay. Clusters of other devices
    and of unknown GPUs are returned unchanged."""
    device = find_device(cluster.device_name) if cluster.device == "cuda" else None
    if device is None:
        return cluster
    return replace(
        cluster_of(device, 1, name=cluster.name),
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        memory_bytes=cluster.memory_bytes,
        host_memory_bytes=cluster.host_memory_bytes,
        device_name=cluster.device_name,
    )
