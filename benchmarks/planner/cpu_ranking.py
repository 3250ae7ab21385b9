"""Is the planner's order of layouts the real one? A small model on two CPU ranks, one layout after the other.

`doctor --bench`'s calibration measures the machine; the planner predicts a step of each layout from that alone; then
every layout trains, all of them kept alive and taking turns, some steps each. Of the turns the quieter half counts, in
which ranks waited least for a core that other programs had. The figure is Kendall's tau between the predicted and the
measured order, over pairs that the measurement itself can tell apart: medians that differ by more than the noise, the
larger of the two interquartile ranges.

    python benchmarks/planner/cpu_ranking.py [--rounds 14] [--steps 3] [--machine machine.json]
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

RANKS, BATCH, SEQ_LEN, WARM_UP_STEPS = 2, 16, 256, 2


def layouts() -> dict:
    """The same model and global batch, cut in different ways: name -> RunConfig."""
    from ingot.recipes.load import load_model
    from ingot.schema.parallel import Parallel
    from ingot.schema.run import Data, RunConfig, Train

    arch = replace(load_model("tiny").arch, num_layers=4)

    def run(micro_batch: int, **parallel) -> RunConfig:
        train = Train(steps=1, seq_len=SEQ_LEN, global_batch=BATCH, micro_batch=micro_batch)
        return RunConfig(name="ranking", model=arch, data=Data(tokens=""), train=train, parallel=Parallel(**parallel))

    return {
        "ddp": run(8, dp_replicate=2),
        "zero 1, micro-batch 1": run(1, dp_shard=2, zero=1),
        "zero 1, recompute": run(8, dp_shard=2, zero=1, recompute="full"),
        "zero 3, micro-batch 1": run(1, dp_shard=2, zero=3, unit_layers=1),
        "tp 2": run(8, tp=2),
        "tp 2, micro-batch 1": run(1, tp=2),
        "pp 2, 8 micro-batches": run(2, pp=2),
        "pp 2, 1 micro-batch": run(16, pp=2),
    }


def obey(name: str) -> None:
    """One rank of a layout: warm up, then as many steps as each line of stdin says.

    Answers with seconds per step, and the share of them in which it was ready to run but had no core.
    """
    import torch.distributed as dist

    from ingot.dist.start import start
    from ingot.telemetry.waits import ThreadTime
    from ingot.train.calibrate_rank import random_batch
    from ingot.train.parts import build_parts
    from ingot.train.step import train_step

    place, run = start("cpu", 600), layouts()[name]
    parts, batch = build_parts(run, place.device, Path()), random_batch(run, place.device)
    for _ in range(WARM_UP_STEPS):
        train_step(parts, batch, run.optim.lr)
    print("ready", flush=True)
    for line in sys.stdin:
        count = int(line)
        dist.barrier()
        began = ThreadTime.now()
        for _ in range(count):
            train_step(parts, batch, run.optim.lr)
        passed = ThreadTime.now().since(began)
        print(passed.wall / count, passed.queued / passed.wall, flush=True)


class Job:
    """The processes of one layout; `go` runs some steps on all of them at once."""

    def __init__(self, name: str):
        from ingot.dist.start import worker_environment

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        job |= {"LOCAL_WORLD_SIZE": str(RANKS)} | worker_environment(RANKS, cores=2)
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--role", name],
                env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        for process in self.processes:
            if process.stdout is None or process.stdout.readline().strip() != "ready":
                raise SystemExit(f"{name} did not start; its error is above")

    def go(self, steps: int) -> tuple[float, float]:
        """Of the slowest rank, seconds per step; of the one that waited most for a core, the share of it."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = [map(float, process.stdout.readline().split()) for process in self.processes if process.stdout]
        seconds, queued = zip(*answers, strict=True)
        return max(seconds), max(queued)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def measure(names: list[str], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of the quieter half of the turns."""
    jobs: dict[str, Job] = {}
    try:
        for name in names:
            jobs[name] = Job(name)
        turns: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, job in jobs.items():
                turns[name].append(job.go(steps))
    finally:
        for job in jobs.values():
            job.end()
    quieter = {name: sorted(own, key=lambda turn: turn[1])[: -(-rounds // 2)] for name, own in turns.items()}
    return {name: [seconds for seconds, _ in own] for name, own in quieter.items()}


def noise(turns: list[float]) -> float:
    low, _, high = statistics.quantiles(turns, n=4)
    return high - low


def compare(predicted: dict[str, float], turns: dict[str, list[float]]) -> dict:
    """Kendall's tau over the pairs that can be told apart, and those that cannot."""
    middle = {name: statistics.median(own) for name, own in turns.items()}
    agree, differ, ties = 0, [], []
    for a, b in combinations(predicted, 2):
        if abs(middle[a] - middle[b]) <= max(noise(turns[a]), noise(turns[b])):
            ties.append([a, b])
        elif (middle[a] - middle[b]) * (predicted[a] - predicted[b]) > 0:
            agree += 1
        else:
            differ.append([a, b])
    told = agree + len(differ)
    return {"tau": (agree - len(differ)) / told if told else None, "pairs": told, "wrong": differ, "ties": ties}


def calibrated(path: Path | None):
    from ingot.machine.cluster_file import read_cluster
    from ingot.machine.facts import read_machine, this_cluster
    from ingot.train.calibrate import calibrate_cpu

    return read_cluster(path) if path else calibrate_cpu(this_cluster(read_machine(), RANKS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=14, help="turns of each layout (default: 14)")
    parser.add_argument("--steps", type=int, default=3, help="steps per turn (default: 3)")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="a machine.json (default: calibrate now)")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        obey(args.role)
        return
    from record import record

    from ingot.config import to_dict
    from ingot.planner.step_time import step_seconds

    cluster, runs = calibrated(args.machine), layouts()
    parts = {name: {k: t.value for k, t in (step_seconds(run, cluster) or {}).items()} for name, run in runs.items()}
    predicted = {name: sum(own.values()) for name, own in parts.items()}
    turns = measure(list(runs), args.rounds, args.steps)
    found = compare(predicted, turns)
    order = sorted(runs, key=lambda name: statistics.median(turns[name]))
    rows = {
        name: {
            "predicted_seconds": predicted[name],
            "measured_seconds": statistics.median(turns[name]),
            "noise_seconds": noise(turns[name]),
            "error": predicted[name] / statistics.median(turns[name]) - 1,
            "parts": parts[name],
        }
        for name in order
    }
    for name, row in rows.items():
        shown = f"{row['measured_seconds'] * 1e3:7.1f} ms ± {row['noise_seconds'] * 1e3:5.1f}"
        print(f"{name:24} {shown}   planned {row['predicted_seconds'] * 1e3:7.1f} ms ({row['error']:+.0%})")
    print(f"tau {found['tau']} over {found['pairs']} pairs; {len(found['ties'])} ties; wrong: {found['wrong']}")
    print(record("planner_cpu_ranking", {"layouts": rows, **found, "cluster": to_dict(cluster)}, ("torch", "numpy")))


if __name__ == "__main__":
    main()
