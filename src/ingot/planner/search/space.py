"""The layouts that a run can have on a cluster: the degree of each axis, and the settings that belong to it.

A narrow search leaves out layouts that are never better (a test compares each such rule with an exhaustive search) and
layouts that are only tried if nothing else fits. It tries:

    tp         degrees that divide the domain of fast links
    cp         degrees that leave each rank at least `rank_tokens` tokens of a sequence; in the form that
               theory/context.py chooses
    dp_shard   1; the largest that stays inside the domain, and 8, 64, ... times that; all data-parallel ranks
    ep         powers of 4, the largest degree inside the domain, the largest that divides it, and the largest of all
    schedule   all except gpipe (1f1b has the same bubble and less memory), and except looped_bfs if the micro-batches
               are a multiple of the ranks (interleaved has the same bubble and less memory)
    recompute  the least that fits
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from ingot.errors import ConfigError
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import SPLIT_BACKWARD, TWO_STAGES, V_SHAPED, Parallel
from ingot.schema.run import RunConfig
from ingot.theory.context import H100_NODES, Links, explain_context, resolve_context
from ingot.theory.rules.context import legal_forms
from ingot.theory.rules.expert import legal_ep
from ingot.theory.rules.layout import legal_tp
from ingot.theory.rules.nearest import divisors
from ingot.theory.schedule import schedule_problems

# Micro-batches with more tokens per rank than this do not make matrix products faster.
MICRO_BATCH_TOKENS = 65_536
RECOMPUTE = ("none", "selective", "full")
_STEPS_OF_FOUR = tuple(4**n for n in range(6))
_SCHEDULES = ("1f1b", "interleaved", "zb_h1", "zb_v", "interleaved_zb", "dualpipe_v", "looped_bfs", "gpipe")
# The settings that a search decides. Other settings of a layout stay as they are in the run.
SEARCHED = (
    "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "context", "ulysses", "zero", "schedule", "stages_per_rank",
    "recompute", "offload", "offload_parameters",
)  # fmt: skip
PINS = (*(field.name for field in fields(Parallel)), "micro_batch")


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The extent of a search.

    rank_tokens: the fewest tokens of a sequence on a rank, which limits cp. shardings: number of shardings whose
    micro-batches and schedules are tried. beyond_domain: tp may be larger than the domain of fast links. offload:
    optimizer state and parameters may go to host memory. every: try all legal layouts.
    """

    rank_tokens: int = 4096
    shardings: int = 48
    beyond_domain: bool = False
    offload: bool = False
    every: bool = False


NARROW = Reach()
WIDE = Reach(rank_tokens=512, beyond_domain=True)
OFFLOADED = replace(WIDE, offload=True)
PATIENT = replace(WIDE, shardings=1000)


