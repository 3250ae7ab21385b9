"""The cost of supervisors and of heartbeats: processor time of a run's processes, and microseconds per heartbeat.

    python benchmarks/watchdog.py [STEPS [RUNS]]

Trains the run of the board (two ranks) for STEPS steps, default 1,500: RUNS times, default 5, with one launcher, and as
often with two, a leader and a follower with one rank each. Reads from the kernel, in nanoseconds, what each launcher
with its fork server, and its ranks, used between two log lines. Then alternates sums over two ranks with and without
torch's flight recorder.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import record
from tests.board.bench import Bench, options
from tests.board.rows_launchers import Launchers
from tests.proof.ranks import Ranks

from ingot.events import read_events
from ingot.machine.processes import parent_of
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.trainer.resilience.heartbeat import Phase, open_heartbeat

_RANKS = 2
_BEATS = 4  # of a rank in a step
_SCHEDULED = 2  # CPUCLOCK_SCHED of linux/posix-timers_types.h: the clock of a whole process
_SETTINGS = ("checkpoint.every_steps=100", "watch.log_every=50")
_SUMS, _ROUNDS = 2000, 6


@dataclass(frozen=True)
class _Run:
    """A run between two log lines. seconds: on the clock. supervisors: processor seconds of each launcher with its fork
    server, the leader's first. ranks: of the ranks of each launcher."""

    steps: int
    seconds: float
    supervisors: list[float]
    ranks: list[float]


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with Bench() as bench:
        alone = [_alone(bench, f"alone-{number}", steps) for number in range(count)]
        nodes = [_on_two_nodes(bench, f"nodes-{number}", steps) for number in range(count)]
    beat = heartbeat_seconds()
    with Ranks() as forked:
        times = {size: [] for size in ("0", "512")}
        for _ in range(_ROUNDS):
            for size, found in times.items():
                os.environ["TORCH_FR_BUFFER_SIZE"] = size
                found.append(forked.run(_sums, 2)[0])
    ratios = [on / off for off, on in zip(times["0"], times["512"], strict=True)]
    found = {
        "load": round(os.getloadavg()[0], 1),
        "heartbeat_microseconds": round(beat * 1e6, 2),
        "one_launcher": _facts(alone, beat),
        "leader_and_follower": _facts(nodes, beat),
        "flight_recorder_ratio": round(statistics.median(ratios), 3),
        "flight_recorder_ratios": [round(ratio, 3) for ratio in ratios],
    }
    print(json.dumps(found, indent=1))
    print(record("watchdog", found, packages=["torch"]))


def _facts(runs: Sequence[_Run], beat: float) -> dict[str, object]:
    """Return the shares of a step's processor time, each as its median over the runs, and the numbers of each run.
    beat: the seconds of a heartbeat, which are a part of the ranks' time."""
    of_nodes = [[own / (own + ranks) for own, ranks in zip(run.supervisors, run.ranks, strict=True)] for run in runs]
    supervisors = [sum(run.supervisors) / (sum(run.supervisors) + sum(run.ranks)) for run in runs]
    beats = [_BEATS * beat * _RANKS * run.steps / (sum(run.supervisors) + sum(run.ranks)) for run in runs]
    both = [own + ours for own, ours in zip(supervisors, beats, strict=True)]
    return {
        "supervisors_share": round(statistics.median(supervisors), 6),
        "supervisor_share_of_each_node": [round(statistics.median(one), 6) for one in zip(*of_nodes, strict=True)],
        "heartbeats_share": round(statistics.median(beats), 6),
        "supervisors_and_heartbeats_share": round(statistics.median(both), 6),
        "supervisors_and_heartbeats_shares": [round(one, 6) for one in both],
        "supervisor_cpu_seconds": [[round(one, 4) for one in run.supervisors] for run in runs],
        "ranks_cpu_seconds": [[round(one, 2) for one in run.ranks] for run in runs],
        "seconds": [round(run.seconds, 1) for run in runs],
        "steps": [run.steps for run in runs],
    }


