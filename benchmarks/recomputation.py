"""The CPU seconds of computing gradients on a second rank (guard.recompute_every), relative to a step, on two ranks.

Every step is computed twice, and both parts are measured in each. The figure is the median of what a step costs more,
the second computation, both hashes and the comparison, over that of all else. At one in n steps, the run takes this
share / n longer; the limit is 1 / n. CPU seconds count all threads of a rank, whatever else the machine does.

    python benchmarks/recomputation.py [--rounds 9] [--models tiny,25m] [--zero 0,3]
"""

import argparse
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from record import record
from state_hashes import RANKS, model, ranks

from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.params import count_parameters
from ingot.trainer.build import build_parts
from ingot.trainer.integrity.recompute import RecomputedGradients
from ingot.trainer.integrity.watch import StateHashes
from ingot.trainer.step import train_step

EVERY = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="steps, whose medians count (default: 9)")
    parser.add_argument("--models", default="tiny,25m", help="models, as tiny,25m (default: both)")
    parser.add_argument("--zero", default="0,3", help="forms of data parallelism (default: 0,3)")
    args = parser.parse_args()
    figures = {}
    for name in args.models.split(","):
        for zero in map(int, args.zero.split(",")):
            found = ranks(lambda rank, name=name, zero=zero: measure(rank, name, zero, args.rounds))
            step, more = (statistics.mean(rank[part] for rank in found) for part in ("step", "more"))
            arch, seq_len, batch = model(name)
            figures[f"{name}, zero {zero}"] = {
                "parameters": count_parameters(arch),
                "tokens per step of a rank": seq_len * batch // RANKS,
                "CPU seconds of a step": round(step, 5),
                "CPU seconds of the second computation": round(more, 5),
                "of a step, in percent": round(100 * more / step, 2),
                f"cost at one in {EVERY}, in percent": round(100 * more / step / EVERY, 3),
                "limit, in percent": 100 / EVERY,
            }
            print(name, zero, figures[f"{name}, zero {zero}"], flush=True)
    record("recomputation", figures, ["torch"])


def measure(rank: int, name: str, zero: int, rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of a step on this rank, and of its second computation."""
    torch.set_num_threads(1)
    arch, seq_len, batch = model(name)
    layout = {"dp_shard": RANKS, "zero": zero} if zero else {"dp_shard": 1, "dp_replicate": RANKS}
    run = RunConfig(
        name=name,
        model=arch,
        data=Data(tokens="made up"),
        train=Train(steps=10**6, seq_len=seq_len, global_batch=batch, micro_batch=batch // RANKS, precision="fp32"),
        parallel=Parallel(**layout),
    )
    parts = build_parts(run, torch.device("cpu"), Path())

    def part_of(step: int, part: int) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(step * RANKS + part)
        ids = torch.randint(0, arch.vocab_size, (1, batch // RANKS, seq_len + 1), generator=generator)
        return SimpleNamespace(step=step, inputs=ids[..., :-1], targets=ids[..., 1:], document_ids=None)

    gradients = RecomputedGradients(
        parts.program, parts.model.data, parts.mesh, every=1, seed=1, read=part_of, device=torch.device("cpu")
    )
    parts.gradients = gradients
    published = parts.model.data.published()
    hashes = StateHashes(parts.state, published, parts.mesh, 10**9, gradients=gradients)
    more = [0.0]

    def counted(function):
        def call(*args):
            began = time.process_time()
            result = function(*args)
            more[0] += time.process_time() - began
            return result

        return call

    take, gradients.recompute = gradients.take, counted(gradients.recompute)
    # The hashes within the second computation are a part of it.
    gradients.take = lambda *args: (take if gradients.apart else counted(take))(*args)
    compare = counted(lambda: (hashes.compare(), hashes.read())[1])
    seconds: dict[str, list[float]] = {"step": [], "more": []}
    for step in range(1, rounds + 2):
        batches, more[0] = part_of(step, parts.mesh.data_rank), 0.0
        began = time.process_time()
        train_step(parts, batches, 1e-4)
        assert not compare()
        whole = time.process_time() - began
        if step > 1:  # the first step allocates, and tries whether gradients can be repeated
            seconds["more"].append(more[0])
            seconds["step"].append(whole - more[0])
    return {part: statistics.median(found) for part, found in seconds.items()}


if __name__ == "__main__":
    main()
