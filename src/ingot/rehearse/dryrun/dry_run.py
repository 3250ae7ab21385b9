"""The dry run: the work of every rank of a job, derived from a few ranks that are traced on this machine.

role.py traces the ranks in separate processes, which tracing.py starts. This module chooses the ranks, checks that all
collectives match (mesh_world.py) and compares FLOPs and bytes with the formulas of theory/. It does not import torch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ingot.errors import ConfigError
from ingot.machine.facts import usable_cores
from ingot.planner.predict.memory.peak_memory import position_bill
from ingot.plugins.optimizer import OPTIMIZERS
from ingot.rehearse.dryrun.communicators import (
    DEFAULT_QUEUES,
    OF_FSDP,
    QUEUES_VARIABLE,
    Communicator,
    StreamCheck,
    check_streams,
    communicators_of,
)
from ingot.rehearse.dryrun.mesh_world import Grid, WorldCheck, check_world
from ingot.rehearse.dryrun.rendezvous import ISEND, SEND, Call
from ingot.rehearse.dryrun.tracing import KeptTraces, Request, trace_ranks
from ingot.schema.run import RunConfig
from ingot.theory.context import imbalance
from ingot.theory.flops import mean_keys
from ingot.theory.layout import Position, positions, require_layout, resolve_parallel
from ingot.theory.rules.parts import parts_of_plugins
from ingot.theory.traffic import sent_by_axis, spanned, step_traffic
from ingot.theory.work import Work, step_work
from ingot.trainer.mesh.environment import environment_number

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
MOMENTS = ("initialisation", "first step", "steady step", "save")
STEADY = MOMENTS[2]
_FACTS = ("clip", "balance")  # places of the program whose collectives span all ranks
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
_RING = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "all_to_all": 1}
_UNEVEN = 0.1  # of the work and traffic of whole matrices
_OVER_BILL = 1.05  # a rank whose peak exceeds the planner's prediction of memory by this factor is reported
# The axis name of collectives over all ranks at the end of a step (gradient norm, loads of experts).
WORLD = "world"


@dataclass(frozen=True)
class PhaseMemory:
    """The memory of tensors in a phase. bytes: the peak. by_kind: bytes at the peak by kind of tensor, and "host" for
    offloaded bytes.

    place: the part of the program that reaches the peak. rest: bytes held at the end of the phase.
    """

    bytes: int
    by_kind: dict[str, int]
    place: str
    rest: int


@dataclass(frozen=True)
class Trace:
    """The traced work of one rank. position: its index on the axis pp. moments: memory by phase. calls: its collectives
    and messages, from the build to the save. communicators: its groups with several ranks.

    FLOPs, operations that a device works for, sent (bytes by axis) and counts (calls by axis and operation) are those
    of one steady step. attended: number of query-key pairs that attention computes, per head and sequence.
    """

    rank: int
    name: str
    position: int
    moments: dict[str, PhaseMemory]
    matmul_flops: float
    attention_flops: float
    attended: float
    operations: int
    sent: dict[str, float]
    counts: dict[str, dict[str, int]]
    calls: list[Call]
    cpu_seconds: float
    memory_bytes: int
    communicators: list[Communicator] = field(default_factory=list)

    @property
    def peak(self) -> tuple[str, int]:
        """The phase with the highest peak, and the bytes of that peak."""
        return max(((name, phase.bytes) for name, phase in self.moments.items()), key=lambda found: found[1])


@dataclass(frozen=True)
class FigureCheck:
    """A number from a trace next to the same number from a formula. other_loads: the trace has unequal expert loads,
    so the two numbers may differ. tolerance: the deviation up to which they agree.
    """

    rank: int
    what: str
    traced: float
    formula: float
    other_loads: bool = False
    tolerance: float = 0.01

    @property
    def deviation(self) -> float:
        return abs(self.traced - self.formula) / max(abs(self.formula), abs(self.traced), 1.0)

    @property
    def agrees(self) -> bool:
        return self.other_loads or self.deviation <= self.tolerance


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run.

    missing: the chosen ranks that were not traced before patience ended. world: None if there are such ranks. streams:
    the communicators and the order of queues; None on CPUs, with missing ranks, and if the collectives do not match.
    bills: peak memory of each pipeline rank as the planner predicts it, in bytes. useful: FLOPs of a step without
    recomputation for each pipeline rank, by formula. overlap_left_out: the run overlaps tp's collectives with matrix
    products (async_tp), which the trace does not. declared: the chosen parts of plug-ins, on whose declared costs the
    formulas rest.
    """

    grid: Grid
    traces: list[Trace]
    missing: list[int]
    world: WorldCheck | None
    compared: list[FigureCheck]
    bills: list[float]
    useful: list[float]
    overlap_left_out: bool
    declared: tuple[str, ...] = ()
    streams: StreamCheck | None = None

    @property
    def bases(self) -> list[int]:
        """The first rank of every index on the pp axis, in order."""
        inner = self.grid.world_size // self.grid.sizes["pp"]
        return [position * inner for position in range(self.grid.sizes["pp"])]

    @property
    def over_bill(self) -> list[Trace]:
        """The traced ranks whose peak memory exceeds the planner's prediction by over 5%, the worst first."""

        def share(trace: Trace) -> float:
            return trace.peak[1] / max(self.bills[trace.position], 1.0)

        return sorted((trace for trace in self.traces if share(trace) > _OVER_BILL), key=share, reverse=True)

    @property
    def problems(self) -> bool:
        fault = self.world is not None and self.world.fault is not None
        locks = self.streams is not None and self.streams.room is None
        return fault or locks or not all(c.agrees for c in self.compared)


