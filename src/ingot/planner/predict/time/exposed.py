"""Communication and host transfers that a step waits for, by purpose. Hidden communication slows computation down a
little.

tensor parallel    in the way of the next product: all of it, unless products and collectives are cut to overlap
Ulysses            attention waits for its heads: all of it
ring               keys and values travel during attention: the part that takes longer
experts            a block waits for its tokens; the half that brings them to experts overlaps the shared experts
data parallel      the part that exceeds the concurrent computation, and always the first gather and last reduction
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
# The communication that blocks wait for, by line.
NAMES = {
    "tp": "tensor-parallel collectives",
    "sequence": "choices of experts",
    "ulysses": "heads to ranks",
    "ring": "ring",
    "ep": "tokens to experts",
}
TIED = "tied matrix"


@dataclass(frozen=True)
class Overlappable:
    """Seconds of computation of one rank and step that can overlap collectives: all computation, attention, and the
    shared experts' products.
    """

    busy: float
    attention: float
    shared: float


def blocking(
    position: Position, cluster: Cluster, times: dict[str, LineTime], beside: Overlappable, constants: Constants
) -> dict[str, Term]:
    """Return what blocks of a pipeline rank wait for in forward and backward, in one step."""
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
    if not (position.parallel.async_tp or position.software.overlap_tensor):
        return Term(time.seconds, sent)
    return _partly(time.seconds, sent, constants)


def _partly(seconds: float, sent: str, constants: Constants) -> Term:
    share = constants.tensor_exposed
    return Term(seconds * share, f"{sent}, {share:.0%} of it not hidden")


def _ring(position: Position, time: LineTime, sent: str, attention: float) -> Term:
    """Return the exposed time of a ring, whose last step computes and sends nothing."""
    steps = ring_steps(position.parallel, position.train.seq_len, position.arch.sliding_window)
    beside = attention * (steps - 1) / steps
    return Term(max(time.seconds - beside, 0.0), f"{sent}, beside {format_seconds(beside)} of attention")


def _experts(position: Position, time: LineTime, sent: str, beside: Overlappable, constants: Constants) -> Term:
    if position.software.overlap_experts:
        return _partly(time.seconds, sent, constants)
    if not beside.shared:
        return Term(time.seconds, sent)
    formula = f"{sent}, half of it beside {format_seconds(beside.shared)} of shared experts"
    return Term(time.seconds / 2 + max(time.seconds / 2 - beside.shared, 0.0), formula)


def data_parallel(
    position: Position, cluster: Cluster, times: dict[str, LineTime], busy: float, constants: Constants
) -> Term:
    """Return the exposed time of data-parallel collectives.

    ZeRO-2 and 3 overlap every micro-batch, other stages the last ones (and the next forward). Copies of the model
    (HSDP) are reduced once per step, after the last ones, in the computation that the shards leave.
    """
    lines = [line for line in DATA_PARALLEL if line in times]
    if not lines:
        return Term(0.0, "one data-parallel rank")
    formula = " + ".join(_sent(line, position, times, cluster) for line in lines)
    total = sum(times[line].seconds for line in lines)
    if not position.software.overlap_data:
        return Term(total, f"{formula}, nothing beside it")
    each, units = busy / position.accumulation, sum(map(position.units, position.stages))
    every, last = _overlapped_batches(position), _last(position)
    copies = times["dp_replicate"].seconds if "dp_replicate" in times and every > last else 0.0
    shards = total - copies
    exposed = max(shards - each * every, shards / units / every)
    if copies:
        exposed += max(copies - max(each - shards / every, 0.0) * last, copies / units)
    slowed = constants.interference * (total - exposed)
    return Term(exposed + slowed, f"{formula}, {format_seconds(exposed)} not hidden, the rest slows its computation")


def cpu_collectives(position: Position, cluster: Cluster) -> Term:
    """Return the time of a pipeline rank's collectives in one step on a CPU, where nothing hides them.

    Messages of the pipeline are in the simulated schedule. The time is 0 where the links were not measured; collectives
    are then in the fixed cost of a step.
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
    """Return the micro-batches whose computation overlaps what data-parallel ranks divide."""
    return position.accumulation if position.parallel.zero in (2, 3) else _last(position)


def _last(position: Position) -> int:
    """Return the micro-batches whose computation overlaps collectives that run once per step.

    With several stages on a rank, the collectives of one stage run while a round of micro-batches passes the next
    stage.
    """
    parallel = position.parallel
    return min(parallel.pp, position.accumulation) if parallel.stages_on_each_rank > 1 else 1


def _sent(line: str, position: Position, times: dict[str, LineTime], cluster: Cluster) -> str:
    bandwidth = bandwidth_of(position.parallel, line, cluster)
    if not bandwidth:
        return f"{line}: {format_bytes(times[line].sent)}, no bandwidth known"
    where = "the network" if times[line].crosses else "fast links"
    return f"{line}: {format_bytes(times[line].sent)} over {where} in {format_seconds(times[line].seconds)}"


# Numbers per parameter that cross the link: master and gradient go to the host, the new master comes back
# (optim/offload.py).
_TRAVEL = 3
# AdamW on the host reads master, gradient and both moments, and writes three of them. The devices share the host's
# memory, which is assumed to be as fast for each device as the link to it.
_UPDATED = 7


def host_update(position: Position, cluster: Cluster, busy: float, constants: Constants) -> Term | None:
    """Return the seconds that offloading adds to a step, or None without offloading or without a known link to the
    host.

    busy: seconds of computation. Where parameters are on the host, every gather reads them from there and every
      gradient goes there, concurrent with computation, which they slow down as collectives do.
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
        formula += f" + {format_seconds(beside)} of parameters and gradients, {format_seconds(exposed)} not hidden"
    return Term(waited, formula)
