"""A layout after one of its degrees was moved: what has to move along, so that every device has a part.

What the user moved stays as it was put. Where nothing that moves along makes it legal, the layout keeps its problem,
and the page says so.
"""

from collections.abc import Iterable
from dataclasses import replace

from ingot.planner.web.state import State
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.expert_rules import legal_ep
from ingot.schema.parallel import SPLIT_BACKWARD, TWO_STAGES, V_SHAPED, Parallel
from ingot.theory.schedule import schedule_problems


def settle(state: State, arch: Arch, cluster: Cluster, moved: str = "") -> State:
    """`state` with what follows from its other degrees. Its sequence and batch are known."""
    state = _axes(state, arch, cluster, moved)
    state = _pipeline(state, arch, moved)
    state = _data(state, arch, cluster, moved)
    return _schedule(state, cluster, moved)


def data_ranks(state: State, cluster: Cluster) -> int:
    """Ranks that read different samples; 0 when the other axes do not divide the devices."""
    model_ranks = state.tp * state.pp * state.cp
    return 0 if cluster.devices % model_ranks else cluster.devices // model_ranks


def accumulation(state: State, cluster: Cluster) -> int:
    """Micro-batches per step of each data-parallel rank; 0 when they do not divide the batch."""
    sequences = state.micro_batch * data_ranks(state, cluster)
    return state.batch // sequences if sequences and state.batch % sequences == 0 else 0


def _at_most(value: int, legal: Iterable[int]) -> int:
    return max((n for n in legal if n <= value), default=1)


def _divisor(value: int, number: int) -> int:
    """The largest divisor of `number` that is at most `value`."""
    return next(n for n in range(min(value, number), 0, -1) if number % n == 0)


def _axes(state: State, arch: Arch, cluster: Cluster, moved: str) -> State:
    """Those whose product divides the devices, and the batch among what is left; the others make room first."""
    for axis in ("cp", "pp", "tp"):
        if axis == moved:
            continue
        degree = getattr(state, axis)
        others = state.tp * state.pp * state.cp // degree
        if cluster.devices % (others * degree):
            fits = cluster.devices % others == 0
            state = replace(state, **{axis: _divisor(degree, cluster.devices // others) if fits else 1})
    return replace(state, context="auto") if state.cp == 1 else state


def _pipeline(state: State, arch: Arch, moved: str) -> State:
    if state.pp == 1:
        return replace(state, schedule="1f1b", stages_per_rank=0)
    if state.schedule not in TWO_STAGES or state.schedule in V_SHAPED:
        state = replace(state, stages_per_rank=0)
    else:
        most = max(arch.num_layers // state.pp, 2)
        state = replace(state, stages_per_rank=min(max(state.stages_per_rank, 2), most))
    if state.schedule in SPLIT_BACKWARD and state.zero == 3:
        return replace(state, schedule="1f1b", stages_per_rank=0) if moved == "zero" else replace(state, zero=1)
    return state


def _data(state: State, arch: Arch, cluster: Cluster, moved: str) -> State:
    """Copies of the model, experts and micro-batch divide what the other axes leave."""
    data = data_ranks(state, cluster)
    if not data:
        return state
    if moved != "dp_replicate":
        state = replace(state, dp_replicate=_divisor(state.dp_replicate, data))
    if not arch.is_moe:
        state = replace(state, ep=1)
    elif moved != "ep" and data % state.dp_replicate == 0:
        inside = Parallel(dp_shard=data // state.dp_replicate, cp=state.cp, tp=state.tp)
        state = replace(state, ep=_at_most(state.ep, legal_ep(arch.moe.num_experts, inside)))
    if moved != "micro_batch" and state.batch % data == 0:
        state = replace(state, micro_batch=_divisor(state.micro_batch, state.batch // data))
    return state


def _schedule(state: State, cluster: Cluster, moved: str) -> State:
    """1F1B takes any number of micro-batches; it stands in for a schedule that does not."""
    count = accumulation(state, cluster)
    if state.pp == 1 or not count or moved in ("schedule", "stages_per_rank"):
        return state
    if any(schedule_problems(state.schedule, state.pp, count, state.stages_per_rank)):
        return replace(state, schedule="1f1b", stages_per_rank=0)
    return state