class Watcher:
    """The watcher of a dry run, which hears of each phase and each trace. This one ignores everything."""

    def began(self, rank: int, phase: str) -> None:
        """`rank` enters `phase`."""

    def traced(self, trace: Trace, done: int, ranks: int, was_kept: bool) -> None:
        """A rank has been traced, or its trace was kept by an earlier dry run: `done` of `ranks` are there."""


def simulate(
    config: RunConfig,
    *,
    device: str,
    patience: float,
    loads: Sequence[float] = (),
    jobs: int | None = None,
    watcher: Watcher | None = None,
    home: Path | None = None,
) -> DryRun:
    """Trace the ranks of `config` that represent all others, and check all ranks with these traces.

    device: "cpu" or "cuda", the kind of machine that will train. patience: seconds without progress after which the dry
    run ends with the ranks that are traced. loads: loads of the experts, in any unit; empty: all equal. jobs: number of
    processes, of about 350 MB each; None: one per core, at least 2 and at most 8. watcher: hears of phases and traces;
    None: nobody does. home: where traces are kept; None: the user's cache.
    Raises ConfigError if the layout breaks a rule or cannot be traced, ResourceError if a trace fails.
    """
    require_layout(config)
    if config.parallel.offload == "nvme":
        raise ConfigError(
            "E-DRYRUN-NVME",
            "parallel.offload = 'nvme' keeps state in files, but the tensors of a dry run have no data to write",
            rule="a dry run can trace only state that is kept in tensors",
            fix="simulate with --set parallel.offload=cpu: the work of the device is the same",
        )
    grid = grid_of(config)
    ranks = chosen_ranks(grid)
    request = Request(config, device, loads, jobs or min(max(usable_cores(), 2), 8), patience)
    traces = _traces(request, ranks, grid, watcher or Watcher(), KeptTraces(config, device, loads, home))
    missing = [rank for rank in ranks if rank not in traces]
    found = [traces[rank] for rank in ranks if rank in traces]
    world = None
    if not missing:
        world = check_world({trace.rank: trace.calls for trace in found}, grid, {t.rank: t.name for t in found})
    streams = None
    if device == "cuda" and world is not None and world.fault is None:
        streams = streams_of(config, grid, found)
    places = positions(config)
    compared = [c for trace in found for c in compare(trace, places[trace.position], device, bool(loads))]
    bills = [sum(term.value for term in position_bill(place, device).values()) for place in places]
    useful = [useful_flops(place, device) for place in places]
    overlaps, declared = config.parallel.async_tp, tuple(parts_of_plugins(config))
    return DryRun(grid, found, missing, world, compared, bills, useful, overlaps, declared, streams)


