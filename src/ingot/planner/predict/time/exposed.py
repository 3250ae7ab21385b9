"""Communication that a step waits for, by what it is for. What computation hides slows that computation down a little.

tensor parallel    in the way of the next product: all of it, unless products and collectives are cut to overlap
Ulysses            attention waits for its heads: all of it
ring               keys and values travel beside attention: what takes longer than that
experts            a block waits for its tokens; the half that brings them to experts travels beside the shared ones
data parallel      what exceeds the computation beside it, and always the first gather and the last reduction
"""

from dataclasses import dataclass

from ingot.planner.predict.time.constants import Constants, fitted
from ingot.planner.predict.time.links import LineTime, bandwidth_of, counted_as, line_of, traffic_seconds
from ingot.schema.cluster import Cluster
from ingot.theory.context import ring_steps
from ingot.theory.layout import Position
from ingot.theory.term import Term
from ingot.theory.traffic import step_traffic
from ingot.units import format_bytes, format_seconds

DATA_PARALLEL = ("shard", "expert_shard", "dp_replicate")
# What blocks wait for, by line.
NAMES = {
    "tp": "tensor-parallel collectives",
    "sequence": "choices of experts",
    "ulysses": "heads to ranks",
    "ring": "ring",
    "ep": "tokens to experts",
}
TIED = "tied matrix"


@dataclass(frozen=True)
class Beside:
    """Seconds of computation of one rank and step that collectives can run beside: all of it, attention, and the shared
    experts' products."""

    busy: float
    attention: float
    shared: float


def blocking(
    position: Position, cluster: Cluster, times: dict[str, LineTime], beside: Beside, constants: Constants
) -> dict[str, Term]:
    """What blocks of a pipeline rank wait for in their forward and backward, in one step."""
    found = {}
    for line, name in NAMES.items():
        if line in times:
            said = _sent(line, position, times, cluster)
            if line == "tp":
                found[name] = _tensor(position, times[line], said, constants)
            elif line == "ring":
                found[name] = _ring(position, times[line], said, beside.attention)
            elif line == "ep":
                found[name] = _experts(position, times[line], said, beside, constants)
            else:
                found[name] = Term(times[line].seconds, said)
    return found


def _tensor(position: Position, time: LineTime, said: str, constants: Constants) -> Term:
    if not (position.parallel.async_tp or position.software.overlap_tensor):
        return Term(time.seconds, said)
    return _partly(time.seconds, said, constants)


def _partly(seconds: float, said: str, constants: Constants) -> Term:
    share = constants.tensor_exposed
    return Term(seconds * share, f"{said}, {share:.0%} of it not hidden")


def _ring(position: Position, time: LineTime, said: str, attention: float) -> Term:
    """The last of a ring's steps computes and sends nothing."""
    steps = ring_steps(position.parallel, position.train.seq_len, position.arch.sliding_window)
    beside = attention * (steps - 1) / steps
    return Term(max(time.seconds - beside, 0.0), f"{said}, beside {format_seconds(beside)} of attention")


def _experts(position: Position, time: LineTime, said: str, beside: Beside, constants: Constants) -> Term:
    if position.software.overlap_experts:
        return _partly(time.seconds, said, constants)
    if not beside.shared:
        return Term(time.seconds, said)
    formula = f"{said}, half of it beside {format_seconds(beside.shared)} of shared experts"
    return Term(time.seconds / 2 + max(time.seconds / 2 - beside.shared, 0.0), formula)


def data_parallel(
    position: Position, cluster: Cluster, times: dict[str, LineTime], busy: float, constants: Constants
) -> Term:
    """ZeRO-2 and 3 have every micro-batch to hide behind, the others the last ones (and the next forward). Copies of
    the model (HSDP) meet once per step, behind the last ones, in what the shards leave of them."""
    lines = [line for line in DATA_PARALLEL if line in times]
    if not lines:
        return Term(0.0, "one data-parallel rank")
    formula = " + ".join(_sent(line, position, times, cluster) for line in lines)
    total = sum(times[line].seconds for line in lines)
    if not position.software.overlap_data:
        return Term(total, f"{formula}, nothing beside it")
    each, units = busy / position.accumulation, sum(map(position.units, position.stages))
    every, last = _beside(position), _last(position)
    copies = times["dp_replicate"].seconds if "dp_replicate" in times and every > last else 0.0
    shards = total - copies
    exposed = max(shards - each * every, shards / units / every)
    if copies:
        exposed += max(copies - max(each - shards / every, 0.0) * last, copies / units)
    slowed = constants.interference * (total - exposed)
    return Term(exposed + slowed, f"{formula}, {format_seconds(exposed)} not hidden, the rest slows its computation")


def in_turn(position: Position, cluster: Cluster) -> Term:
    """Of one step on a CPU, where nothing hides them: the collectives of a pipeline rank. What it sends along the
    pipeline is in the simulated schedule. 0 where the links were not measured; then they are in the cost of a step.
    """
    constants, lines = fitted(), {}
    for traffic in step_traffic(position, counted_as(cluster)):
        if traffic.axis != "pp" or traffic.kind != "send":
            calls, seconds = lines.get(line_of(traffic), (0, 0.0))
            taken = traffic_seconds(position, traffic, cluster, constants)
            lines[line_of(traffic)] = calls + traffic.count, seconds + taken
    formula = ", ".join(f"{line}: {calls:,} in {format_seconds(taken)}" for line, (calls, taken) in lines.items())
    return Term(sum(seconds for _, seconds in lines.values()), formula or "none")


def _beside(position: Position) -> int:
    """Micro-batches whose computation is beside what data-parallel ranks divide."""
    return position.accumulation if position.parallel.zero in (2, 3) else _last(position)


def _last(position: Position) -> int:
    """Micro-batches behind which collectives run that come once per step. With several stages on a rank, those of one
    are reduced while a round of micro-batches passes the next one."""
    parallel = position.parallel
    return min(parallel.pp, position.accumulation) if parallel.stages_on_each_rank > 1 else 1


def _sent(line: str, position: Position, times: dict[str, LineTime], cluster: Cluster) -> str:
    bandwidth = bandwidth_of(position.parallel, line, cluster)
    if not bandwidth:
        return f"{line}: {format_bytes(times[line].sent)}, no bandwidth known"
    where = "the network" if times[line].crosses else "fast links"
    return f"{line}: {format_bytes(times[line].sent)} over {where} in {format_seconds(times[line].seconds)}"