def _alone(bench: Bench, name: str, steps: int) -> _Run:
    """Train with one launcher."""
    process = bench.start(name, *options([f"train.steps={steps}", *_SETTINGS]))
    found = _watched(bench, name, steps, [process])
    if (ended := bench.ended(process)).code:
        raise RuntimeError(f"{name} ended with code {ended.code}: {ended.output[-300:]}")
    return found


def _on_two_nodes(bench: Bench, name: str, steps: int) -> _Run:
    """Train with a leader and a follower."""
    with Launchers(bench, name, (f"train.steps={steps}", *_SETTINGS, "launch.nodes=2")) as nodes:
        nodes.start(2)
        found = _watched(bench, name, steps, nodes.started)
        if any(codes := nodes.ends(without=-1)):
            raise RuntimeError(f"{name} ended with codes {codes}")
    return found


def _watched(bench: Bench, name: str, steps: int, launchers: Sequence[subprocess.Popen]) -> _Run:
    """Look at the processes of a run at a log line soon after its start, and at one shortly before its end."""
    folder = bench.folder(name)
    _wait_for_line(folder, 50, launchers[0])
    ranks = [event["pid"] for event in read_events(folder.events, events.RANK_STARTED)]
    servers = {parent_of(rank) for rank in ranks}
    of_node = [{one for one in servers if parent_of(one) == launcher.pid} for launcher in launchers]
    if len(ranks) != _RANKS or set().union(*of_node) != servers:
        raise RuntimeError(f"{name}: the fork servers {servers} of the ranks {ranks} are not those of its launchers")
    supervisors = [[launcher.pid, *own] for launcher, own in zip(launchers, of_node, strict=True)]
    trained = [[rank for rank in ranks if parent_of(rank) in own] for own in of_node]

    def look() -> tuple[int, float, list[float], list[float]]:
        return (
            _last_line(folder),
            time.monotonic(),
            [_cpu(pids) for pids in supervisors],
            [_cpu(pids) for pids in trained],
        )

    first = look()
    _wait_for_line(folder, steps - 150, launchers[0])
    last = look()
    return _Run(
        steps=last[0] - first[0],
        seconds=last[1] - first[1],
        supervisors=[after - before for before, after in zip(first[2], last[2], strict=True)],
        ranks=[after - before for before, after in zip(first[3], last[3], strict=True)],
    )


def _wait_for_line(folder: RunFolder, step: int, launcher: subprocess.Popen) -> None:
    """Wait for a log line of `step` or later. Looks seldom: a reader of the log takes its time from the ranks."""
    while _last_line(folder) < step:
        if launcher.poll() is not None:
            raise RuntimeError(f"{folder.root.name} ended before step {step}")
        time.sleep(0.25)


def _last_line(folder: RunFolder) -> int:
    return max((event["step"] for event in read_events(folder.events, events.PROGRESS)), default=0)


def _cpu(pids: Sequence[int]) -> float:
    """Return the processor seconds of processes so far, of all their threads. The files of /proc have ticks of 10 ms,
    or nothing of threads that have ended; this clock of a process (clock_getcpuclockid(3)) counts nanoseconds."""
    return sum(time.clock_gettime_ns(~pid << 3 | _SCHEDULED) for pid in pids) / 1e9


def heartbeat_seconds() -> float:
    """Return the seconds of a heartbeat."""
    heart, count = open_heartbeat(), 200_000
    began = time.perf_counter()
    for step in range(count):
        heart.enter(Phase.STEP, step)
    return (time.perf_counter() - began) / count


def _sums(folder: Path) -> float:
    import torch
    import torch.distributed as dist

    x = torch.ones(64)
    for _ in range(100):
        dist.all_reduce(x)
    began = time.perf_counter()
    for _ in range(_SUMS):
        dist.all_reduce(x)
    return (time.perf_counter() - began) / _SUMS


if __name__ == "__main__":
    main()