def streams_of(config: RunConfig, grid: Grid, traces: Sequence[Trace]) -> StreamCheck:
    """Check the streams of the first rank of every pipeline position, which represents the others of its position: they
    run the same program relative to their coordinates, so they begin and end their kernels together.

    Raises ConfigError if CUDA_DEVICE_MAX_CONNECTIONS is set and no number.
    """
    inner = grid.world_size // grid.sizes["pp"]
    firsts = {trace.rank: trace for trace in traces if trace.rank % inner == 0}
    return check_streams(
        {rank: trace.calls for rank, trace in firsts.items()},
        {rank: trace.communicators for rank, trace in firsts.items()},
        environment_number(QUEUES_VARIABLE, DEFAULT_QUEUES, least=1),
        OF_FSDP if resolve_parallel(config).zero == 3 else (),
    )


def _traces(request: Request, ranks: list[int], grid: Grid, watcher: Watcher, kept: KeptTraces) -> dict[int, Trace]:
    """Return the traces by rank: those that were kept, then those that are made now, until patience ends."""
    traces: dict[int, Trace] = {}

    def add(answer: dict, *, was_kept: bool) -> None:
        trace = read_answer(answer, grid)
        traces[trace.rank] = trace
        watcher.traced(trace, len(traces), len(ranks), was_kept)

    for rank in ranks:
        if answer := kept.read(rank):
            add(answer, was_kept=True)
    if left := [rank for rank in ranks if rank not in traces]:
        for answer in trace_ranks(request, left, watcher.began):
            kept.write(answer)
            add(answer, was_kept=False)
    return traces


