"""The balance of causal attention over the ranks of a ring, by layout: pairs of query and key, and CPU seconds.

Forward and backward of one layer on gloo ranks of one thread each. CPU seconds of a rank do not depend on what else the
machine does; waiting for messages is not among them. The figure is the busiest rank over the mean.

    python benchmarks/context_balance.py [--ranks 4] [--tokens 8192] [--rounds 3]
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from record import record

from ingot.schema.parallel import Parallel
from ingot.theory.context import imbalance
from ingot.trainer.mesh.mesh import build_mesh
from ingot.trainer.model.attention import AttentionMaskSpec, attend_locally
from ingot.trainer.parallel.context import ContextParallelism

HEADS, HEAD_DIM = 4, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the ring (default: 4)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the sequence (default: 8192)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the median counts (default: 3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        pipes, processes = [], []
        for rank in range(args.ranks):
            ours, theirs = context.Pipe(duplex=False)
            processes.append(context.Process(target=attend, args=(rank, args, Path(folder) / "store", theirs)))
            processes[-1].start()
            pipes.append(ours)
        seconds = [pipe.recv() for pipe in pipes]  # by rank: layout -> CPU seconds
        for process in processes:
            process.join()
    figures = {}
    for layout in seconds[0]:
        spent = [rank[layout] for rank in seconds]
        figures[layout] = {
            "pairs, busiest over mean": round(imbalance(ring(args.ranks, layout), args.tokens), 4),
            "CPU seconds, busiest over mean": round(max(spent) / statistics.mean(spent), 3),
            "CPU seconds by rank": [round(s, 3) for s in spent],
        }
        print(f"{layout:11} {figures[layout]}")
    record("context_balance", {"ranks": args.ranks, "tokens": args.tokens, "layouts": figures}, ["torch"])


def ring(ranks: int, layout) -> Parallel:
    return Parallel(cp=ranks, context="ring", ulysses=1, context_layout=layout)


def attend(rank: int, args: argparse.Namespace, store: Path, pipe) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    torch.manual_seed(rank)
    shape = 1, HEADS, args.tokens // args.ranks, HEAD_DIM
    q, k, v, gradient = (torch.randn(shape) for _ in range(4))
    found = {}
    mesh = build_mesh(ring(args.ranks, "zigzag"), "cpu")
    for layout in ("contiguous", "striped", "zigzag"):
        context = ContextParallelism(replace(mesh, parallel=ring(args.ranks, layout)), attend_locally)
        sight = AttentionMaskSpec(context.positions(args.tokens, q.device))
        rounds = []
        for _ in range(args.rounds + 1):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            dist.barrier()
            began = time.thread_time()
            context.attend(*leaves, sight).backward(gradient)
            rounds.append(time.thread_time() - began)
        found[layout] = statistics.median(rounds[1:])
    pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
