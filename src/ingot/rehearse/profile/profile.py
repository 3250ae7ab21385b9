"""`ingot profile` as a function: some steps of a copy of a run under torch's profiler, and what they show. No torch."""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ingot import __version__
from ingot.planner.predict.time.step_time import estimate
from ingot.planner.request.clusters import find_cluster
from ingot.rehearse.profile.copied import RESULT, ProfiledCopy
from ingot.rehearse.profile.job import run_ranks
from ingot.rehearse.profile.kinds import (
    ATTENTION,
    COMMUNICATION,
    COMPUTING,
    ELEMENTWISE,
    HOST,
    KINDS,
    OPTIMIZER,
    PRODUCTS,
)
from ingot.rehearse.profile.operations import MeasuredOperation, Roofline, least_seconds
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.storage import write_json
from ingot.theory.flops import train_flops_per_token
from ingot.theory.rules.parts import with_known_parts
from ingot.trainer.launch.checks import preflight
from ingot.trainer.launch.prepare import RunRequest

# The planner's terms of a step, by the kind that they are shown beside. Terms that are not here are communication.
_PLANNED = {
    "matrix products": PRODUCTS,
    "attention": ATTENTION,
    "everything elementwise": ELEMENTWISE,
    "low-precision casts": ELEMENTWISE,
    "rows of experts": ELEMENTWISE,
    "optimizer step": OPTIMIZER,
    "launches": HOST,
    "operations": HOST,
    "step": HOST,
}
MOST_OPERATIONS = 200


def profile(
    copy: ProfiledCopy,
    cluster: str | None = None,
    *,
    say: Callable[[str], None] = lambda text: None,
    show: Callable[[float, str], None] = lambda share, text: None,
) -> dict[str, Any]:
    """Profile a copy (copied.py). Returns the result as plain values; they are in its `profile.json` too.

    cluster: whose rates are compared with, see `find_cluster`; None: machine.json beside the run file, else the
    published rates of this machine. Raises ConfigError, DataError and UsageError before a rank starts, and RunFailed
    as soon as one dies. With NVTX the result has no times: Nsight has them.
    """
    plan, config = copy.plan, copy.config
    rates = find_cluster(cluster, copy.source.parent)
    request = RunRequest(plan.run_file, plan.run)
    preflight(request.folder, request.written, say)
    began = time.monotonic()
    run_ranks(copy, show)
    if plan.nvtx:
        return _kept(copy, {"complete": True, "nvtx": True, "steps": plan.steps})
    ranks = [json.loads(plan.part(rank).read_text("utf-8")) for rank in range(config.parallel.world_size)]
    result = summarize(with_known_parts(config), rates, ranks)
    result["traces"] = [plan.trace(rank["rank"]).name for rank in ranks]
    result["changed"] = copy.changes
    result["seconds"] = round(time.monotonic() - began, 1)
    return _kept(copy, result)


def _kept(copy: ProfiledCopy, result: dict[str, Any]) -> dict[str, Any]:
    """Write the result, and remove what no reader needs: the copy's run folder and the parts of ranks."""
    plan = copy.plan
    result |= {"folder": str(plan.root), "name": copy.config.name, "version": __version__}
    write_json(plan.root / RESULT, result)
    shutil.rmtree(plan.run, ignore_errors=True)
    for rank in range(copy.config.parallel.world_size):
        plan.part(rank).unlink(missing_ok=True)
    return result


