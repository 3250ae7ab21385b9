"""The cost of the supervisor and of heartbeats: processor time of a run's processes, and microseconds per heartbeat.

    python benchmarks/watchdog.py [STEPS]

Trains the run of the board (two ranks) for STEPS steps, default 1,500, and reads from the kernel what supervisor and
ranks used between two log lines. Then alternates sums over two ranks with and without torch's flight recorder.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import record
from tests.board.bench import Bench, options
from tests.proof.ranks import Ranks

from ingot.events import read_events
from ingot.schema import events
from ingot.trainer.resilience.heartbeat import Phase, open_heartbeat

_TICK = os.sysconf("SC_CLK_TCK")
_SUMS, _ROUNDS = 2000, 6


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
    with Bench() as bench:
        supervisor, ranks, seconds, done = _run(bench, steps)
    beat = _heartbeat()
    with Ranks() as forked:
        times = {size: [] for size in ("0", "512")}
        for _ in range(_ROUNDS):
            for size, found in times.items():
                os.environ["TORCH_FR_BUFFER_SIZE"] = size
                found.append(forked.run(_sums, 2)[0])
    ratios = [on / off for off, on in zip(times["0"], times["512"], strict=True)]
    found = {
        "load": round(os.getloadavg()[0], 1),
        "seconds": round(seconds, 1),
        "steps": done,
        "supervisor_cpu_seconds": round(supervisor, 2),
        "ranks_cpu_seconds": round(ranks, 2),
        "supervisor_share_of_cpu": round(supervisor / (supervisor + ranks), 5),
        "supervisor_share_of_a_core": round(supervisor / seconds, 5),
        "heartbeat_microseconds": round(beat * 1e6, 2),
        "heartbeats_share_of_a_step": round(4 * beat / (seconds / done), 6),
        "flight_recorder_ratio": round(statistics.median(ratios), 3),
        "flight_recorder_ratios": [round(ratio, 3) for ratio in ratios],
    }
    print(json.dumps(found, indent=1))
    print(record("watchdog", found, packages=["torch"]))


def _run(bench: Bench, steps: int) -> tuple[float, float, float, int]:
    """Train, and return the processor seconds of supervisor and ranks, and the seconds and steps in between."""
    folder = bench.folder("run")
    process = bench.start("run", *options([f"train.steps={steps}", "checkpoint.every_steps=100", "watch.log_every=50"]))
    bench.wait_for_step("run", 50, process)
    pids = [event["pid"] for event in read_events(folder.events, events.RANK_STARTED)]
    before, began, first = (_cpu([process.pid]), _cpu(pids)), time.monotonic(), _step(folder)
    bench.wait_for_step("run", steps - 60, process)
    after, seconds, last = (_cpu([process.pid]), _cpu(pids)), time.monotonic() - began, _step(folder)
    bench.ended(process)
    return after[0] - before[0], after[1] - before[1], seconds, last - first


def _step(folder) -> int:
    return max(event["step"] for event in read_events(folder.events, events.PROGRESS))


def _cpu(pids: list[int]) -> float:
    """Return the processor seconds of processes so far."""
    found = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(words[11]) + int(words[12]) for words in found) / _TICK


def _heartbeat() -> float:
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
