"""What travels between devices and their hosts where optimizer state or parameters are kept there, and its time."""

from ingot.planner.predict.time.constants import Constants
from ingot.schema.cluster import Cluster
from ingot.theory import memory
from ingot.theory.layout import Position
from ingot.theory.state import STORED_BYTES
from ingot.theory.term import Term
from ingot.units import format_bytes, format_seconds

# Numbers per parameter: master and gradient go to the host, the new master comes back (optim/offload.py).
_TRAVEL = 3
# AdamW on the host reads master, gradient and both moments, and writes three of them. The host's memory is shared by
# its devices: for each it is taken to be as fast as the link to it.
_UPDATED = 7


def host_update(position: Position, cluster: Cluster, busy: float, constants: Constants) -> Term | None:
    """Seconds that a step takes longer, None where nothing is kept on hosts or the link to them is unknown. busy: of
    computation. Where parameters themselves are there, every gather reads them from there and every gradient goes
    there, beside computation, which they slow down as collectives do."""
    parallel = position.parallel
    if parallel.offload == "none" or not cluster.host_bandwidth:
        return None
    owned = (
        sum(share.parameters / share.ranks for share in memory.shares(position))
        * STORED_BYTES[position.train.precision]
    )
    travel = 0 if parallel.offload_parameters else _TRAVEL * owned
    waited = (travel + _UPDATED * owned) / cluster.host_bandwidth
    formula = f"{format_bytes(travel + _UPDATED * owned)} / {format_bytes(cluster.host_bandwidth)}/s on the host"
    if parallel.offload_parameters:
        often = (2 if parallel.reshard else 1) + 1
        beside = position.accumulation * often * owned / cluster.host_bandwidth
        exposed = max(beside - busy, 0.0)
        waited += exposed + constants.interference * (beside - exposed)
        formula += f" + {format_seconds(beside)} of parameters and gradients, {format_seconds(exposed)} not hidden"
    return Term(waited, formula)
