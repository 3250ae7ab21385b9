"""The place of this node in its cluster, from the widest part that can fail at once to the narrowest."""

import os
from collections.abc import Mapping, Sequence

VARIABLE = "INGOT_TOPOLOGY"


def node_path(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the parts of the cluster that this node is in, such as ("row2", "rack7"); () if nothing names them.

    They are those of INGOT_TOPOLOGY, with "/" between them, else the switches in Slurm's SLURM_TOPOLOGY_ADDR, from the
    top-level one to the one that the node is plugged into (sbatch, "output environment variables").
    """
    if own := environment.get(VARIABLE):
        return tuple(part for part in own.split("/") if part)
    switches = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    return tuple(switches[:-1])  # the last one is the name of the node


def far_apart(paths: Sequence[tuple[str, ...]], node: int, count: int) -> list[int]:
    """Return the numbers of `count` other nodes, as far from `node`, and from each other, as the cluster allows.

    paths: of each node, as `node_path` returns them. Nodes are put in the order of their paths, then of their numbers,
    since near numbers often share a switch and a power supply. The i-th node returned is i / (count + 1) of all nodes
    further, in a circle. So two of them are in one part only if this part has more than n / (count + 1) nodes, rounded
    down, and every node is chosen equally often.
    """
    order = sorted(range(len(paths)), key=lambda number: (paths[number], number))
    place = order.index(node)
    return [order[(place + i * len(paths) // (count + 1)) % len(paths)] for i in range(1, count + 1)]
