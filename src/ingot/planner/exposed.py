"""Communication that a step waits for, by what it is for. What computation hides is no part of it.

tensor parallel    in the way of the next product: all of it, unless `async_tp` overlaps it
Ulysses            attention waits for its heads: all of it
ring               keys and values travel beside attention: what takes longer than that
experts            a block waits for its tokens; the half that brings them to experts travels beside the shared ones
data parallel      what exceeds the computation beside it, and always the first gather and the last reduction
"""

from ingot.planner.links import LineTime, bandwidth_of, line_times
from ingot.schema.cluster import Cluster
from ingot.theory.context import ring_steps
from ingot.theory.flops import TRAIN_TO_FORWARD
from ingot.theory.layout import Position
from ingot.theory.params import shared_parameters
from ingot.theory.term import Term
from ingot.theory.work import step_work
from ingot.units import format_bytes, format_seconds

_DATA_PARALLEL = ("shard", "expert_shard", "dp_replicate")


def exposed(position: Position, cluster: Cluster, busy: float) -> dict[str, Term]:
    """Of one optimizer step of a pipeline rank of GPUs whose rate is known. busy: seconds of its work."""
    times = line_times(position, cluster)
    return blocking(position, cluster, times) | {"collectives": _data_parallel(position, cluster, times, busy)}


def blocking(position: Position, cluster: Cluster, times: dict[str, LineTime]) -> dict[str, Term]:
    """What blocks wait for in their forward and backward."""
    found = {}
    if "tp" in times and not position.parallel.async_tp:
        found["tensor-parallel collectives"] = Term(times["tp"].seconds, _sent("tp", position, times, cluster))
    if "ulysses" in times:
        found["heads to ranks"] = Term(times["ulysses"].seconds, _sent("ulysses", position, times, cluster))
    if "ring" in times:
        found["ring"] = _ring(position, cluster, times)
    if "ep" in times:
        found["tokens to experts"] = _experts(position, cluster, times)
    return found


def _ring(position: Position, cluster: Cluster, times: dict[str, LineTime]) -> Term:
    """The last of a ring's steps computes and sends nothing."""
    steps = ring_steps(position.parallel, position.train.seq_len, position.arch.sliding_window)
    rate = _rate(position, cluster) * cluster.attention_efficiency
    beside = step_work(position, cluster.device).attention_flops / rate * (steps - 1) / steps
    formula = f"{_sent('ring', position, times, cluster)}, beside {format_seconds(beside)} of attention"
    return Term(max(times["ring"].seconds - beside, 0.0), formula)


def _experts(position: Position, cluster: Cluster, times: dict[str, LineTime]) -> Term:
    seconds, formula = times["ep"].seconds, _sent("ep", position, times, cluster)
    if not position.arch.moe.shared_experts:
        return Term(seconds, formula)
    blocks = sum(len(stage.expert_layers) for stage in position.stages)
    products = 2.0 * position.tokens * shared_parameters(position.arch) / position.parallel.tp
    flops = TRAIN_TO_FORWARD * products * blocks * position.accumulation
    beside = flops / (_rate(position, cluster) * cluster.matmul_efficiency)
    formula = f"{formula}, half of it beside {format_seconds(beside)} of shared experts"
    return Term(seconds / 2 + max(seconds / 2 - beside, 0.0), formula)


def _data_parallel(position: Position, cluster: Cluster, times: dict[str, LineTime], busy: float) -> Term:
    """ZeRO-2 and 3 have every micro-batch to hide behind, the others the last one (and the next forward)."""
    lines = [line for line in _DATA_PARALLEL if line in times]
    if not lines:
        return Term(0.0, "one data-parallel rank")
    formula = " + ".join(_sent(line, position, times, cluster) for line in lines)
    total = sum(times[line].seconds for line in lines)
    every = position.accumulation if position.parallel.zero in (2, 3) else 1
    alone = total / sum(map(position.units, position.stages)) / every
    hiding = busy * every / position.accumulation
    return Term(max(total - hiding, alone), f"{formula}, not hidden")


def _rate(position: Position, cluster: Cluster) -> float:
    return cluster.peak_flops[position.train.precision]


def _sent(line: str, position: Position, times: dict[str, LineTime], cluster: Cluster) -> str:
    bandwidth = bandwidth_of(position.parallel, line, cluster)
    if not bandwidth:
        return f"{line}: {format_bytes(times[line].sent)}, no bandwidth known"
    spent = f"{format_bytes(times[line].sent)} / {format_bytes(bandwidth)}/s = {format_seconds(times[line].seconds)}"
    return f"{line}: {spent}"
