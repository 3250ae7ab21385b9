"""Expert parallelism: experts are divided among the ranks of the ep view, and tokens travel to them and back."""

from typing import Any

from ingot.dist.mesh import Mesh


def dispatch_of(mesh: Mesh, local: Any) -> Any:
    """What the model's experts are given on this rank: `local` where one rank has them all and whole sequences."""
    return local