@dataclass(frozen=True, kw_only=True)
class Space:
    """The layouts of a run on a cluster.

    run: model, sequence length, batch and the settings that are not searched. pinned: fixed values by name, which is a
      field of Parallel or "micro_batch". Raises ConfigError for another name.
    """

    run: RunConfig
    cluster: Cluster
    pinned: Mapping[str, object]
    reach: Reach = NARROW

    def __post_init__(self):
        for name in self.pinned:
            if name not in PINS:
                raise ConfigError(
                    "E-PIN-UNKNOWN",
                    f"cannot pin {name!r}, which is not a setting of a layout",
                    rule=f"the settings of a layout are {', '.join(PINS)}",
                    fix="pin one of these",
                    pin=name,
                )

    def free(self, name: str, values: Iterable) -> list:
        return [self.pinned[name]] if name in self.pinned else list(values)

    @property
    def devices(self) -> int:
        """The number of devices that a layout uses: all of the cluster, unless every degree is pinned."""
        degrees = [self.pinned.get(name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
        found = 1
        for degree in degrees:
            if not isinstance(degree, int):
                return self.cluster.devices
            found *= degree
        return found

    def meshes(self) -> Iterator[Parallel]:
        """Yield the meshes of tp, cp and pp in which all other ranks are dp_shard (`shardings` splits these) and the
        data-parallel ranks divide the global batch.
        """
        base = self._plain()
        for tp in self.free("tp", self._tensor_degrees()):
            for cp in self.free("cp", self._context_degrees(tp)):
                for pp in self.free("pp", divisors(self.devices)):
                    ranks, rest = divmod(self.devices, tp * cp * pp)
                    legal = pp <= self.run.model.num_layers and ranks and not rest
                    if legal and self.run.train.global_batch % ranks == 0:
                        mesh = replace(base, tp=tp, cp=cp, pp=pp, dp_shard=ranks, async_tp=base.async_tp and tp > 1)
                        mesh = replace(mesh, tp_chunks=base.tp_chunks if tp > 1 else 1)
                        yield from self.contexts(mesh)

    def _plain(self) -> Parallel:
        """Return the run's layout with the searched settings at their defaults, and with all other pinned settings."""
        idle = {field.name: field.default for field in fields(Parallel) if field.name in SEARCHED}
        fixed = {name: value for name, value in self.pinned.items() if name not in SEARCHED and name != "micro_batch"}
        idle |= {"offload": self.pinned.get("offload", "cpu" if self.reach.offload else "none")}
        return replace(self.run.parallel, **idle | {"stage_layers": (), "recompute_every": 1} | fixed)

    def _tensor_degrees(self) -> list[int]:
        domain, devices = self.cluster.domain, self.devices
        legal = [tp for tp in legal_tp(self.run.model) if devices % tp == 0]
        if self.reach.beyond_domain or self.reach.every:
            return legal
        return [tp for tp in legal if tp <= domain and (devices <= domain or domain % tp == 0)]

    def _context_degrees(self, tp: int) -> list[int]:
        most = self.run.train.seq_len // (1 if self.reach.every else self.reach.rank_tokens)
        return [cp for cp in divisors(self.devices // tp) if cp == 1 or cp <= most]

    def contexts(self, mesh: Parallel) -> Iterator[Parallel]:
        """Yield the mesh with each form of context parallelism to try; "auto" is replaced by the form it means."""
        train = self.run.train
        if mesh.cp == 1 or "context" in self.pinned:
            settings = {name: self.pinned[name] for name in ("context", "ulysses") if name in self.pinned}
            yield replace(mesh, **settings) if mesh.cp > 1 else mesh
            return
        forms = legal_forms(self.run.model, train, mesh)
        if self.reach.every:
            for form, degree in forms:
                yield replace(mesh, context=form, ulysses=degree if form == "usp" else 0)
        elif forms:
            yield with_context(replace(self.run, parallel=mesh), self.cluster)[0].parallel

    def shardings(self, mesh: Parallel) -> Iterator[Parallel]:
        """Yield the mesh with each combination of dp_shard and dp_replicate, ZeRO stage, ep and offload_parameters."""
        moe, ranks = self.run.model.moe, mesh.dp_shard
        for shard in self.free("dp_shard", self._shards(mesh)):
            if ranks % shard or self.pinned.get("dp_replicate", ranks // shard) != ranks // shard:
                continue
            split = replace(mesh, dp_shard=shard, dp_replicate=ranks // shard)
            stages = (1, 2, 3) if split.shard_ranks > 1 or self.reach.offload else (1,)
            for zero in self.free("zero", stages):
                for ep in self._experts_divided(split) if moe.num_experts else (1,):
                    for parameters in self.free("offload_parameters", self._parameters_offloaded(zero)):
                        yield replace(split, zero=zero, ep=ep, offload_parameters=parameters)

    def _parameters_offloaded(self, zero: object) -> tuple[bool, ...]:
        return (False, True) if self.reach.offload and zero == 3 else (False,)

    def _experts_divided(self, split: Parallel) -> list[int]:
        legal = legal_ep(self.run.model.moe.num_experts, split)
        if "ep" in self.pinned:
            return [ep for ep in legal if ep == self.pinned["ep"]]
        if self.reach.every:
            return legal
        domain = self.cluster.domain
        within = max(ep for ep in legal if ep <= domain or ep == 1)
        whole = max(ep for ep in legal if domain % ep == 0)
        return [ep for ep in legal if ep in (within, whole, legal[-1]) or ep in _STEPS_OF_FOUR]

    def _shards(self, mesh: Parallel) -> list[int]:
        found, inside = divisors(mesh.dp_shard), max(self.cluster.domain // (mesh.tp * mesh.cp), 1)
        if self.reach.every:
            return found
        within = max(shard for shard in found if shard <= inside)
        steps = {within * 8**n for n in range(7)}
        return [shard for shard in found if shard in (1, within, mesh.dp_shard) or shard in steps]

    def micro_batches(self, parallel: Parallel) -> list[int]:
        """Return the micro-batch sizes to try, in sequences, ascending."""
        of_rank = self.run.train.global_batch // parallel.data_ranks
        most = max(MICRO_BATCH_TOKENS * parallel.cp // self.run.train.seq_len, 1)
        sizes = [size for size in divisors(of_rank) if size <= most]
        return [size for size in self.free("micro_batch", sizes) if isinstance(size, int) and of_rank % size == 0]

    def recomputes(self, parallel: Parallel) -> list[Parallel]:
        """Return the layout with each form of recomputation, from the fastest to the one with the least memory."""
        return [replace(parallel, recompute=form) for form in self.free("recompute", RECOMPUTE)]

    def schedules(self, parallel: Parallel, micro_batches: int) -> Iterator[Parallel]:
        if parallel.pp == 1:
            yield parallel
            return
        for name in self.free("schedule", _SCHEDULES):
            if name in SPLIT_BACKWARD and (parallel.zero == 3 or self.run.train.compile == "on" or parallel.async_tp):
                continue
            if not self.reach.every and "schedule" not in self.pinned and self._worse(name, parallel, micro_batches):
                continue
            for each in self.free("stages_per_rank", self._stages(name, parallel.pp)):
                fits = parallel.pp * max(each, 1) <= self.run.model.num_layers
                if fits and not any(schedule_problems(name, parallel.pp, micro_batches, each)):
                    yield replace(parallel, schedule=name, stages_per_rank=each)

    @staticmethod
    def _worse(name: str, parallel: Parallel, micro_batches: int) -> bool:
        return name == "gpipe" or (name == "looped_bfs" and micro_batches % parallel.pp == 0)

    def _stages(self, name: str, pp: int) -> list[int]:
        """Return the numbers of stages per rank to try; 0 means the schedule's own number."""
        if name not in TWO_STAGES:
            return [0]
        layers = self.run.model.num_layers
        if name in V_SHAPED:
            return [0] if 2 * pp <= layers else []
        return [v for v in range(2, layers // pp + 1) if self.reach.every or layers % (pp * v) == 0 or v in (2, 4, 8)]


def with_context(run: RunConfig, cluster: Cluster) -> tuple[RunConfig, dict[str, str]]:
    """Return `run` with context "auto" replaced by the best form for the links of `cluster`, and the reason by dotted
    key ({} if nothing was replaced). The layout of `run` must be legal.

    The trainer itself decides "auto" by fixed link speeds, so that all ranks choose the same form.
    """
    parallel = run.parallel
    if parallel.cp == 1 or parallel.context != "auto":
        return run, {}
    links = links_of(cluster, run.train.precision)
    decided = resolve_context(run.model, run.train, parallel, links)
    why, _, _ = explain_context(run.model, run.train, parallel, links).partition(":")
    degree = decided.ulysses if decided.context == "usp" else 0
    chosen = replace(parallel, context=decided.context, ulysses=degree)
    reason = f"{why}: adds the least time to a layer on {cluster.name}"
    return replace(run, parallel=chosen), {"parallel.context": reason}


def links_of(cluster: Cluster, precision: str) -> Links:
    """Return the links of the cluster, with those of H100 nodes for unknown rates.

    A single machine is one node, however many ranks share it. Several nodes that fast links join count as one node.
    """
    flops = cluster.peak_flops.get(precision, 0.0) * cluster.attention_efficiency
    return Links(
        ranks_per_node=cluster.domain if cluster.nodes > 1 else sys.maxsize,
        inside=cluster.link_bandwidth or H100_NODES.inside,
        across=cluster.network_bandwidth or H100_NODES.across,
        flops=flops or H100_NODES.flops,
        memory=cluster.memory_bandwidth or H100_NODES.memory,
    )
