"""The cluster that a plan is for: by name, from a file, or this machine."""

from pathlib import Path

from ingot.machine.cluster_file import read_cluster
from ingot.machine.facts import read_machine, this_cluster
from ingot.recipes.load import load_cluster
from ingot.schema.cluster import Cluster

MACHINE_FILE = "machine.json"


def find_cluster(name_or_file: str | None, folder: Path = Path()) -> Cluster:
    """None: the machine.json that `doctor --bench` left in `folder` or here, else this machine without rates."""
    if name_or_file:
        path = Path(name_or_file)
        return read_cluster(path) if path.suffix == ".json" or path.exists() else load_cluster(name_or_file)
    for place in (folder, Path()):
        if (place / MACHINE_FILE).is_file():
            return read_cluster(place / MACHINE_FILE)
    return this_cluster(read_machine())
