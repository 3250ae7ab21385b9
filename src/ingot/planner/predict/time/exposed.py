"""The exposed time of communication and host transfers (the time that a step waits for them), by purpose. Communication
that is not exposed still slows computation down a little.

tensor parallel    the next product waits: all of it, or a share if products and collectives are split to overlap
Ulysses            attention waits for its heads: all of it
ring               keys and values move during attention: the part that exceeds attention's time
experts            a block waits for its tokens: all of it, but sending to experts overlaps with the shared experts
data parallel      the part that exceeds the concurrent computation; at least the first gather and the last reduction
"""

from dataclasses import dataclass

from ingot.planner.predict.time.constants import Constants, fitted
from ingot.planner.predict.time.links import LineTime, bandwidth_of, counted_as, line_of, traffic_seconds
from ingot.schema.cluster import Cluster
from ingot.theory import memory
from ingot.theory.context import ring_steps
from ingot.theory.layout import Position
from ingot.theory.memory import Term
from ingot.theory.params import STORED_BYTES
from ingot.theory.traffic import step_traffic
from ingot.units import format_bytes, format_seconds

DATA_PARALLEL = ("shard", "expert_shard", "dp_replicate")
# The names of the communication that blocks wait for, by line of the mesh (links.py).
NAMES = {
    "tp": "tensor-parallel collectives",
    "sequence": "choices of experts",
    "ulysses": "heads to ranks",
    "ring": "ring",
    "ep": "tokens to experts",
    "copy": "whole matrices of the optimizer",
}
TIED = "tied matrix"


@dataclass(frozen=True)
class Overlappable:
    """One rank's seconds of computation per step that collectives can overlap with. busy: all computation. attention:
    attention alone. shared: the products of shared experts.
    """

    busy: float
    attention: float
    shared: float


def blocking(
    position: Position, cluster: Cluster, times: dict[str, LineTime], beside: Overlappable, constants: Constants
) -> dict[str, Term]:
    """Return the exposed communication of a pipeline rank's blocks in one step (forward and backward), by name.

    times: the traffic of each line. beside: the computation that can overlap with it.
    """
    found = {}
    for line, name in NAMES.items():
        if line in times:
            sent = _sent(line, position, times, cluster)
            if line == "tp":
                found[name] = _tensor(position, times[line], sent, constants)
            elif line == "ring":
                found[name] = _ring(position, times[line], sent, beside.attention)
            elif line == "ep":
                found[name] = _experts(position, times[line], sent, beside, constants)
            else:
                found[name] = Term(times[line].seconds, sent)
    return found


def _tensor(position: Position, time: LineTime, sent: str, constants: Constants) -> Term:
    chunks = position.parallel.tp_chunks
    if position.parallel.async_tp or position.software.overlap_tensor:
        return _partly(time.seconds, sent, constants)
    if chunks > 1:
        # The first gather and the last reduce-scatter of a product have no product to overlap with. The rest is
        # taken for no better hidden than in the systems to which the share was fitted.
        return _partly(time.seconds, f"{sent} in {chunks} chunks", constants, least=1 / chunks)
    return Term(time.seconds, sent)


def _partly(seconds: float, sent: str, constants: Constants, least: float = 0.0) -> Term:
    share = max(constants.tensor_exposed, least)
    return Term(seconds * share, f"{sent}, {share:.0%} of it exposed")


def _ring(position: Position, time: LineTime, sent: str, attention: float) -> Term:
    """Return the exposed time of ring attention. Nothing is sent in its last step, so the attention of that step does
    not overlap. sent: the traffic as text. attention: seconds of attention in an optimizer step."""
    steps = ring_steps(position.parallel, position.train.seq_len, position.arch.sliding_window)
    beside = attention * (steps - 1) / steps
    return Term(max(time.seconds - beside, 0.0), f"{sent}, overlaps with {format_seconds(beside)} of attention")


def _experts(position: Position, time: LineTime, sent: str, beside: Overlappable, constants: Constants) -> Term:
    if position.software.overlap_experts:
        return _partly(time.seconds, sent, constants)
    if not beside.shared:
        return Term(time.seconds, sent)
    formula = f"{sent}, half of it overlaps with {format_seconds(beside.shared)} of shared experts"
    return Term(time.seconds / 2 + max(time.seconds / 2 - beside.shared, 0.0), formula)


