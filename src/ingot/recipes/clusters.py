"""The cluster that a plan is for: by name, from a file, or this machine."""

from dataclasses import replace
from pathlib import Path

from ingot.machine.cluster_file import read_cluster
from ingot.machine.facts import read_machine, this_cluster
from ingot.recipes.load import device_preset, load_cluster
from ingot.schema.cluster import Cluster

MACHINE_FILE = "machine.json"


def find_cluster(name_or_file: str | None, folder: Path = Path()) -> Cluster:
    """None: the machine.json that `doctor --bench` left in `folder` or here, else this machine with published rates."""
    if name_or_file:
        path = Path(name_or_file)
        return read_cluster(path) if path.suffix == ".json" or path.exists() else load_cluster(name_or_file)
    for place in (folder, Path()):
        if (place / MACHINE_FILE).is_file():
            return read_cluster(place / MACHINE_FILE)
    return with_published_rates(this_cluster(read_machine()))


def with_published_rates(cluster: Cluster) -> Cluster:
    """A "cuda" cluster of known GPUs with their published rates, its own size and memory; any other as it is."""
    preset = device_preset(cluster.device_name) if cluster.device == "cuda" else None
    if preset is None:
        return cluster
    return replace(
        load_cluster(preset),
        name=cluster.name,
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        memory_bytes=cluster.memory_bytes,
        device_name=cluster.device_name,
    )
