"""The CPU seconds of hashing the state (trainer/integrity), relative to a training step, on two copies of a model.

Steps without hashes and checks alternate. A check is all that guard.hash_every adds in a step where it is due: the hash
after the update, the one before the next update, and the comparison at the log line. The figure is the median CPU
seconds of a check over those of a step, divided by the interval, and of the samples of gradients, which every step
has, over those of a step. CPU seconds count all threads of a rank, whatever else the machine does.

    python benchmarks/state_hashes.py [--rounds 7] [--models tiny,25m]
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from intervals import ratio_in_percent
from record import record

from ingot.planner.request.presets import load_model
from ingot.schema.arch import Arch
from ingot.schema.guard import Guard
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.params import count_parameters
from ingot.trainer.build import build_parts
from ingot.trainer.integrity.samples import GradientSamples
from ingot.trainer.integrity.watch import StateHashes
from ingot.trainer.step import train_step

RANKS = 2


def model(name: str) -> tuple[Arch, int, int]:
    """Return a model, its sequence length and its sequences per step."""
    tiny = load_model("tiny")
    if name == "tiny":
        return tiny.arch, tiny.train.seq_len, tiny.train.global_batch
    return replace(tiny.arch, d_model=512, num_layers=8, num_heads=8, num_kv_heads=4, d_ffn=1376), 256, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds, of which the median counts (default: 7)")
    parser.add_argument("--models", default="tiny,25m", help="models, as tiny,25m (default: both)")
    args = parser.parse_args()
    figures = {}
    for name in args.models.split(","):
        arch, seq_len, batch = model(name)
        found = ranks(lambda rank, name=name: measure(rank, name, args.rounds))
        steps, checks, samples = ([s for rank in found for s in rank[part]] for part in ("step", "check", "samples"))
        step, check, sample = map(statistics.median, (steps, checks, samples))
        share = ratio_in_percent([[one / Guard.hash_every for one in checks]], steps)
        figures[name] = {
            "parameters": count_parameters(arch),
            "tokens per step of a rank": seq_len * batch // RANKS,
            "CPU seconds of a step": round(step, 5),
            "CPU seconds of a check": round(check, 5),
            "CPU seconds of samples": round(sample, 6),
            "check over step, in percent": round(100 * check / step, 3),
            "samples over step, in percent": round(100 * sample / step, 3),
            "default": Guard.hash_every,
            "cost at the default": share,
        }
        print(name, figures[name])
    record("state_hashes", figures, ["torch"])


def ranks(function) -> list[dict]:
    """Run `function(rank)` on ranks in processes of their own. Returns their results in order."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe(duplex=False)

            def run(rank: int = rank, theirs=theirs) -> None:
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
                theirs.send(function(rank))
                dist.destroy_process_group()

            processes.append(context.Process(target=run))
            processes[-1].start()
            pipes.append(ours)
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return found


class TimedSamples(GradientSamples):
    """Samples of gradients. seconds: the CPU time of each step, of the threads that sample."""

    def __init__(self, *args, **kwargs):
        self.seconds = [0.0]
        super().__init__(*args, **kwargs)

    def take(self, number, gradients):
        began = time.thread_time()
        super().take(number, gradients)
        self.seconds[-1] += time.thread_time() - began

    def reduced(self, step, loss):
        began = time.thread_time()
        super().reduced(step, loss)
        self.seconds[-1] += time.thread_time() - began
        self.seconds.append(0.0)


def measure(rank: int, name: str, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of steps, of checks and of samples on this rank."""
    torch.set_num_threads(1)
    arch, seq_len, batch = model(name)
    run = RunConfig(
        name=name,
        model=arch,
        data=Data(tokens="made up"),
        train=Train(steps=10**6, seq_len=seq_len, global_batch=batch, micro_batch=batch // RANKS, precision="fp32"),
        parallel=Parallel(dp_shard=1, dp_replicate=RANKS),
    )
    parts = build_parts(run, torch.device("cpu"), Path())
    hashes = parts.hashes = StateHashes(parts.state, parts.model.data.published(), parts.mesh, 10**9)
    samples = hashes.samples = TimedSamples(parts.model.data, torch.device("cpu"))
    seconds: dict[str, list[float]] = {"step": [], "check": [], "samples": []}
    for step in range(1, rounds + 2):
        ids = torch.randint(0, arch.vocab_size, (1, batch // RANKS, seq_len + 1))
        micro_batches = SimpleNamespace(step=step, inputs=ids[..., :-1], targets=ids[..., 1:], document_ids=None)
        began = time.process_time()
        train_step(parts, micro_batches, 1e-4)
        between = time.process_time()
        hashes.every = 1
        hashes.after_update(step)
        hashes.before_update(step + 1)
        hashes.every = 10**9
        hashes.compare()
        assert not hashes.read()
        if step > 1:  # the first step allocates
            seconds["samples"].append(samples.seconds[step - 1])
            seconds["step"].append(between - began - samples.seconds[step - 1])
            seconds["check"].append(time.process_time() - between)
    return seconds


if __name__ == "__main__":
    main()
