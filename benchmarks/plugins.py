"""The cost of the seams in a training step: CPU seconds of the code that plug-ins added, as a share of a whole step.

The added code of a step is measured alone: the calls of callbacks (none, and one that does nothing), and the choice of
the learning rate through the registry. A step is that of the smallest model of the calibration, on one process. Both
are CPU time of one thread, in alternating rounds; the interval is the 5th to the 95th percentile of the ratios.

    python benchmarks/plugins.py
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record import record

from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback
from ingot.rehearse.calibrate.calibrate import shapes
from ingot.rehearse.calibrate.rank import random_batch
from ingot.theory.params import count_parameters
from ingot.trainer.build import build_parts
from ingot.trainer.mesh.start import start
from ingot.trainer.optim.schedule import learning_rate
from ingot.trainer.step import train_step

ROUNDS, CALLS = 20, 2000


def cpu_seconds(call: Callable[[], object], times: int) -> float:
    """Return the CPU seconds of one call, the mean of `times`."""
    began = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - began) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.set_num_threads(1)
    CALLBACKS.register(CallbackPart(name="idle", make=StepCallback))
    run = min(shapes(1), key=lambda shape: count_parameters(shape.model) * shape.tokens_per_step)
    place = start("cpu", 60.0)
    results = {}
    for name, callbacks in (("no callback", {}), ("one idle callback", {"idle": {}})):
        object.__setattr__(run, "callbacks", callbacks)
        parts, batch = build_parts(run, place.device, Path()), random_batch(run, place.device)
        rate = learning_rate(run.train.steps, run.optim.lr, run.schedule)
        train_step(parts, batch, rate(1))

        def added(parts=parts, rate=rate) -> None:
            parts.callbacks.gradients(2)
            parts.callbacks.updated(2)
            rate(2)

        ratios, steps, codes = [], [], []
        for _ in range(ROUNDS):
            codes.append(cpu_seconds(added, CALLS))
            steps.append(cpu_seconds(lambda parts=parts, batch=batch: train_step(parts, batch, 1e-3), 3))
            ratios.append(codes[-1] / steps[-1])
        ratios.sort()
        low, high = ratios[ROUNDS // 20], ratios[-1 - ROUNDS // 20]
        results[name] = {
            "step_seconds": statistics.median(steps),
            "added_seconds": statistics.median(codes),
            "share": statistics.median(ratios),
            "interval": [low, high],
        }
        added_us, step_ms = results[name]["added_seconds"] * 1e6, results[name]["step_seconds"] * 1e3
        share = f"{results[name]['share']:.4%} ({low:.4%} to {high:.4%})"
        print(f"{name}: {added_us:.2f} us of {step_ms:.1f} ms a step: {share}")
    record("plugins", results, ["torch"])


if __name__ == "__main__":
    main()
