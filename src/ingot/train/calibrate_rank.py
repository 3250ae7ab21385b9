"""One rank of the calibration: times the trainer's step on each shape and prints what rank 0 saw, as JSON.

Started by train/calibrate.py with the environment of a training job.
"""

import json
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

from ingot.dist.mesh import build_mesh
from ingot.dist.start import start, stop
from ingot.loader.loader import Batch
from ingot.optim.adamw import build_adamw
from ingot.schema.run import RunConfig
from ingot.telemetry.memory import peak_memory_bytes
from ingot.train.build import build_model
from ingot.train.calibrate import shapes
from ingot.train.device_rates import measure_gpu
from ingot.train.step import train_step

_STEPS = 4


def time_run(run: RunConfig, device: torch.device) -> dict:
    """Seconds of a typical step and the peak memory of the process. Collective.

    The second fastest of four: a neighbour's burst on the machine must not become a property of it.
    """
    model = build_model(run, build_mesh(run.parallel, device.type), device)
    optimizer = build_adamw(model, run.optim)
    batch = random_batch(run, device)
    seconds = []
    for _ in range(1 + _STEPS):
        dist.barrier()
        began = time.perf_counter()
        train_step(model, optimizer, batch, run.optim.lr, run.optim.clip_norm)
        seconds.append(time.perf_counter() - began)
    return {"seconds": sorted(seconds[1:])[1], "peak_bytes": peak_memory_bytes(device)}


def random_batch(run: RunConfig, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    shape = (run.accumulation, run.train.micro_batch, run.train.seq_len + 1)
    tokens = torch.randint(0, run.model.vocab_size, shape, generator=generator).to(device)
    return Batch(1, np.zeros(shape[0] * shape[1], np.int64), tokens[..., :-1], tokens[..., 1:], None, 0.0)


def main() -> int:
    if "--cuda" in sys.argv:
        print(json.dumps([measure_gpu(torch.device("cuda", 0))]))
        return 0
    place = start("cpu", timeout_seconds=60)
    answer = [time_run(run, place.device) for run in shapes(place.world_size)]
    if place.is_first:
        print(json.dumps(answer))
    stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
