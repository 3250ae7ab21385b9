"""The machine file: a Cluster as JSON, which `doctor --bench` writes and `plan --cluster` reads."""

import json
from pathlib import Path

from ingot.config import from_dict, to_dict
from ingot.errors import ConfigError
from ingot.schema.cluster import Cluster
from ingot.storage import write_json


def write_cluster(path: Path, cluster: Cluster) -> None:
    write_json(path, to_dict(cluster))


def read_cluster(path: Path) -> Cluster:
    """Read a machine file. Raises ConfigError if the file is missing or invalid."""
    fix = "write one with `ingot doctor --bench`"
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            "E-MACHINE-MISSING",
            f"there is no machine file at {path}",
            rule="--cluster takes the name of a cluster (8xh100) or the path of a machine file",
            fix=fix,
            path=str(path),
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            "E-MACHINE-UNREADABLE",
            f"{path} cannot be read ({error})",
            rule="a machine file is one JSON object",
            fix=fix,
            path=str(path),
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            "E-MACHINE-UNREADABLE",
            f"{path} does not contain a JSON object",
            rule="a machine file is one JSON object",
            fix=fix,
            path=str(path),
            found=type(values).__name__,
        )
    return from_dict(Cluster, values, where=lambda key: f"{path} ({key})")
