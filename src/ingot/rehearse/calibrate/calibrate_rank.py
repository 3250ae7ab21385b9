"""One rank of the calibration: times the trainer's step on each shape and prints what rank 0 saw, as JSON.

Started by train/calibrate.py with the environment of a training job.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from ingot.rehearse.calibrate.calibrate import shapes
from ingot.rehearse.calibrate.device_rates import measure_device, measure_gpu
from ingot.rehearse.calibrate.link_rates import measure_links
from ingot.schema.run import RunConfig
from ingot.trainer.loader.loader import Batch
from ingot.trainer.mesh.collectives import any_rank
from ingot.trainer.mesh.start import start, stop
from ingot.trainer.parts import build_parts
from ingot.trainer.step import train_step
from ingot.trainer.telemetry.memory import peak_memory_bytes
from ingot.trainer.telemetry.waits import ThreadTime

# Seconds of measuring: on a quiet machine, and on one where ranks wait for cores for more than a twentieth of the time.
_QUIET_SECONDS, _BUSY_SECONDS, _BUSY = 3.0, 10.0, 0.05
_LEAST_ROUNDS = 4
Turn = tuple[float, float]  # seconds, and the share of them in which a rank was ready to run but had no core


def first_steps(runs: Sequence[RunConfig], device: torch.device) -> tuple[list[Callable[[], Turn]], list[int]]:
    """Steps of each run, of which the first was made, because it sets up what later ones use; and the peak memory of
    the process after it. Collective."""
    steps, peaks = [], []
    for run in runs:
        steps.append(timed_step(run, device))
        steps[-1]()
        peaks.append(peak_memory_bytes(device))
    return steps, peaks


def take_turns(steps: Sequence[Callable[[], Turn]]) -> list[float]:
    """Seconds of a typical step of each run. Collective.

    The runs take turns, a step each: a neighbour's burst on the machine must neither become a property of it, nor of
    the one run that it happened to meet.
    """
    turns: list[list[Turn]] = [[] for _ in steps]
    began, rounds, busy = time.monotonic(), 0, False
    while rounds < _LEAST_ROUNDS or not any_rank(
        time.monotonic() - began > (_BUSY_SECONDS if busy else _QUIET_SECONDS)
    ):
        for step, taken in zip(steps, turns, strict=True):
            taken.append(step())
        rounds += 1
        busy = any(quieter_half(taken)[0][1] > _BUSY for taken in turns)
    return [median(seconds for seconds, _ in quieter_half(taken)) for taken in turns]


def quieter_half(turns: Sequence[Turn]) -> list[Turn]:
    """Those in which ranks waited least for cores, the quietest first."""
    return sorted(turns, key=lambda turn: turn[1])[: -(-len(turns) // 2)]


def timed_step(run: RunConfig, device: torch.device) -> Callable[[], Turn]:
    """Makes a step of `run` on all ranks at once. Making it is collective, too."""
    parts, batch = build_parts(run, device, Path()), random_batch(run, device)

    def step() -> Turn:
        dist.barrier()
        began = ThreadTime.now()
        train_step(parts, batch, run.optim.lr)
        passed = ThreadTime.now().since(began)
        queued = torch.tensor(passed.queued / passed.wall)
        dist.all_reduce(queued, op=dist.ReduceOp.MAX)
        return passed.wall, float(queued)

    return step


def random_batch(run: RunConfig, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    shape = (run.accumulation, run.train.micro_batch, run.train.seq_len + 1)
    tokens = torch.randint(0, run.model.vocab_size, shape, generator=generator).to(device)
    return Batch(1, np.zeros(shape[0] * shape[1], np.int64), tokens[..., :-1], tokens[..., 1:], None, 0.0)


def measure_limits(device: torch.device) -> dict[str, float]:
    """Rates of this machine by themselves, all ranks at once. Collective."""
    dist.barrier()
    rates = measure_device(device, torch.bfloat16, width=1024, heads=4, seq_len=512)
    return rates | measure_links(device)


def fastest(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each rate the best. A limit that was measured while other programs ran would hold the rates of steps, made
    before or after, to what the machine never had to keep to."""
    return {name: (min if name.endswith("seconds") else max)(rates[name] for rates in measured) for name in measured[0]}


def main() -> int:
    if "--cuda" in sys.argv:
        print(json.dumps(measure_gpu(torch.device("cuda", 0))))
        return 0
    place = start("cpu", timeout_seconds=60)
    steps, peaks = first_steps(shapes(place.world_size), place.device)
    found = [measure_limits(place.device)]
    seconds = take_turns(steps)
    found += [measure_limits(place.device) for _ in range(2)]
    if place.is_first:
        timings = [{"seconds": s, "peak_bytes": p} for s, p in zip(seconds, peaks, strict=True)]
        print(json.dumps({"timings": timings, "limits": fastest(found)}))
    stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