def data_parallel(
    position: Position, cluster: Cluster, times: dict[str, LineTime], busy: float, constants: Constants
) -> Term:
    """Return the exposed time of data-parallel collectives in a step. busy: seconds of computation.

    With ZeRO-2 and 3 they overlap with the computation of every micro-batch, otherwise only with that of the last ones.
    With HSDP, the reduction between copies of the model runs once per step, and overlaps with the computation that the
    collectives of the shards leave free.
    """
    lines = [line for line in DATA_PARALLEL if line in times]
    if not lines:
        return Term(0.0, "one data-parallel rank")
    formula = " + ".join(_sent(line, position, times, cluster) for line in lines)
    total = sum(times[line].seconds for line in lines)
    if not position.software.overlap_data:
        return Term(total, f"{formula}, no overlap")
    each, units = busy / position.accumulation, sum(map(position.units, position.stages))
    every, last = _overlapped_batches(position), _last(position)
    copies = times["dp_replicate"].seconds if "dp_replicate" in times and every > last else 0.0
    shards = total - copies
    exposed = max(shards - each * every, shards / units / every)
    if copies:
        exposed += max(copies - max(each - shards / every, 0.0) * last, copies / units)
    slowed = constants.interference * (total - exposed)
    return Term(exposed + slowed, f"{formula}, {format_seconds(exposed)} exposed; the rest slows computation down")


def cpu_collectives(position: Position, cluster: Cluster) -> Term:
    """Return the time of a pipeline rank's collectives in one step on a CPU, where they do not overlap with anything.

    Messages between pipeline stages are part of the simulated schedule instead. The time is 0 if the links were not
    measured; the fixed cost of a step then includes the collectives.
    """
    constants, lines = fitted(), {}
    for traffic in step_traffic(position, counted_as(cluster)):
        if traffic.axis != "pp" or traffic.kind != "send":
            calls, seconds = lines.get(line_of(traffic), (0, 0.0))
            taken = traffic_seconds(position, traffic, cluster, constants)
            lines[line_of(traffic)] = calls + traffic.count, seconds + taken
    formula = ", ".join(f"{line}: {calls:,} in {format_seconds(taken)}" for line, (calls, taken) in lines.items())
    return Term(sum(seconds for _, seconds in lines.values()), formula or "none")


def _overlapped_batches(position: Position) -> int:
    """Return the number of micro-batches of a step whose computation overlaps with the collectives of the shards."""
    return position.accumulation if position.parallel.zero in (2, 3) else _last(position)


def _last(position: Position) -> int:
    """Return the number of micro-batches whose computation overlaps with collectives that run once per step: 1, or
    up to pp if ranks hold several stages, because one stage's collectives run while micro-batches pass the next stage.
    """
    parallel = position.parallel
    return min(parallel.pp, position.accumulation) if parallel.stages_on_each_rank > 1 else 1


def _sent(line: str, position: Position, times: dict[str, LineTime], cluster: Cluster) -> str:
    bandwidth = bandwidth_of(position.parallel, line, cluster)
    if not bandwidth:
        return f"{line}: {format_bytes(times[line].sent)}, no bandwidth known"
    where = "the network" if times[line].crosses else "fast links"
    return f"{line}: {format_bytes(times[line].sent)} over {where} in {format_seconds(times[line].seconds)}"


# Numbers per parameter that cross the link between device and host: the master and the gradient go to the host, and the
# new master comes back (optim/offload.py).
_TRAVEL = 3
# Numbers per parameter that AdamW on the host moves: it reads master, gradient and both moments, and writes all but the
# gradient. Each device's share of the host's memory bandwidth is assumed to equal the bandwidth of its link.
_UPDATED = 7


def host_update(position: Position, cluster: Cluster, busy: float, constants: Constants) -> Term | None:
    """Return the time that offloading adds to a step; None if nothing is offloaded or the host link's rate is unknown.

    busy: seconds of computation. With offload_parameters, parameters are read from the host for every gather and every
      gradient goes there. These transfers overlap with computation, and slow it down like collectives.
    """
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
        formula += f" + {format_seconds(beside)} of parameters and gradients, {format_seconds(exposed)} exposed"
    return Term(waited, formula)
