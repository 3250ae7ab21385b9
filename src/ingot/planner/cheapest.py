"""What would help a run that fits nowhere. Each change is tried, in the order of what it costs: a wish less, more or
larger devices, and last what changes the experiment."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ingot.planner.candidates import Candidate, Evaluator, ranked
from ingot.planner.look import Look
from ingot.planner.space import WIDE, Reach, Space
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.theory.devices import Device, cluster_of, devices, find_device
from ingot.units import format_bytes, format_seconds, parse_bytes

# Beyond so many times the devices, another model is cheaper.
_MOST_TIMES_DEVICES = 64
_SHORTEST_SEQUENCE = 512
# Layouts whose bill is looked at for the one that needs least.
_LEAST_STATE = 200
_NODE = 8


def least_memory(evaluator: Evaluator, space: Space) -> Candidate | None:
    """The layout that needs least, recomputing all it may, of those with the least state; None where the rules allow
    none."""
    frugal = sorted(
        enumerate(_frugal(evaluator, space)), key=lambda entry: (evaluator.least_state_bytes(entry[1]), entry[0])
    )
    bounds = sorted((evaluator.least_bytes(run), index, run) for index, run in frugal[:_LEAST_STATE])
    best: RunConfig | None = None
    for bound, _, run in bounds:
        if best and bound >= evaluator.memory_bytes(best):
            break
        if evaluator.legal(run) and (best is None or evaluator.memory_bytes(run) < evaluator.memory_bytes(best)):
            best = run
    return evaluator.candidate(best) if best else None


def _frugal(evaluator: Evaluator, space: Space) -> Iterator[RunConfig]:
    """Of each sharding, the smallest micro-batch and the form of recomputation that keeps least."""
    for mesh in space.meshes():
        for parallel in space.shardings(mesh):
            for micro_batch in space.micro_batches(parallel)[:1]:
                run = evaluator.laid_out(space.recomputes(parallel)[-1], micro_batch)
                first = next(space.schedules(run.parallel, run.accumulation), None)
                if first:
                    yield evaluator.laid_out(first, micro_batch)


def cheapest_fix(evaluator: Evaluator, pinned: Mapping[str, object], nearest: Candidate | None) -> str:
    """One sentence, "" where nothing of all this helps. nearest: the layout that needs least."""
    run, cluster = evaluator.run, evaluator.cluster
    for name, value in pinned.items():
        others = {key: value for key, value in pinned.items() if key != name}
        if best := _fastest(run, cluster, evaluator, others):
            return f"leave {name} = {value} to the search: {_said(best, name)}"
    if nearest is None:
        return _legal_batch(run, cluster, pinned)
    found = [
        text for text in (_more(evaluator, pinned), _larger(evaluator, pinned), _shorter(evaluator, pinned)) if text
    ]
    return "; or ".join(found)


def _fastest(run: RunConfig, cluster: Cluster, evaluator: Evaluator, pinned: Mapping[str, object]) -> Candidate | None:
    """The fastest layout that fits, None where none does."""
    there = Evaluator(run, cluster, evaluator.software)
    found = Look(there, Space(run=run, cluster=cluster, pinned=pinned, reach=WIDE)).fastest()
    return ranked(found)[0] if found else None


def _said(best: Candidate, name: str = "") -> str:
    found = f"{format_bytes(best.memory_bytes)} per device"
    if name:
        value = best.run.train.micro_batch if name == "micro_batch" else getattr(best.run.parallel, name)
        found = f"{name} = {value} needs {found}"
    return f"{found}, {format_seconds(best.step_seconds)} per step" if best.step_seconds else found


def _more(evaluator: Evaluator, pinned: Mapping[str, object]) -> str:
    cluster = evaluator.cluster
    while cluster.devices < _MOST_TIMES_DEVICES * evaluator.cluster.devices:
        cluster = _doubled(cluster)
        if best := _fastest(evaluator.run, cluster, evaluator, pinned):
            return f"use {cluster.devices} of these devices ({cluster.name}): {_said(best)}"
    return ""


def _doubled(cluster: Cluster) -> Cluster:
    known = find_device(cluster.device_name)
    node = known.node if known else _NODE
    if cluster.nodes == 1 and 2 * cluster.devices_per_node <= node:
        twice = replace(cluster, devices_per_node=2 * cluster.devices_per_node)
    else:
        twice = replace(cluster, nodes=2 * cluster.nodes)
    key = known.key if known else cluster.name.rpartition("x")[2]
    nodes = f"{twice.nodes}x" if twice.nodes > 1 else ""
    return replace(twice, name=f"{nodes}{twice.devices_per_node}x{key}")


def _larger(evaluator: Evaluator, pinned: Mapping[str, object]) -> str:
    """As many devices of another kind, the cheapest kind first."""
    cluster = evaluator.cluster
    kinds = [device for device in devices().values() if device.device == cluster.device]
    larger = [device for device in kinds if parse_bytes(device.memory) > cluster.memory_bytes]
    for device in sorted(larger, key=lambda device: (device.usd_per_hour or math.inf, parse_bytes(device.memory))):
        other = _same_size(cluster, device)
        if other and (best := _fastest(evaluator.run, other, evaluator, pinned)):
            return f"use {other.name} ({format_bytes(other.memory_bytes)} each): {_said(best)}"
    return ""


def _same_size(cluster: Cluster, device: Device) -> Cluster | None:
    count = cluster.devices
    per_node = min(device.node, count)
    if count % per_node:
        return None
    nodes = f"{count // per_node}x" if count > per_node else ""
    return cluster_of(device, count, name=f"{nodes}{per_node}x{device.key}" if count > 1 else device.key)


def _shorter(evaluator: Evaluator, pinned: Mapping[str, object]) -> str:
    seq_len = evaluator.run.train.seq_len // 2
    while seq_len >= _SHORTEST_SEQUENCE:
        run = replace(evaluator.run, train=replace(evaluator.run.train, seq_len=seq_len))
        if best := _fastest(run, evaluator.cluster, evaluator, pinned):
            return f"shorten train.seq_len to {seq_len}: {_said(best)}"
        seq_len //= 2
    return ""


def _legal_batch(run: RunConfig, cluster: Cluster, pinned: Mapping[str, object]) -> str:
    """The batch next to the run's that some mesh can share."""
    batch = run.train.global_batch
    for size in sorted(_shareable(run, cluster, pinned), key=lambda size: (abs(size - batch), size)):
        other = replace(run, train=replace(run.train, global_batch=size))
        if any(True for _ in Space(run=other, cluster=cluster, pinned=pinned, reach=Reach(every=True)).meshes()):
            return f"{batch} sequences cannot be shared by {cluster.devices} devices; use train.global_batch = {size}"
    return ""


def _shareable(run: RunConfig, cluster: Cluster, pinned: Mapping[str, object]) -> set[int]:
    """Multiples, next to the batch, of the numbers of data-parallel ranks that there can be."""
    whole = replace(run, train=replace(run.train, global_batch=cluster.devices))
    space = Space(run=whole, cluster=cluster, pinned=pinned, reach=WIDE)
    ranks = {mesh.dp_shard for mesh in space.meshes()}
    batch = run.train.global_batch
    return {size for n in ranks for size in (batch // n * n, (batch // n + 1) * n) if size}
