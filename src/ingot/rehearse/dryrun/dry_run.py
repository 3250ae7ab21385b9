"""The dry run: what every rank of a job would do, from traces of a few of its ranks, made on this machine.

The ranks are traced by train/dry_run_role.py in processes of their own; this module chooses them, compares their
collectives (mesh_world.py) and holds what they did against the formulas of theory/. It does not import torch.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ingot.config import to_dict
from ingot.errors import ConfigError, ResourceError
from ingot.machine.facts import usable_cores
from ingot.planner.predict.memory.peak_memory import position_bill
from ingot.rehearse.dryrun.compare import WORLD, Compared, compare, useful_flops
from ingot.rehearse.dryrun.mesh_world import Grid, WorldCheck, check_world
from ingot.rehearse.dryrun.rendezvous import ISEND, SEND, Call
from ingot.schema.run import RunConfig
from ingot.theory.layout import positions, require_layout, resolve_parallel

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
MOMENTS = ("initialisation", "first step", "steady step", "save")
STEADY = MOMENTS[2]
_FACTS = ("clip", "balance")  # places of the program that tell the whole world something
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
_RING = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "all_to_all": 1}
_DEADLINE_SECONDS = 900
_OVER_BILL = 1.05  # times the planner's bill of memory; what is above it is told


@dataclass(frozen=True)
class Moment:
    """bytes: at the peak, of tensors; by_kind: of those, and "host" what is offloaded. rest: held at its end."""

    bytes: int
    by_kind: dict[str, int]
    place: str
    rest: int


@dataclass(frozen=True)
class Trace:
    """What one rank does. calls: all of them, from the build to the save; steady_calls: of one optimizer step.

    sent: bytes by axis in a steady step. flops: of matrix products and of attention in a steady step. attended: pairs
    of a query and a key that attention goes through, of one head and sequence; again: once more in the backward.
    """

    rank: int
    name: str
    position: int
    moments: dict[str, Moment]
    matmul_flops: float
    attention_flops: float
    attended: float
    attended_again: bool
    operations: int
    sent: dict[str, float]
    counts: dict[str, dict[str, int]]
    calls: list[Call]
    cpu_seconds: float
    memory_bytes: int

    @property
    def peak(self) -> tuple[str, int]:
        """The moment of the highest peak, and its bytes."""
        return max(((name, moment.bytes) for name, moment in self.moments.items()), key=lambda found: found[1])


@dataclass(frozen=True)
class DryRun:
    """By pipeline rank, bills: the planner's memory at the peak, in bytes. useful: FLOPs of a step that recomputes no
    block, by formula. overlap_left_out: the run overlaps tp's collectives with its products, the trace does not."""

    grid: Grid
    traces: list[Trace]
    world: WorldCheck
    compared: list[Compared]
    bills: list[float]
    useful: list[float]
    overlap_left_out: bool

    @property
    def bases(self) -> list[int]:
        """The first rank of every pipeline position."""
        inner = self.grid.world_size // self.grid.sizes["pp"]
        return [position * inner for position in range(self.grid.sizes["pp"])]

    @property
    def over_bill(self) -> list[Trace]:
        """Ranks that need more memory than the planner's bill allows for, the worst first."""

        def share(trace: Trace) -> float:
            return trace.peak[1] / max(self.bills[trace.position], 1.0)

        return sorted((trace for trace in self.traces if share(trace) > _OVER_BILL), key=share, reverse=True)

    @property
    def problems(self) -> bool:
        return self.world.fault is not None or not all(c.agrees for c in self.compared)


