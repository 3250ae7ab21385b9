"""One rank of the calibration: times the trainer's step on each shape and prints what rank 0 saw, as JSON.

Started by train/calibrate.py with the environment of a training job.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ingot.dist.collectives import any_rank
from ingot.dist.start import start, stop
from ingot.loader.loader import Batch
from ingot.schema.run import RunConfig
from ingot.telemetry.memory import peak_memory_bytes
from ingot.train.calibrate import shapes
from ingot.train.device_rates import measure_device, measure_gpu
from ingot.train.link_rates import measure_links
from ingot.train.parts import build_parts
from ingot.train.step import train_step

_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS = 3, 10, 4.0


def time_runs(runs: Sequence[RunConfig], device: torch.device) -> list[dict]:
    """Of each run, seconds of a typical step, and the peak memory of the process after its first ones. Collective.

    The runs take turns, a step each, and of all rounds the second fastest step of a run counts: a neighbour's burst on
    the machine must neither become a property of it, nor of the one run that it happened to meet. The first step is
    left out, because it sets up what later ones use.
    """
    steps, peaks = [], []
    for run in runs:
        steps.append(timed_step(run, device))
        steps[-1]()
        steps[-1]()
        peaks.append(peak_memory_bytes(device))
    seconds: list[list[float]] = [[] for _ in runs]
    began = time.monotonic()
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and any_rank(time.monotonic() - began > _SECONDS):
            break
        for step, taken in zip(steps, seconds, strict=True):
            taken.append(step())
    return [{"seconds": sorted(taken)[1], "peak_bytes": peak} for taken, peak in zip(seconds, peaks, strict=True)]


def timed_step(run: RunConfig, device: torch.device) -> Callable[[], float]:
    """Makes a step of `run` on all ranks at once, and returns its seconds. Making it is collective, too."""
    parts, batch = build_parts(run, device, Path()), random_batch(run, device)

    def step() -> float:
        dist.barrier()
        began = time.perf_counter()
        train_step(parts, batch, run.optim.lr)
        return time.perf_counter() - began

    return step


def random_batch(run: RunConfig, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    shape = (run.accumulation, run.train.micro_batch, run.train.seq_len + 1)
    tokens = torch.randint(0, run.model.vocab_size, shape, generator=generator).to(device)
    return Batch(1, np.zeros(shape[0] * shape[1], np.int64), tokens[..., :-1], tokens[..., 1:], None, 0.0)


def main() -> int:
    if "--cuda" in sys.argv:
        print(json.dumps(measure_gpu(torch.device("cuda", 0))))
        return 0
    place = start("cpu", timeout_seconds=60)
    timings = time_runs(shapes(place.world_size), place.device)
    dist.barrier()  # the limits, too, are of all ranks at once
    limits = measure_device(place.device, torch.bfloat16, width=1024, heads=4, seq_len=512)
    limits |= measure_links(place.device)
    if place.is_first:
        print(json.dumps({"timings": timings, "limits": limits}))
    stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
