"""Crash points: a run is killed, or loses power, at a call of a save, and the same command continues it. A shape is a
kind of run whose saves are enumerated: the ordinary one, one with several disks, saves of the weights alone, and ranks
whose snapshots are in memory."""

import json
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ingot.drill.job import gone_within, marked_processes
from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.checkpoint import FULL, WEIGHTS, SaveKind
from ingot.schema.run_folder import RunFolder
from ingot.schema.sealed import sealed

from . import killpoints
from .bench import Bench
from .row import Row, judge_recovered, mode_of, newest_valid, random_of, resumed_from

SAVED, DURING = 4, 8  # steps of the checkpoint before, and of the save that is disturbed
# The strictest: the checkpoint before goes as soon as the new one is there.
PREVIOUS = ("checkpoint.keep=1", "guard.proven_steps=0")
SAMPLE = 5  # points of a seed
_SMALL = ("model.num_layers=1", "train.steps=12")  # fewer tensors, so fewer calls
_STOPPED, _DONE = 10, 0
_END_SECONDS = 5.0
_QUIET_MICRO = 50_000  # before the end, so that other ranks have done all that they do without the one that is killed


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A kind of run. name: for people; "" for the ordinary one. processes: checkpoint.mode -> those that, in a save,
    change the disk or send to a keeper. settings: more than PREVIOUS. numbers: those of them that change numbers.

    ranks: 1 or 2. faults: of "power" and "kill". saves: the kind of save that is disturbed. disks: how many there are.
    stays: the node survives, with its keeper: only a rank and its writer are killed, and all ranks are started again.
    """

    name: str
    processes: Mapping[str, tuple[str, ...]]
    settings: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    ranks: int = 1
    faults: tuple[str, ...] = ("power", "kill")
    saves: SaveKind = FULL
    disks: int = 0
    stays: bool = False


@dataclass(frozen=True, kw_only=True)
class Point:
    """A call at which a run ends: number k, from 1, of the process `who`. do: "power" or "kill"."""

    mode: str
    who: str
    k: int
    do: str


ORDINARY = Shape(name="", processes={"sync": ("rank",), "async": ("writer",)})
DISKS = Shape(
    name="two disks",
    processes={"sync": ("rank:0", "rank:1"), "async": ("writer:0", "writer:1")},
    settings=_SMALL,
    numbers=_SMALL,
    ranks=2,
    disks=2,
)
ONLY_WEIGHTS = Shape(
    name="weights alone",
    processes={"sync": ("rank",), "async": ("writer",)},
    settings=(*_SMALL, 'checkpoint.weights_every="2 steps"', "checkpoint.weights_keep=1"),
    numbers=_SMALL,
    saves=WEIGHTS,
)
MEMORY = Shape(
    name="in memory",
    processes={"async": ("rank:0", "rank:1", "writer:0", "writer:1")},
    settings=(*_SMALL, "checkpoint.replicas=1"),
    numbers=_SMALL,
    ranks=2,
    faults=("kill",),
    stays=True,
)


# -- the runs --


def settings_of(bench: Bench, shape: Shape, mode: str) -> tuple[str, ...]:
    """Return the settings of a run of this shape."""
    disks = json.dumps([str(disk) for disk in _disks(bench, shape)])
    return (*PREVIOUS, *shape.settings, mode_of(mode), *((f"checkpoint.disks={disks}",) if shape.disks else ()))


def _disks(bench: Bench, shape: Shape) -> list[Path]:
    return [bench.root / f"disk-{number}" for number in range(shape.disks)]


def _begun(bench: Bench, shape: Shape, mode: str, name: str) -> RunFolder:
    """Return the folder of a new run `name` that has saved step SAVED, with its disks as they were then."""
    kept = bench.root / f"base-{shape.name}-{mode}".replace(" ", "-")
    disks = _disks(bench, shape)
    if not shape.name:
        return bench.copy(bench.base(SAVED, *PREVIOUS), name)
    if not kept.exists():
        for disk in disks:
            shutil.rmtree(disk, ignore_errors=True)
            disk.mkdir()
        ended = bench.attempt(
            kept.name, *settings_of(bench, shape, mode), until=SAVED, ranks=shape.ranks, restarts=int(shape.stays)
        )
        assert ended.code == _STOPPED, ended.output
        for disk in disks:
            shutil.copytree(disk, _kept(kept, disk))
    folder = bench.copy(kept.name, name)
    for disk in disks:
        shutil.rmtree(disk)
        shutil.copytree(_kept(kept, disk), disk)
        names = folder.root / "disks.json"  # with its own inode it is no copy, whose old files on the disks would stay
        own = json.loads(names.read_text())["names"]
        names.write_text(json.dumps(sealed({"names": own, "inode": names.stat().st_ino})))
    return folder


def _kept(base: Path, disk: Path) -> Path:
    return base.with_name(f"{base.name}-{disk.name}")


def _fault(bench: Bench, shape: Shape, folder: RunFolder, point: Point, log: Path | None = None) -> dict[str, str]:
    saves = folder.of(shape.saves).checkpoints
    below = [saves] if shape.saves == WEIGHTS else [saves, folder.ledger, *_disks(bench, shape)]
    more: dict[str, object] = {"below": ":".join(map(str, below)), "micro": _QUIET_MICRO if shape.ranks > 1 else 0}
    if shape.ranks > 1 and point.do == "power":
        more["shared"] = bench.root / f"{folder.root.name}.shared"
        Path(str(more["shared"])).unlink(missing_ok=True)
    if shape.stays:
        more["sends"] = killpoints.KEEPER
    return killpoints.fault(folder, point.do, point.k, who=point.who, log=log, **more)


def _disturbed(bench: Bench, shape: Shape, name: str, point: Point, log: Path | None = None):
    """Train the run `name` with a fault: to the end if its ranks are started again, else to the step of the save."""
    folder, settings = bench.folder(name), settings_of(bench, shape, point.mode)
    _between(bench, name).unlink(missing_ok=True)  # of the same point, which another seed had drawn
    until = None if shape.stays else DURING
    env = _fault(bench, shape, folder, point, log)
    return bench.attempt(name, *settings, until=until, env=env, ranks=shape.ranks, restarts=int(shape.stays))


def calls_of(bench: Bench, shape: Shape, mode: str, who: str) -> list[tuple[str, str]]:
    """Return the calls of a process in the disturbed save, in order, as (name, path)."""
    name = f"calls-{shape.name}-{mode}-{who}".replace(" ", "-").replace(":", "-")
    log = bench.root / f"{name}.txt"
    if not log.exists():
        _begun(bench, shape, mode, name)
        ended = _disturbed(bench, shape, name, Point(mode=mode, who=who, k=0, do="count"), log)
        assert ended.code in (_STOPPED, _DONE), ended.output
        log.touch()
        bench.drop(name)
    calls = killpoints.read_calls(log)
    later = (n for n, (_, path) in enumerate(calls) if f"{DURING + SAVED:08d}" in path)
    return calls[: next(later, len(calls))]


def calls_of_a_save(bench: Bench, mode: str) -> list[tuple[str, str]]:
    """Return the calls that change the disk in one save of an ordinary run, in order, as (name, path)."""
    (who,) = ORDINARY.processes[mode]
    return calls_of(bench, ORDINARY, mode, who)


def points_of(bench: Bench, shape: Shape) -> list[Point]:
    """Return all crash points of a shape."""
    return [
        Point(mode=mode, who=who, k=k, do=do)
        for mode, processes in shape.processes.items()
        for who in processes
        for k in range(1, len(calls_of(bench, shape, mode, who)) + 1)
        for do in shape.faults
    ]


# -- a crash, and its judgment --


def crash(bench: Bench, verdicts: Verdicts, shape: Shape, point: Point) -> None:
    """Crash a run at a point, continue it by the same command, and judge."""
    calls, since = calls_of(bench, shape, point.mode, point.who), verdicts.findings
    call = calls[point.k - 1]
    name = f"crash-{shape.name}-{point.mode}-{point.do}-{point.who}-{point.k}".replace(" ", "-").replace(":", "-")
    process = point.who if shape.name else ""
    where = " ".join(filter(None, (shape.name, point.mode, process, point.do)))
    where += f" at {point.k}/{len(calls)} ({killpoints.place_of(call)})"
    folder = _begun(bench, shape, point.mode, name)
    judge = partial(verdicts.judge, "o6", where)
    ended = _disturbed(bench, shape, name, point)
    if shape.stays:
        between = [json.loads(line) for line in _between(bench, name).read_text().splitlines()]
        if len(between) != 1:
            judge(f"the ranks were started again {len(between)} times: {ended.output[-300:]}")
            return
        newest, torn = between[0]["step"], between[0]["torn"]
    else:
        if ended.code != -signal.SIGKILL:
            judge(f"the run was not killed (exit code {ended.code}): {ended.output[-300:]}")
            return
        left = gone_within(_END_SECONDS, lambda: marked_processes(folder.root))
        judge(f"processes {left} outlive their job" if left else "")
        newest, torn = newest_valid(folder)
        judge(torn)
        if shape.saves == WEIGHTS:
            newest_weights, torn = newest_valid(folder.weights)
            judge(torn)
        ended = bench.attempt(name, *settings_of(bench, shape, point.mode), ranks=shape.ranks)
    judge("" if ended.code == _DONE else f"exit code {ended.code}: {ended.output[-500:]}")
    judge(torn)
    start, memory = resumed_from(folder), _found(folder, events.SNAPSHOT_RESTORED)
    right = start >= newest if memory else start == newest
    judge("" if torn or right else f"continued from step {start}, the newest checkpoint is of step {newest}")
    damaged = [event["reason"] for event in _found(folder, events.RECORD_DAMAGED)]
    judge(f"records that are not those of the run: {damaged}" if damaged else "")
    refused = [event["reason"] for event in _found(folder, events.CHECKPOINT_REFUSED)]
    judge(f"refused: {refused}" if refused else "")
    outcome = f"step {start}" + (" from memory" if memory else "")
    if shape.saves == WEIGHTS:
        after, torn = newest_valid(folder.weights)
        judge(torn or ("" if after >= newest_weights else f"weights of step {newest_weights} are gone, newest {after}"))
        outcome = f"weights of step {newest_weights} whole; step {start}"
    faults = 2 if shape.stays else 1  # two: the save in flight is lost with the steps that were trained meanwhile
    judge_recovered(bench, verdicts, name, where, _reference(bench, shape), faults=faults)
    fault = ", ".join(filter(None, (point.do, shape.name, point.mode)))
    verdicts.came_of(fault, killpoints.place_of(call), outcome, since)
    bench.drop(name)


def _between(bench: Bench, name: str) -> Path:
    """Return the file with a line for each start of the ranks after the first (launcher.py)."""
    return bench.root / f"{name}.log.between"


def _reference(bench: Bench, shape: Shape):
    return bench.reference(*shape.numbers, ranks=shape.ranks)


def _found(folder: RunFolder, *kinds: str) -> list[dict]:
    return list(read_events(folder.events, *kinds))


def crash_points(bench: Bench, verdicts: Verdicts, numbers_of: dict[str, Iterable[int]], do: Iterable[str]) -> None:
    """Crash at the given calls of a save of an ordinary run. numbers_of: checkpoint.mode -> numbers of calls. do:
    "power", "kill"."""
    for mode, numbers in numbers_of.items():
        (who,) = ORDINARY.processes[mode]
        for k in numbers:
            for one in do:
                crash(bench, verdicts, ORDINARY, Point(mode=mode, who=who, k=k, do=one))


def crash_all(bench: Bench, verdicts: Verdicts, shape: Shape, points: Sequence[Point], at_once: int) -> None:
    """Crash at all of `points`, `at_once` at a time, each on a bench of its own."""
    shares = [points[number::at_once] for number in range(at_once)]

    def play(share: Sequence[Point]) -> Verdicts:
        own = Verdicts()
        with Bench() as another:
            for log in bench.root.glob("calls-*.txt"):  # the calls are those of any bench
                shutil.copy(log, another.root)
            for point in share:
                crash(another, own, shape, point)
        return own

    with ThreadPoolExecutor(at_once) as pool:
        for own in pool.map(play, filter(None, shares)):
            verdicts.asked += own.asked
            verdicts.outcomes += own.outcomes
            verdicts.redone = max(verdicts.redone, own.redone)
            for oracle, found in own.wrong.items():
                verdicts.wrong.setdefault(oracle, []).extend(found)


def row_of(id: str, injects: str, shape: Shape) -> Row:
    """Return the row that crashes runs of a shape: at five random points per seed, with `Bench.all_points` at all."""

    def play(bench: Bench, seed: int, verdicts: Verdicts) -> None:
        points = points_of(bench, shape)
        if bench.all_points:
            chosen = points
            crash_all(bench, verdicts, shape, points, bench.all_points)
        else:
            chosen = random_of(id, seed).sample(points, SAMPLE)
            for point in chosen:
                crash(bench, verdicts, shape, point)
        verdicts.numbers |= {"points": float(len(points)), "played": float(len(chosen))}
        if bench.all_points and shape.stays:
            kept = any("memory" in outcome for _, _, outcome in verdicts.outcomes)
            verdicts.judge("o6", "all points", "" if kept else "no run continued from memory")

    return Row(id, injects, play)