def grid_of(config: RunConfig) -> Grid:
    """Return the run's mesh, with axes split where expert groups and Ulysses rows end. Raises ConfigError if those
    groups do not nest.
    """
    parallel = resolve_parallel(config)
    row = parallel.tp * (parallel.cp // parallel.ring)
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
    try:
        return Grid(sizes, (row, parallel.ep))
    except ValueError as error:
        raise ConfigError(
            "E-DRYRUN-GROUPS",
            f"groups of ep = {parallel.ep} ranks do not nest with rows of ulysses x tp = {row} ranks",
            rule="a dry run needs groups that nest: the size of each divides that of the next larger",
            fix=f"use an ep that divides {row} or is a multiple of it",
            ep=parallel.ep,
            row=row,
        ) from error


def chosen_ranks(grid: Grid) -> list[int]:
    """Return the ranks to trace: the first rank of every pipeline position, and the last rank of the first and of the
    last position.

    A rank's program depends on its coordinates only through the sizes of its shards, so every other rank does the same
    as one of these. `check_world` verifies this with the ranks at the ends of the axes.
    """
    inner = grid.world_size // grid.sizes["pp"]
    firsts = [position * inner for position in range(grid.sizes["pp"])]
    return firsts + [first + inner - 1 for first in dict.fromkeys((firsts[0], firsts[-1])) if inner > 1]


def rank_name(rank: int, grid: Grid) -> str:
    """Return the rank's coordinates on the axes with more than one rank, as text: "pp 3 dp_shard 0 tp 0"."""
    places = zip(grid.sizes.items(), grid.coordinates(rank), strict=True)
    return " ".join(f"{axis} {place}" for (axis, size), place in places if size > 1) or "the only rank"


def read_answer(answer: dict, grid: Grid) -> Trace:
    groups = [tuple(group) for group in answer["groups"]]
    table = [Call(op, groups[group], *rest) for op, group, *rest in answer["calls"]]
    names = {group: "+".join(grid.axes(group)) for group in groups}
    sent: dict[str, float] = {}
    counts: dict[str, Counter[str]] = {}
    for number, count in Counter(answer["program"][STEADY]).items():
        call = table[number]
        axis = WORLD if call.label in _FACTS else names[call.group]
        sent[axis] = sent.get(axis, 0.0) + count * sent_bytes(call)
        counts.setdefault(axis, Counter())[call.op] += count
    attention = sum(n for name, n in answer["flops"].items() if "attention" in name)
    rank = answer["rank"]
    return Trace(
        rank=rank,
        name=rank_name(rank, grid),
        position=grid.coordinates(rank)[0],
        moments={name: PhaseMemory(**peak) for name, peak in answer["peaks"].items()},
        matmul_flops=sum(answer["flops"].values()) - attention,
        attention_flops=attention,
        attended=answer["attended"],
        operations=answer["operations"],
        sent={axis: value for axis, value in sent.items() if axis},
        counts={axis: dict(ops) for axis, ops in counts.items() if axis},
        calls=[table[number] for moment in MOMENTS for number in answer["program"][moment]],
        communicators=communicators_of(
            [(name, purpose, groups[n], names[groups[n]]) for name, purpose, n in answer["communicators"]],
            [table[number] for number in answer["program"][STEADY]],
        ),
        cpu_seconds=answer["cpu_seconds"],
        memory_bytes=answer["memory_bytes"],
    )


def sent_bytes(call: Call) -> float:
    """Return the bytes that this rank sends for a call, assuming ring algorithms as theory/traffic.py does."""
    size, ranks = call.elements * _BYTES[call.dtype], len(call.group)
    if call.own >= 0:
        return size - call.own * _BYTES[call.dtype]
    return size if call.op in (SEND, ISEND) else _RING.get(call.op, 0) * size * (ranks - 1) / ranks


def useful_flops(place: Position, device: str) -> float:
    work = step_work(replace(place, parallel=replace(place.parallel, recompute="none")), device)
    return work.matmul_flops + work.attention_flops


def _attention_flops(trace: Trace, place: Position, work: Work) -> float:
    """Return the attention FLOPs of the formula, scaled to the query-key pairs that this rank's kernels compute.

    Kernels also compute masked pairs; and with contiguous parts of sequences, the number of pairs differs between
    ranks, while the formula is that of the last rank.
    """
    parallel, arch, seq_len = place.parallel, place.arch, place.train.seq_len
    uneven = imbalance(parallel, seq_len, arch.sliding_window) if parallel.ring > 1 else 1.0
    seen = seq_len / parallel.ring * mean_keys(seq_len, arch.sliding_window) * uneven
    return work.attention_flops * trace.attended / seen


def compare(trace: Trace, place: Position, device: str, other_loads: bool = False) -> list[FigureCheck]:
    """Compare the FLOPs and bytes of a trace with the formulas. other_loads: the trace has unequal expert loads."""
    work, formulas = step_work(place, device), sent_by_axis(step_traffic(place, device))
    # The matrices of an optimizer that looks at whole ones are shared out whole, so workers differ a little.
    whole = OPTIMIZERS[place.optimizer].whole_matrices
    uneven, shared = (_UNEVEN if whole else FigureCheck.tolerance), spanned(place.parallel, "copy")
    found = [
        FigureCheck(trace.rank, "matrix products, FLOP", trace.matmul_flops, work.matmul_flops, other_loads, uneven),
        FigureCheck(trace.rank, "attention, FLOP", trace.attention_flops, _attention_flops(trace, place, work)),
    ]
    to_experts = spanned(place.parallel, "ep")
    for axis in dict.fromkeys((*trace.sent, *formulas)):
        if axis != WORLD:
            traced, formula = trace.sent.get(axis, 0.0), formulas.get(axis, 0.0)
            changed = other_loads and axis == to_experts
            close = uneven if axis == shared else FigureCheck.tolerance
            found.append(FigureCheck(trace.rank, f"sent over {axis}, B", traced, formula, changed, close))
    return found