def simulate(
    config: RunConfig,
    *,
    device: str,
    loads: Sequence[float] = (),
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DryRun:
    """Trace every distinct rank of `config`, at most `jobs` at a time, and judge them together.

    device: "cpu" or "cuda", the kind of machine it is meant for. loads: of experts, in any measure, none: all alike.
    jobs: None for as many as there are cores, at least 2 and at most 8; one takes about 350 MB. progress(done, all) is
    called as traces come in.
    Raises ConfigError for a layout that breaks a rule or cannot be followed, ResourceError when a trace fails.
    """
    require_layout(config)
    if config.parallel.offload == "nvme":
        raise ConfigError(
            "parallel.offload = 'nvme' keeps state in files, which a trace without memory cannot write",
            rule="a dry run follows tensors only",
            fix="simulate with --set parallel.offload=cpu: the device does the same",
        )
    grid = grid_of(config)
    ranks = chosen_ranks(grid)
    jobs = jobs or min(max(usable_cores(), 2), 8)
    answers = _trace(config, ranks, device, loads, jobs, progress)
    traces = [read_answer(answers[rank], grid) for rank in ranks]
    names = {trace.rank: trace.name for trace in traces}
    world = check_world({trace.rank: trace.calls for trace in traces}, grid, names)
    places = positions(config)
    compared = [c for trace in traces for c in compare(trace, places[trace.position], device, bool(loads))]
    bills = [sum(term.value for term in position_bill(place, device).values()) for place in places]
    useful = [useful_flops(place, device) for place in places]
    return DryRun(grid, traces, world, compared, bills, useful, config.parallel.async_tp)


def grid_of(config: RunConfig) -> Grid:
    """The run's mesh, cut where experts and rows of Ulysses take parts of its axes. Raises ConfigError."""
    parallel = resolve_parallel(config)
    row = parallel.tp * (parallel.cp // parallel.ring)
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
    try:
        return Grid(sizes, (row, parallel.ep))
    except ValueError as error:
        raise ConfigError(
            f"ep = {parallel.ep} across rows of ulysses x tp = {row} ranks of dp_shard x cp x tp",
            rule="a dry run follows a few ranks, for which groups take whole parts of axes, and parts of one another",
            fix=f"an ep that divides {row} or is a multiple of it",
        ) from error


def chosen_ranks(grid: Grid) -> list[int]:
    """The first rank of every pipeline position, and of the first and last position the one that is last on all axes.

    Nothing in the program looks at a coordinate but through the sizes of what a rank holds, so other ranks do as one of
    these does; that those at the ends do is looked at.
    """
    inner = grid.world_size // grid.sizes["pp"]
    firsts = [position * inner for position in range(grid.sizes["pp"])]
    return firsts + [first + inner - 1 for first in dict.fromkeys((firsts[0], firsts[-1])) if inner > 1]


def rank_name(rank: int, grid: Grid) -> str:
    """Its coordinates on the axes that are more than one long: "pp 3 dp_shard 0 tp 0"."""
    places = zip(grid.sizes.items(), grid.coordinates(rank), strict=True)
    return " ".join(f"{axis} {place}" for (axis, size), place in places if size > 1) or "the only rank"


def _trace(
    config: RunConfig, ranks: list[int], device: str, loads: Sequence[float], jobs: int, progress
) -> dict[int, dict]:
    """The answers of train/dry_run_role.py by rank. Its processes are gone when this returns."""
    settings = {"ranks": ranks, "jobs": jobs, "device": device, "loads": list(loads)}
    request = json.dumps({"config": to_dict(config), **settings})
    command = [sys.executable, "-W", "ignore", "-m", "ingot.rehearse.dryrun.role"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answers: dict[int, dict] = {}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # its forked children end with it
        )
        assert process.stdin and process.stdout
        late = threading.Timer(_DEADLINE_SECONDS, _end, (process,))
        late.start()
        try:
            with suppress(BrokenPipeError):  # it died early, and tells below why
                process.stdin.write(request)
                process.stdin.close()
            for line in process.stdout:
                answer = json.loads(line)
                if "error" in answer:
                    raise failure(answer)
                answers[answer["rank"]] = answer
                if progress:
                    progress(len(answers), len(ranks))
        finally:
            late.cancel()
            _end(process)
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [f"not done within {_DEADLINE_SECONDS} s"])[-1]
    if len(answers) < len(ranks):
        raise ResourceError(f"{len(answers)} of {len(ranks)} ranks were traced, then it ended: {last}")
    return answers


def _end(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failure(answer: dict) -> Exception:
    if "rule" in answer:
        return ConfigError(answer["error"], rule=answer["rule"], fix=answer["fix"])
    frames = [line for line in answer.get("traceback", "").splitlines() if line.lstrip().startswith("File ")]
    where = f", at {frames[-1].strip()}" if frames else ""
    return ResourceError(f"rank {answer['rank']} cannot be traced: {answer['error']}{where}")


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
        moments={name: Moment(**peak) for name, peak in answer["peaks"].items()},
        matmul_flops=sum(answer["flops"].values()) - attention,
        attention_flops=attention,
        attended=answer["attended"]["forward"],
        attended_again=answer["attended"]["chunked"],
        operations=answer["operations"],
        sent={axis: value for axis, value in sent.items() if axis},
        counts={axis: dict(ops) for axis, ops in counts.items() if axis},
        calls=[table[number] for moment in MOMENTS for number in answer["program"][moment]],
        cpu_seconds=answer["cpu_seconds"],
        memory_bytes=answer["memory_bytes"],
    )


def sent_bytes(call: Call) -> float:
    """What this rank sends for it: rings, as in theory/traffic.py."""
    size, ranks = call.elements * _BYTES[call.dtype], len(call.group)
    if call.own >= 0:
        return size - call.own * _BYTES[call.dtype]
    return size if call.op in (SEND, ISEND) else _RING.get(call.op, 0) * size * (ranks - 1) / ranks
