"""One rank of the calibration: times the trainer's step on each shape and prints what rank 0 saw, as JSON.

Started by train/calibrate.py with the environment of a training job.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ingot.dist.start import start, stop
from ingot.loader.loader import Batch
from ingot.schema.run import RunConfig
from ingot.telemetry.memory import peak_memory_bytes
from ingot.train.calibrate import shapes
from ingot.train.device_rates import measure_device, measure_gpu
from ingot.train.parts import build_parts
from ingot.train.step import train_step

_MOST_STEPS, _SECONDS_PER_SHAPE = 4, 0.5


def time_run(run: RunConfig, device: torch.device) -> dict:
    """Seconds of a typical step and the peak memory of the process. Collective.

    The second fastest of up to four: a neighbour's burst on the machine must not become a property of it. The first
    step is left out, because it sets up what later ones use.
    """
    parts, batch = build_parts(run, device, Path()), random_batch(run, device)

    def step() -> float:
        dist.barrier()
        began = time.perf_counter()
        train_step(parts, batch, run.optim.lr)
        return time.perf_counter() - began

    step()
    seconds = [step()]
    # Every rank has to make as many steps as the first one finds time for.
    more = torch.tensor(min(int(_SECONDS_PER_SHAPE / seconds[0]), _MOST_STEPS - 1))
    dist.broadcast(more, src=0)
    seconds += [step() for _ in range(int(more))]
    return {"seconds": sorted(seconds)[:2][-1], "peak_bytes": peak_memory_bytes(device)}


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
    timings = [time_run(run, place.device) for run in shapes(place.world_size)]
    dist.barrier()  # the limits, too, are of all ranks at once
    limits = measure_device(place.device, torch.bfloat16, width=1024, heads=4, seq_len=512)
    if place.is_first:
        print(json.dumps({"timings": timings, "limits": limits}))
    stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