def summarize(config: RunConfig, cluster: Cluster, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the profile of a run from those of its ranks (rank.py). cluster: whose rates are compared with.

    `kinds`: by kind, the mean seconds per step over ranks, which add up to `profiled_step_seconds`, and the planned
    ones. `step_seconds`: of a step without the profiler. `mfu`: see `_utilization`.
    """
    first = ranks[0]
    device, comparable = first["device"], cluster.device == first["device"]
    roofline = Roofline.of(cluster, config.train.precision) if comparable else Roofline(0.0, 0.0)
    planned = _planned(config, cluster) if comparable else {}
    seconds = {kind: fmean(rank["seconds"][kind] for rank in ranks) for kind in KINDS}
    return {
        "complete": True,
        "nvtx": False,
        "device": device,
        "device_name": first["device_name"],
        "torch": first["torch"],
        "precision": config.train.precision,
        "layout": {k: v for k, v in _degrees(config).items() if v > 1},
        "steps": first["steps"],
        "first_step": first["first_step"],
        "log_lines": first["log_lines"],
        "cluster": cluster.name if comparable else "",
        "other_cluster": "" if comparable else f"{cluster.name} ({cluster.device})",
        "step_seconds": fmean(rank["step_seconds"] for rank in ranks),
        "profiled_step_seconds": fmean(rank["profiled_step_seconds"] for rank in ranks),
        "without_core_seconds": fmean(rank["without_core_seconds"] for rank in ranks),
        "planned_step_seconds": sum(planned.values()) or None,
        "kinds": {kind: {"seconds": seconds[kind], "planned_seconds": planned.get(kind)} for kind in KINDS},
        "communication": _communication(ranks),
        "mfu": _utilization(config, roofline, ranks),
        "peak_flops": roofline.peak or None,
        "memory_bandwidth": roofline.bandwidth or None,
        "operations": _operations(ranks, roofline),
        "waits": _by_line(ranks),
        "reads": first["reads"],
        "reads_log_line": first["reads_log_line"],
        "device_waits": first["device_waits"],
        "ranks": [_of_rank(rank) for rank in ranks],
    }


def _degrees(config: RunConfig) -> dict[str, int]:
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    return {axis: getattr(config.parallel, axis) for axis in axes}


def _of_rank(rank: Mapping[str, Any]) -> dict[str, Any]:
    names = ("rank", "step_seconds", "profiled_step_seconds", "seconds", "exposed", "hidden", "peak_memory_bytes")
    return {name: rank[name] for name in names}


def _planned(config: RunConfig, cluster: Cluster) -> dict[str, float]:
    """Return the planned seconds of a step by kind; {} if the cluster has no rate for it."""
    found: dict[str, float] = {}
    time_of_step = estimate(config, cluster)
    for name, term in time_of_step.terms.items() if time_of_step else ():
        kind = _PLANNED.get(name, COMMUNICATION)
        found[kind] = found.get(kind, 0.0) + term.value
    return found


def _communication(ranks: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return axis -> seconds per step exposed and hidden, mean over ranks."""
    axes = sorted({axis for rank in ranks for part in ("exposed", "hidden") for axis in rank[part]})
    return {
        axis: {part: fmean(rank[part].get(axis, 0.0) for rank in ranks) for part in ("exposed", "hidden")}
        for axis in axes
    }


def _utilization(config: RunConfig, roofline: Roofline, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return three MFUs of a mean rank, None without a known peak: `now`, of steps without the profiler; `computing`,
    if nothing but the measured computation took time; `ceiling`, if each operation reached its roofline as well."""
    if not roofline.peak:
        return None
    per_token = train_flops_per_token(config.model, config.train.seq_len)
    flops = config.tokens_per_step * per_token / len(ranks)
    computing = fmean(sum(rank["seconds"][kind] for kind in COMPUTING) for rank in ranks)
    least = fmean(least_seconds(_all_operations(rank), roofline) for rank in ranks)
    step = fmean(rank["step_seconds"] for rank in ranks)

    def share(seconds: float) -> float | None:
        return flops / roofline.peak / seconds if seconds else None

    return {
        "now": share(step),
        "computing": share(min(computing, step)),
        "ceiling": share(min(least, computing, step)),
        "computing_seconds": computing,
        "least_seconds": least,
        "model_flops": flops,
    }


def _all_operations(rank: Mapping[str, Any]) -> list[MeasuredOperation]:
    return [MeasuredOperation(**one) for one in rank["operations"]]


def _operations(ranks: Sequence[Mapping[str, Any]], roofline: Roofline) -> list[dict[str, Any]]:
    """Return the longest operations of the first rank, with achieved rates and the share of their rooflines. Ranks of
    other pipeline stages have others: each is in its trace."""
    found = []
    for one in _all_operations(ranks[0])[:MOST_OPERATIONS]:
        bound = roofline.bound(one)
        calls = one.count / one.seconds if one.seconds else 0.0
        found.append(
            one.facts()
            | {
                "flops_per_second": one.flops * calls if one.flops else None,
                "bytes_per_second": one.bytes * calls if one.bytes else None,
                "roofline_seconds": bound,
                "of_roofline": bound / one.seconds if bound and one.seconds else None,
            }
        )
    return found


def _by_line(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the waits for other ranks by axis and line, mean over ranks, the longest first."""
    total: dict[tuple[str, str], list[float]] = {}
    for rank in ranks:
        for one in rank["waits"]:
            own = total.setdefault((one["axis"], one["line"]), [0.0, 0.0])
            own[0] += one["count"] / len(ranks)
            own[1] += one["seconds"] / len(ranks)
    found = [{"axis": axis, "line": line, "count": n, "seconds": s} for (axis, line), (n, s) in total.items()]
    return sorted(found, key=lambda one: -one["seconds"])
