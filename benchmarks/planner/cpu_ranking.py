"""Compare the planner's order of layouts with the measured one: a small model on two CPU ranks, layout after layout.

The shapes of `doctor --bench` calibrate the machine, and the planner predicts a step of each layout from their timings
alone. Layouts and shapes are all kept alive and take turns, some steps each, so that other programs disturb all alike;
of the turns the quieter half counts, in which ranks waited least for a core that other programs had. The figure is
Kendall's tau between the predicted and the measured order, over pairs that the measurement itself distinguishes:
medians that differ by more than the noise, the larger of the two interquartile ranges.

    python benchmarks/planner/cpu_ranking.py [--rounds 14] [--steps 3]
"""

import argparse
import json
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
CALIBRATION = "calibration"


def layouts() -> dict:
    """The same model and global batch, cut in different ways: name -> RunConfig."""
    from ingot.planner.request.presets import load_model
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
    """One rank of a layout: warm up, then as many steps as each line of stdin says. Answers with seconds per step, and
    the share of them in which a rank was ready to run but had no core. Rank by rank alike."""
    from ingot.rehearse.calibrate.rank import timed_step
    from ingot.trainer.mesh.start import start

    place, run = start("cpu", 600), layouts()[name]
    step = timed_step(run, place.device)
    for _ in range(WARM_UP_STEPS):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, queued = zip(*(step() for _ in range(int(line))), strict=True)
        print(json.dumps([[statistics.mean(seconds), statistics.mean(queued)]]), flush=True)


def calibrate() -> None:
    """One rank of the calibration: every line of stdin is a step of each shape. The last answer is what the devices
    reach alone, and the peak memory after each shape's first step."""
    import torch

    from ingot.rehearse.calibrate.calibrate import shapes
    from ingot.rehearse.calibrate.rank import measure_device, measure_links, timed_step
    from ingot.trainer.mesh.start import start
    from ingot.trainer.telemetry.usage import peak_memory_bytes

    place, steps, peaks = start("cpu", 600), [], []
    for run in shapes(RANKS):
        steps.append(timed_step(run, place.device))
        steps[-1]()
        peaks.append(peak_memory_bytes(place.device))
    print("ready", flush=True)
    for line in sys.stdin:
        if int(line):
            print(json.dumps([step() for step in steps]), flush=True)
        else:
            limits = measure_device(place.device, torch.bfloat16, width=1024, heads=4, seq_len=512)
            print(json.dumps({"limits": limits | measure_links(place.device), "peaks": peaks}), flush=True)


class Job:
    """The processes of one layout, or of the calibration; `go` runs some steps on all of them at once."""

    def __init__(self, name: str):
        from ingot.trainer.mesh.start import worker_environment

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

    def go(self, steps: int):
        """Return the answer of the first rank: all ranks time the same step."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for process in self.processes if process.stdout]
        return answers[0]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def measure(names: list[str], rounds: int, steps: int) -> tuple[dict[str, list], dict]:
    """Return the turns by layout, and by number for the shapes of the calibration; and the rates of devices alone."""
    jobs: dict[str, Job] = {}
    turns: dict[str, list] = {}
    try:
        for name in (CALIBRATION, *names):
            jobs[name] = Job(name)
        for _ in range(rounds):
            for name, job in jobs.items():
                for number, turn in enumerate(job.go(steps)):
                    turns.setdefault(f"{name} {number}" if name == CALIBRATION else name, []).append(turn)
        alone = jobs[CALIBRATION].go(0)
    finally:
        for job in jobs.values():
            job.end()
    return turns, alone


def fitted(turns: dict[str, list[float]], alone: dict):
    """The machine, as `doctor --bench` describes it."""
    from ingot.machine.facts import read_machine, this_cluster
    from ingot.rehearse.calibrate.calibrate import Timing, fit, shapes

    timings = [
        Timing(run, statistics.median(turns[f"{CALIBRATION} {number}"]), peak)
        for number, (run, peak) in enumerate(zip(shapes(RANKS), alone["peaks"], strict=True))
    ]
    return fit(timings, alone["limits"], this_cluster(read_machine(), RANKS))


def noise(turns: list[float]) -> float:
    low, _, high = statistics.quantiles(turns, n=4)
    return high - low


def compare(predicted: dict[str, float], turns: dict[str, list[float]]) -> dict:
    """Return Kendall's tau over the pairs that the noise does not hide, and the pairs that it hides."""
    middle = {name: statistics.median(own) for name, own in turns.items()}
    agree, differ, ties = 0, [], []
    for a, b in combinations(predicted, 2):
        if abs(middle[a] - middle[b]) <= max(noise(turns[a]), noise(turns[b])):
            ties.append([a, b])
        elif (middle[a] - middle[b]) * (predicted[a] - predicted[b]) > 0:
            agree += 1
        else:
            differ.append([a, b])
    pairs = agree + len(differ)
    return {"tau": (agree - len(differ)) / pairs if pairs else None, "pairs": pairs, "wrong": differ, "ties": ties}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=14, help="turns of each layout (default: 14)")
    parser.add_argument("--steps", type=int, default=3, help="steps per turn (default: 3)")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        calibrate() if args.role == CALIBRATION else obey(args.role)
        return
    from record import record

    from ingot.config import to_dict
    from ingot.planner.predict.time.step_time import step_seconds
    from ingot.rehearse.calibrate.rank import quieter_half

    runs = layouts()
    everything, alone = measure(list(runs), args.rounds, args.steps)
    turns = {name: [seconds for seconds, _ in quieter_half(own)] for name, own in everything.items()}
    cluster = fitted(turns, alone)
    parts = {name: {k: t.value for k, t in (step_seconds(run, cluster) or {}).items()} for name, run in runs.items()}
    predicted = {name: sum(own.values()) for name, own in parts.items()}
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
