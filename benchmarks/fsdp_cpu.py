"""Two data-parallel ranks against a plain single-process loop on two threads, on CPU: the quickstart's model, bf16.

The plain loop does the same arithmetic without sharding: float32 masters, a bf16 copy that computes, float32 gradients,
the same clipping and AdamW, the same batch, allocator settings and number of cores. The processes of both sides run
during the whole benchmark and take turns, a few steps each. The figure is the ratio of median wall-clock seconds per
step; the target is 85 %. CPU seconds per step are the sum over all processes of a side, at any depth.

    python benchmarks/fsdp_cpu.py [--rounds 15] [--steps 4]
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from record import record, running_cpu_seconds

WARM_UP_STEPS = 3


def quickstart_run(ranks: int):
    """The quickstart's model and batch on `ranks` processes, without accumulation."""
    from ingot.planner.request.presets import load_model
    from ingot.schema.parallel import Parallel
    from ingot.schema.run import Data, RunConfig, Train

    preset = load_model("tiny")
    batch, seq_len = preset.train.global_batch or 16, preset.train.seq_len or 256
    return RunConfig(
        name="benchmark",
        model=preset.arch,
        data=Data(tokens=""),
        train=Train(steps=1, seq_len=seq_len, global_batch=batch, micro_batch=batch // ranks),
        parallel=Parallel(dp_shard=ranks),
    )


def batch_of(run, rank: int):
    """This rank's part of one random batch: inputs and targets, [B, T] each."""
    import torch

    train, generator = run.train, torch.Generator().manual_seed(0)
    ids = torch.randint(0, run.model.vocab_size, (train.global_batch, train.seq_len + 1), generator=generator)
    part = ids[rank * train.micro_batch : (rank + 1) * train.micro_batch]
    return part[:, :-1].contiguous(), part[:, 1:].contiguous()


def sharded_step() -> Callable[[], float]:
    """One step of ingot's trainer on this rank; returns its loss."""
    from pathlib import Path

    import numpy as np

    from ingot.trainer.build import build_parts
    from ingot.trainer.loader.loader import Batch
    from ingot.trainer.mesh.start import start
    from ingot.trainer.step import train_step

    place = start("cpu", 120)
    run = quickstart_run(place.world_size)
    parts = build_parts(run, place.device, Path())
    inputs, targets = batch_of(run, place.rank)
    batch = Batch(1, np.zeros(0, np.int64), inputs[None], targets[None], None, 0.0)
    return lambda: train_step(parts, batch, run.optim.lr).loss.item()


def plain_step() -> Callable[[], float]:
    """One step of a loop without ingot's parallel, step or clip modules; returns its loss."""
    import torch

    from ingot.trainer.model.init import initialize
    from ingot.trainer.model.transformer import Transformer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    run = quickstart_run(1)
    masters, model = Transformer(run.model), Transformer(run.model).bfloat16()
    initialize(masters, run.model, run.seed)
    settings = run.optim
    groups = [
        {"params": [p for p in masters.parameters() if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in masters.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)
    pairs = list(zip(masters.parameters(), model.parameters(), strict=True))
    inputs, targets = batch_of(run, 0)

    def step() -> float:
        with torch.no_grad():
            for master, copy in pairs:
                copy.copy_(master)
        loss = model(inputs, targets) / inputs.numel()
        loss.backward()
        for master, copy in pairs:
            master.grad, copy.grad = copy.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters.parameters(), run.optim.clip_norm)
        optimizer.step()
        return loss.item()

    return step


def obey(step: Callable[[], float]) -> None:
    """Warm up; then run as many steps as each line of stdin asks for; print seconds per step and the loss."""
    for _ in range(WARM_UP_STEPS):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        count, began = int(line), time.perf_counter()
        losses = [step() for _ in range(count)]
        print((time.perf_counter() - began) / count, losses[-1], flush=True)


class Side:
    """The processes of one side of the comparison: all ranks of ingot, or the plain loop."""

    def __init__(self, role: str, ranks: int):
        from ingot.trainer.mesh.start import worker_environment

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        job |= {"LOCAL_WORLD_SIZE": str(ranks)} | worker_environment(ranks, cores=2)
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--role", role],
                env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        for process in self.processes:
            if process.stdout is None or process.stdout.readline().strip() != "ready":
                raise SystemExit(f"{role} did not start; its error is above")

    def go(self, steps: int) -> tuple[float, float, float]:
        """Run `steps` on all ranks at once.

        Returns (wall-clock seconds per step of the slowest rank, CPU seconds per step of all processes, loss of the
        whole batch).
        """
        answers, pids = [], [process.pid for process in self.processes]
        cpu_before = running_cpu_seconds(pids)
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        for process in self.processes:
            assert process.stdout is not None
            answers.append([float(word) for word in process.stdout.readline().split()])
        cpu = running_cpu_seconds(pids) - cpu_before
        return max(a[0] for a in answers), cpu / steps, statistics.mean(a[1] for a in answers)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each side (default: 15)")
    parser.add_argument("--steps", type=int, default=4, help="steps per turn (default: 4)")
    parser.add_argument("--role", choices=("plain", "sharded"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        obey({"plain": plain_step, "sharded": sharded_step}[args.role]())
        return
    sides: dict[str, Side] = {}
    try:
        sides |= {"plain": Side("plain", 1)}
        sides |= {"sharded": Side("sharded", 2)}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in sides}
        losses: dict[str, float] = {}
        for _ in range(args.rounds):
            for name, side in sides.items():
                taken, cpu, losses[name] = side.go(args.steps)
                seconds[name].append(taken)
                cpu_seconds[name].append(cpu)
    finally:
        for side in sides.values():
            side.end()
    tokens = quickstart_run(1).tokens_per_step
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    results = {
        "step_seconds": medians,
        "fastest_step_seconds": {name: min(times) for name, times in seconds.items()},
        "cpu_seconds_per_step": {name: statistics.median(times) for name, times in cpu_seconds.items()},
        "tokens_per_second": {name: tokens / value for name, value in medians.items()},
        "sharded_to_plain": medians["plain"] / medians["sharded"],
        "median_of_round_ratios": statistics.median(p / s for p, s in zip(*seconds.values(), strict=True)),
        "last_loss": losses,
    }
    for name, value in medians.items():
        print(f"{name:8} {value * 1e3:7.1f} ms/step  {tokens / value:9,.0f} tokens/s  last loss {losses[name]:.4f}")
    print(f"two ranks reach {results['sharded_to_plain']:.0%} of the plain loop (target 85 %)")
    print(record("fsdp_cpu", results, ("torch", "numpy")))


if __name__ == "__main__":
    main()
