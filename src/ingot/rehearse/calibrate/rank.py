"""The program of one calibration rank: time the trainer's step on each shape. Rank 0 prints the results as JSON.

calibrate.py starts this program with the environment of a training job.
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
import torch.nn.functional as F

from ingot.planner.predict.time.links import SECONDS, CollectiveGroup
from ingot.rehearse.calibrate.calibrate import shapes
from ingot.schema.run import RunConfig
from ingot.theory.devices import peak_flops
from ingot.trainer.build import build_parts
from ingot.trainer.loader.loader import Batch
from ingot.trainer.mesh.collectives import all_sum, any_rank, gather, scatter_sum
from ingot.trainer.mesh.start import start, stop
from ingot.trainer.step import train_step
from ingot.trainer.telemetry.usage import ThreadTime, peak_memory_bytes

# Seconds to measure on a quiet machine, and on a busy machine: there ranks wait for cores for over 5% of the time.
_QUIET_SECONDS, _BUSY_SECONDS, _BUSY = 3.0, 10.0, 0.05
_LEAST_ROUNDS = 4
Turn = tuple[float, float]  # seconds, and the share of them in which a rank was ready to run but had no core


def first_steps(runs: Sequence[RunConfig], device: torch.device) -> tuple[list[Callable[[], Turn]], list[int]]:
    """Return (a function that times one step, for each run; the peak memory after each run's first step). The first
    steps, which set up state, have been done. Collective.
    """
    steps, peaks = [], []
    for run in runs:
        steps.append(timed_step(run, device))
        steps[-1]()
        peaks.append(peak_memory_bytes(device))
    return steps, peaks


def take_turns(steps: Sequence[Callable[[], Turn]]) -> list[float]:
    """Return the typical step time of each run, in seconds. Collective.

    The runs alternate, one step each, and only the quieter half of the steps counts, so a burst from another program
    distorts neither the machine's rates nor a single run.
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
    """Return the half of the timed steps in which ranks waited the least for cores, the quietest step first."""
    return sorted(turns, key=lambda turn: turn[1])[: -(-len(turns) // 2)]


def timed_step(run: RunConfig, device: torch.device) -> Callable[[], Turn]:
    """Return a function that times one step of `run` on all ranks. This call and each call of the result are
    collective.
    """
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
    """Return the rate of each kind of work when nothing else runs on its rank. All ranks measure at the same time.
    Collective.
    """
    dist.barrier()
    rates = measure_device(device, torch.bfloat16, width=1024, heads=4, seq_len=512)
    return rates | measure_links(device)


def fastest(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the best value of each rate. A rate that was measured while other programs ran would be too low a limit
    for steps that were timed in quieter moments.
    """
    return {name: (min if name.endswith("seconds") else max)(rates[name] for rates in measured) for name in measured[0]}


# The rates of one device, each measured alone: products, attention, memory traffic, launches.


def measure_gpu(device: torch.device) -> dict:
    """Return the measured fields of a Cluster for a CUDA device. Efficiencies are shares of the published peak, or of
    the measured matmul rate if no peak is published.
    """
    rates = measure_device(device, torch.bfloat16, width=8192, heads=32, seq_len=8192)
    free, total = torch.cuda.mem_get_info(device)
    # Context, libraries and workspaces: memory in use outside the pool of tensors.
    runtime = (total - free) - torch.cuda.memory_reserved(device)
    name = torch.cuda.get_device_name(device)
    peak = peak_flops(name, "bf16")
    reference = peak or rates["matmul"]
    return {
        "device_name": name,
        "memory_bytes": total,
        "peak_flops": {"bf16": reference},
        "matmul_efficiency": rates["matmul"] / reference,
        "attention_efficiency": rates["attention"] / reference,
        "memory_bandwidth": rates["bandwidth"],
        "op_seconds": rates["op_seconds"],
        "runtime_bytes": runtime,
    }


def measure_device(
    device: torch.device, dtype: torch.dtype, *, width: int, heads: int, seq_len: int
) -> dict[str, float]:
    """Measure four rates: "matmul" and "attention" in FLOP/s (attention: forward and backward, counting the causal half
    of the pairs), "bandwidth" in bytes/s, and "op_seconds".
    """
    a = torch.randn(width, width, device=device, dtype=dtype)
    seconds = typical_seconds(lambda: a @ a, device)
    rates = {"matmul": 2.0 * width**3 / seconds}

    q, k, v = (torch.randn(1, heads, seq_len, 128, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def attend() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    # 7 products of 2·T²·H per head forward and backward (Dao 2023, section 3.1.2), of which causality needs half.
    rates["attention"] = 3.5 * heads * 2 * seq_len**2 * 128 / typical_seconds(attend, device)

    b = torch.empty_like(a)
    rates["bandwidth"] = 2.0 * a.numel() * a.element_size() / typical_seconds(lambda: b.copy_(a), device)

    small = torch.zeros(8, device=device)
    count = 200

    def launch_many() -> None:
        for _ in range(count):
            small.add_(1.0)

    rates["op_seconds"] = typical_seconds(launch_many, device) / count
    return rates


def typical_seconds(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Return the median seconds of `work` after two warm-up runs. Each time ends when the device has finished."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for _ in range(repeats + 2):
        finish()
        began = time.perf_counter()
        work()
        finish()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[2:])[repeats // 2]


# Latency and bandwidth of the trainer's own collectives among the ranks of this machine, when nothing else runs.
# Several kinds and sizes are timed, and latency and bandwidth are fitted to them with the planner's formulas
# (planner/predict/time/links.py), so that they include the other costs of a call (library, threads).


# Bytes of hidden states and gradients in models that are trained on CPUs.
_SIZES = (1 << 13, 1 << 17, 1 << 20, 1 << 22)
_REPEATS = 5


def measure_links(device: torch.device) -> dict[str, float]:
    """Measure link_bandwidth (bytes/s) and link_seconds; return {} with a single rank. Collective."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return {}
    group = dist.group.WORLD
    assert group is not None
    rows, seconds = [], []
    for size in _SIZES:
        whole = torch.zeros(size // 4 // ranks * ranks, device=device)
        part = whole.chunk(ranks)[dist.get_rank()].clone()
        calls: dict[str, Callable[[], object]] = {
            "all_gather": lambda part=part: gather(part, 0, group),
            "reduce_scatter": lambda whole=whole: scatter_sum(whole, 0, group),
            "all_reduce": lambda whole=whole: all_sum(whole, group),
            "send": lambda whole=whole: _pass_round(whole),
        }
        for kind, call in calls.items():
            rows.append(features(kind, ranks, whole.numel() * 4))
            seconds.append(_fastest_seconds(call))
    return fitted_links(np.array(rows), np.array(seconds))


def features(kind: str, ranks: int, size: float) -> list[float]:
    """Return [bytes over a link, number of hops] of one operation on `size` bytes, from the planner's formula."""
    alone = CollectiveGroup(ranks, ranks, link=1.0)
    sent = SECONDS[kind](alone, size)
    hops = SECONDS[kind](CollectiveGroup(ranks, ranks, link=1.0, link_seconds=1.0), size) - sent
    return [sent, hops]


def fitted_links(rows: np.ndarray, seconds: np.ndarray) -> dict[str, float]:
    """Fit link_bandwidth and link_seconds with the smallest sum of squared relative errors. If that gives a value that
    is not positive, derive each from one timing.
    """
    scaled = rows / seconds[:, None]
    per_byte, per_hop = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)[0]
    if per_byte <= 0 or per_hop <= 0:  # scattered timings: take bandwidth from the most bytes, latency from the fewest
        large, small = rows[:, 0].argmax(), rows[:, 0].argmin()
        per_byte, per_hop = seconds[large] / rows[large, 0], seconds[small] / rows[small, 1]
    return {"link_bandwidth": float(1 / per_byte), "link_seconds": float(per_hop)}


def _pass_round(tensor: torch.Tensor) -> None:
    """Send `tensor` to the next rank, and receive a tensor from the previous rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    arriving = dist.irecv(torch.empty_like(tensor), (rank - 1) % ranks)
    leaving = dist.isend(tensor, (rank + 1) % ranks)
    for work in (arriving, leaving):
        assert work is not None
        work.wait()


def _fastest_seconds(call: Callable[[], object]) -> float:
    """Return the shortest time of several calls, after a first call that connects. The shortest counts because
    disturbances only make a call longer.
    """
    call()
    taken = []
    for _ in range(_REPEATS):
        dist.barrier()
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


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
