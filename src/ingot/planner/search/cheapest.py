"""The search for the cheapest change that makes a run fit if none of its layouts fits.

Changes are tried in this order: unpinning one setting, more or larger devices, and last shorter sequences.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ingot.planner.search.candidates import Candidate, Evaluator, ranked
from ingot.planner.search.layout_search import LayoutSearch
from ingot.planner.search.space import OFFLOADED, WIDE, Reach, Space
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.schema.software import Software
from ingot.theory.devices import Device, cluster_of, devices, find_device
from ingot.units import format_bytes, format_seconds, parse_bytes

# The most devices to propose, as a multiple of the cluster's.
_MOST_TIMES_DEVICES = 64
_SHORTEST_SEQUENCE = 512
# The number of layouts, least state first, among which `least_memory` compares whole memory bills.
_LEAST_STATE = 200
_NODE = 8
# Changes are tried one after another for at most this time: if a model is far too large, most of them do not help.
_PATIENCE_SECONDS = 10.0


def least_memory(evaluator: Evaluator, space: Space) -> Candidate | None:
    """Return the layout that needs the least memory, with the smallest micro-batch and the most recomputation; None if
    no layout is legal. Only the layouts with the smallest parameter and optimizer state are compared.
    """
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
    """Yield each sharding (mesh, ZeRO stage, ep) with the smallest micro-batch and the recomputation that needs the
    least memory."""
    for mesh in space.meshes():
        for parallel in space.shardings(mesh):
            for micro_batch in space.micro_batches(parallel)[:1]:
                run = evaluator.laid_out(space.recomputes(parallel)[-1], micro_batch)
                first = next(space.schedules(run.parallel, run.accumulation), None)
                if first:
                    yield evaluator.laid_out(first, micro_batch)


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """A run, a cluster and pinned settings, for which `fastest` searches for a layout that fits. offload: optimizer
    state may be in host memory. until: the time.monotonic() after which no search starts.
    """

    run: RunConfig
    cluster: Cluster
    software: Software
    pinned: Mapping[str, object]
    offload: bool
    until: float

    def fastest(self) -> Candidate | None:
        """Return the fastest layout that fits, or None. The search only runs if the layout with the least memory
        fits.
        """
        if time.monotonic() > self.until:
            return None
        there = Evaluator(self.run, self.cluster, self.software)
        for reach in (WIDE, OFFLOADED) if self.offload else (WIDE,):
            space = Space(run=self.run, cluster=self.cluster, pinned=self.pinned, reach=reach)
            least = least_memory(there, space)
            if least and there.fits(least.run):
                return ranked([least, *LayoutSearch(there, space).fastest()])[0]
        return None


def cheapest_fix(
    evaluator: Evaluator, pinned: Mapping[str, object], nearest: Candidate | None, *, offload: bool = False
) -> str:
    """Return a sentence with the cheapest change that makes a layout fit, or "" if no change helps.

    nearest: the layout that needs the least memory, None if no layout is legal. offload: the changed run may offload
    optimizer state to the host.
    """
    run, cluster = evaluator.run, evaluator.cluster
    wish = _Wish(
        run=run,
        cluster=cluster,
        software=evaluator.software,
        pinned=pinned,
        offload=offload,
        until=time.monotonic() + _PATIENCE_SECONDS,
    )
    for name, value in pinned.items():
        others = {key: value for key, value in pinned.items() if key != name}
        if best := replace(wish, pinned=others).fastest():
            return f"leave {name} = {value} to the search: {_described(best, name)}"
    if nearest is None:
        return _legal_batch(run, cluster, pinned)
    return "; or ".join(text for text in (*_other_devices(wish), _shorter(wish)) if text)


def _described(best: Candidate, name: str = "") -> str:
    found = f"{format_bytes(best.memory_bytes)} per device"
    if best.run.parallel.offload != "none":
        found += ", optimizer state on the host"
    if name:
        value = best.run.train.micro_batch if name == "micro_batch" else getattr(best.run.parallel, name)
        found = f"{name} = {value} needs {found}"
    return f"{found}, {format_seconds(best.step_seconds)} per step" if best.step_seconds else found


def _other_devices(wish: _Wish) -> list[str]:
    """Return up to two sentences, one on more devices and one on larger devices; the cheaper goes first if both prices
    are known."""
    found = [(cost, text) for cost, text in (_more(wish), _larger(wish)) if text]
    return [text for _, text in (sorted(found) if all(cost for cost, _ in found) else found)]


def _cost(cluster: Cluster, best: Candidate) -> float:
    """Return a number to compare costs by: US dollars per hour of all devices, times the seconds of a step."""
    return cluster.usd_per_hour * cluster.devices * best.step_seconds


def _more(wish: _Wish) -> tuple[float, str]:
    cluster = wish.cluster
    while cluster.devices < _MOST_TIMES_DEVICES * wish.cluster.devices:
        cluster = _doubled(cluster)
        if best := replace(wish, cluster=cluster).fastest():
            return _cost(cluster, best), f"use {cluster.devices} of these devices ({cluster.name}): {_described(best)}"
    return 0.0, ""


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


def _larger(wish: _Wish) -> tuple[float, str]:
    """Return (cost, sentence) for a change to as many devices with more memory. They are of the cheapest kind with
    which the run fits; (0.0, "") if there is none.
    """
    cluster = wish.cluster
    kinds = [device for device in devices().values() if device.device == cluster.device]
    larger = [device for device in kinds if parse_bytes(device.memory) > cluster.memory_bytes]
    for device in sorted(larger, key=lambda device: (device.usd_per_hour or math.inf, parse_bytes(device.memory))):
        other = _same_size(cluster, device)
        if other and (best := replace(wish, cluster=other).fastest()):
            return _cost(other, best), f"use {other.name} ({format_bytes(other.memory_bytes)} each): {_described(best)}"
    return 0.0, ""


def _same_size(cluster: Cluster, device: Device) -> Cluster | None:
    count = cluster.devices
    per_node = min(device.node, count)
    if count % per_node:
        return None
    nodes = f"{count // per_node}x" if count > per_node else ""
    return cluster_of(device, count, name=f"{nodes}{per_node}x{device.key}" if count > 1 else device.key)


def _shorter(wish: _Wish) -> str:
    seq_len = wish.run.train.seq_len // 2
    while seq_len >= _SHORTEST_SEQUENCE:
        run = replace(wish.run, train=replace(wish.run.train, seq_len=seq_len))
        if best := replace(wish, run=run).fastest():
            return f"shorten train.seq_len to {seq_len}: {_described(best)}"
        seq_len //= 2
    return ""


def _legal_batch(run: RunConfig, cluster: Cluster, pinned: Mapping[str, object]) -> str:
    """Return a sentence that proposes the legal global batch nearest to the run's, or "" if there is none."""
    batch = run.train.global_batch
    for size in sorted(_shareable(run, cluster, pinned), key=lambda size: (abs(size - batch), size)):
        other = replace(run, train=replace(run.train, global_batch=size))
        if any(True for _ in Space(run=other, cluster=cluster, pinned=pinned, reach=Reach(every=True)).meshes()):
            found = f"{batch} sequences cannot be divided evenly among {cluster.devices} devices"
            return f"{found}; use train.global_batch = {size}"
    return ""


def _shareable(run: RunConfig, cluster: Cluster, pinned: Mapping[str, object]) -> set[int]:
    """Return the global batches next to the run's, below and above, that are multiples of a possible number of
    data-parallel ranks."""
    whole = replace(run, train=replace(run.train, global_batch=cluster.devices))
    space = Space(run=whole, cluster=cluster, pinned=pinned, reach=WIDE)
    ranks = {mesh.dp_shard for mesh in space.meshes()}
    batch = run.train.global_batch
    return {size for n in ranks for size in (batch // n * n, (batch // n + 1) * n) if size}
