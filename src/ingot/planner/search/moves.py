"""The neighbors of a layout: layouts in which one setting differs by one step and other ranks are data-parallel."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ingot.planner.predict.memory.peak_memory import rank_memory_bytes
from ingot.planner.search.candidates import EQUAL, Candidate, Evaluator
from ingot.planner.search.space import RECOMPUTE, WIDE, Space
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.theory.rules.expert import legal_ep

_DEGREES = ("tp", "pp", "cp")


@dataclass(frozen=True, kw_only=True)
class LayoutChange:
    """One step from a layout to a neighbor.

    key: the setting of the run file that changes, without "parallel.". before, after: its values. candidate: the
    neighbor. fits: the neighbor fits in a device's memory.
    """

    key: str
    before: object
    after: object
    candidate: Candidate
    fits: bool

    @property
    def setting(self) -> str:
        """The dotted key of the run file."""
        return f"train.{self.key}" if self.key == "micro_batch" else f"parallel.{self.key}"


def neighbors(candidate: Candidate, cluster: Cluster) -> tuple[LayoutChange, ...]:
    """Return one change for each legal step from `candidate`, even if the new layout does not fit.

    A step doubles or halves a degree or the micro-batch, or changes the ZeRO stage, recomputation, schedule or offload.
    All devices stay in use.
    """
    run = candidate.run
    evaluator = Evaluator(run, cluster, candidate.software)
    return tuple(
        LayoutChange(
            key=key,
            before=_value(run, key),
            after=_value(other, key),
            candidate=evaluator.candidate(other),
            fits=evaluator.fits(other),
        )
        for key, other in moves(run, Space(run=run, cluster=cluster, pinned={}, reach=WIDE), offload=True)
        if evaluator.legal(other)
    )


def best_change(candidate: Candidate, cluster: Cluster) -> LayoutChange | None:
    """Return the one change of the layout that helps most, None if no change helps.

    If the candidate's memory is there, that is the fastest change that fits with the margin of the search, if it saves
    more than `EQUAL` of the step time. Otherwise it is the fastest change that fits, or, if none does, the one with the
    least memory, if that is less.
    """
    changes = neighbors(candidate, cluster)
    fitting = [change for change in changes if change.fits]
    fastest = min(
        fitting, key=lambda change: (change.candidate.step_seconds, change.candidate.memory_bytes), default=None
    )
    if candidate.memory_bytes <= rank_memory_bytes(cluster, candidate.run.parallel.world_size):
        faster = fastest and fastest.candidate.step_seconds < (1 - EQUAL) * candidate.step_seconds
        return fastest if faster else None
    least = min(changes, key=lambda change: change.candidate.memory_bytes, default=None)
    smaller = least is not None and least.candidate.memory_bytes < candidate.memory_bytes
    return fastest or (least if smaller else None)


def overrides_between(before: RunConfig, after: RunConfig, first: str = "") -> tuple[str, ...]:
    """Return the settings of `after` that differ from `before`, as KEY=VALUE for --set. first: the key that leads."""
    old, new = before.settings(), after.settings()
    changed = sorted((key for key in new if new[key] != old.get(key)), key=lambda key: key != first)
    return tuple(f"{key}={json.dumps(new[key])}".replace('"', "") for key in changed)


def _value(run: RunConfig, key: str) -> object:
    return run.train.micro_batch if key == "micro_batch" else getattr(run.parallel, key)


def moves(run: RunConfig, space: Space, *, offload: bool = False) -> Iterator[tuple[str, RunConfig]]:
    """Yield (changed setting, the run with the change) for each step, legal or not. Pinned settings do not change.

    offload: include the step that offloads optimizer state to the host.
    """
    for key, other in _all_moves(run, space, offload):
        if all(_value(other, name) == _value(run, name) for name in space.pinned):
            yield key, other


def _all_moves(run: RunConfig, space: Space, offload: bool) -> Iterator[tuple[str, RunConfig]]:
    parallel = run.parallel
    for key in _DEGREES:
        for degree in _twice_and_half(getattr(parallel, key)):
            yield from ((key, replace(run, parallel=other)) for other in _degree(run, space, key, degree))
    for size in _twice_and_half(run.train.micro_batch):
        yield "micro_batch", replace(run, train=replace(run.train, micro_batch=size))
    for key, other in _same_mesh(run, space):
        yield key, replace(run, parallel=other)
    if offload and parallel.offload == "none":
        yield "offload", replace(run, parallel=replace(parallel, offload="cpu"))


def _same_mesh(run: RunConfig, space: Space) -> Iterator[tuple[str, Parallel]]:
    parallel = run.parallel
    for shard in _twice_and_half(parallel.dp_shard):
        if parallel.data_ranks % shard == 0:
            yield "dp_shard", replace(parallel, dp_shard=shard, dp_replicate=parallel.data_ranks // shard)
    if run.model.is_moe:
        yield from (("ep", replace(parallel, ep=ep)) for ep in _twice_and_half(parallel.ep))
    if parallel.shard_ranks > 1:
        yield from (("zero", replace(parallel, zero=zero)) for zero in (1, 2, 3) if zero != parallel.zero)
    for form in RECOMPUTE:
        if form != parallel.recompute:
            yield "recompute", replace(parallel, recompute=form, recompute_every=1)
    for other in _schedules(run, space):
        yield "schedule" if other.schedule != parallel.schedule else "stages_per_rank", other


def _twice_and_half(degree: int) -> list[int]:
    return [2 * degree, degree // 2] if degree % 2 == 0 else [2 * degree]


def _degree(run: RunConfig, space: Space, key: str, degree: int) -> Iterator[Parallel]:
    """Yield the layouts with `degree` as the degree `key`. dp_shard adapts to it; dp_replicate stays if possible."""
    old = run.parallel
    inner = {name: getattr(old, name) for name in _DEGREES} | {key: degree}
    ranks, rest = divmod(old.world_size, inner["tp"] * inner["pp"] * inner["cp"])
    if rest or ranks < 1:
        return
    copies = old.dp_replicate if ranks % old.dp_replicate == 0 else 1
    mesh = replace(old, **inner, dp_shard=ranks // copies, dp_replicate=copies, stage_layers=())
    chunks = old.tp_chunks if mesh.tp > 1 else 1
    mesh = replace(mesh, async_tp=old.async_tp and mesh.tp > 1, tp_chunks=chunks, ep=_nearest_ep(run, mesh))
    if key == "pp":
        mesh = replace(mesh, schedule="1f1b", stages_per_rank=0)
        micro_batches = run.train.global_batch // (run.train.micro_batch * ranks)
        yield from space.schedules(mesh, micro_batches) if micro_batches else ()
    elif key == "cp":
        yield from space.contexts(replace(mesh, context="auto", ulysses=0))
    else:
        yield mesh


def _nearest_ep(run: RunConfig, parallel: Parallel) -> int:
    if not run.model.is_moe:
        return 1
    return max(ep for ep in legal_ep(run.model.moe.num_experts, parallel) if ep <= parallel.ep or ep == 1)


def _schedules(run: RunConfig, space: Space) -> Iterator[Parallel]:
    if run.parallel.pp > 1:
        plain = replace(run.parallel, stage_layers=(), stages_per_rank=0)
        now = run.parallel.schedule, run.parallel.stages_on_each_rank
        for other in space.schedules(plain, run.accumulation):
            if (other.schedule, other.stages_on_each_rank) != now:
                yield other
