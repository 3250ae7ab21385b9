"""Measure this machine with the trainer's own step, and derive from the timings the rates that the planner uses.

On a CPU, all ranks of the later training run optimizer steps of small models at the same time, because they share
caches and memory. The models differ in one property each, so that least squares can separate the rates of matrix
products, attention, memory traffic, operations, collectives and steps. No rate may exceed the rate of its kind of work
alone. On a GPU one process measures the rates of products, attention, memory and operations directly.

This module runs in the calling process and does not import torch; the ranks run rank.py.
"""

import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np

from ingot.errors import ResourceError
from ingot.machine.facts import usable_cores
from ingot.planner.predict.memory.peak_memory import live_bill
from ingot.planner.predict.time.exposed import cpu_collectives
from ingot.planner.predict.time.step_time import rank_work
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.layout import layout_problems, positions
from ingot.trainer.mesh.start import outer_environment, rank_variables, worker_environment

_RANK = ("-P", "-m", "ingot.rehearse.calibrate.rank")
DEADLINE_SECONDS = 300  # a machine with eight busy programs per core needed 70 s
# With a bandwidth of 1 B/s, the seconds of collectives are the bytes that they send.
_UNIT_LINKS = Cluster(name="", device="cpu", memory_bytes=1, link_bandwidth=1.0)
_BASE = Arch(
    vocab_size=4096, d_model=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, d_ffn=344, max_seq_len=1024
)


@dataclass(frozen=True)
class Timing:
    """A calibration run, the seconds of its typical step, and the peak memory of the process after its first step."""

    run: RunConfig
    seconds: float
    peak_bytes: int


def shapes(ranks: int) -> tuple[RunConfig, ...]:
    """Return the calibration runs: a tiny run, whose memory is almost that of an empty process; the largest run; then
    runs that differ in one property each.
    """

    def run(
        arch: Arch,
        micro_batch: int,
        seq_len: int,
        precision: Literal["bf16", "fp32"] = "bf16",
        micro_batches: int = 1,
        parallel: Parallel | None = None,
    ) -> RunConfig:
        parallel = parallel or Parallel(dp_shard=ranks)
        batch = micro_batch * micro_batches * parallel.data_ranks
        train = Train(steps=1, seq_len=seq_len, global_batch=batch, micro_batch=micro_batch, precision=precision)
        return RunConfig(name="calibration", model=arch, data=Data(tokens=""), train=train, parallel=parallel)

    wide = replace(_BASE, d_model=256, num_heads=8, num_kv_heads=4, d_ffn=688)
    small = replace(_BASE, vocab_size=256)
    found = (
        run(replace(small, num_layers=1), 1, 16),
        run(_BASE, 8, 256),
        run(_BASE, 2, 256),
        run(replace(_BASE, num_layers=2, vocab_size=1024), 4, 256),
        run(wide, 2, 256),
        run(_BASE, 1, 1024),
        run(replace(_BASE, num_layers=1, vocab_size=16_384), 1, 256),
        run(small, 1, 16, micro_batches=16),  # many operations and one update
        run(_BASE, 2, 256, "fp32"),
    )
    if ranks == 1:
        return found
    gathers = run(small, 1, 64, micro_batches=4, parallel=Parallel(dp_shard=ranks, zero=3, unit_layers=1))
    regions = run(small, 1, 64, micro_batches=4, parallel=Parallel(tp=ranks))
    return (*found, *(other for other in (gathers, regions) if not any(layout_problems(other))))


def calibrate(uncalibrated: Cluster) -> Cluster:
    """Return the cluster `uncalibrated` (machine/facts.py) with measured rates. Raises ResourceError if ranks fail."""
    return calibrate_gpu(uncalibrated) if uncalibrated.device == "cuda" else calibrate_cpu(uncalibrated)


def calibrate_cpu(uncalibrated: Cluster) -> Cluster:
    """Return `uncalibrated` (a "cpu" cluster) with measured rates for its number of ranks, in about 15 s when idle.

    Raises ResourceError if ranks fail or do not finish in time.
    """
    ranks = uncalibrated.devices_per_node
    runs = shapes(ranks)
    answer = _start_ranks(ranks)
    timings = [Timing(r, t["seconds"], t["peak_bytes"]) for r, t in zip(runs, answer["timings"], strict=True)]
    return fit(timings, answer["limits"], uncalibrated)


def calibrate_gpu(uncalibrated: Cluster) -> Cluster:
    """Return `uncalibrated` (a "cuda" cluster) with the measured rates of its first GPU. Links and fragmentation keep
    their published values.
    """
    rates = _start_ranks(1, "--cuda")
    peaks = uncalibrated.peak_flops | rates.pop("peak_flops")
    return replace(uncalibrated, measured=time.strftime("%Y-%m-%d"), peak_flops=peaks, **rates)


def _start_ranks(ranks: int, *arguments: str) -> dict:
    job = outer_environment() | worker_environment(ranks, usable_cores())
    command = [sys.executable, *_RANK, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = []
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=ranks) as listener:
            for rank in range(ranks):
                environment = job | rank_variables(rank, ranks, listener)
                inherited = [listener.fileno()] if rank == 0 else []
                processes.append(subprocess.Popen(command, env=environment, pass_fds=inherited, **pipes))
        deadline = time.monotonic() + DEADLINE_SECONDS
        outputs = [process.communicate(timeout=max(deadline - time.monotonic(), 0.1)) for process in processes]
    except subprocess.TimeoutExpired:
        raise ResourceError(
            "E-CALIBRATION-TIMEOUT",
            f"calibration did not finish within {DEADLINE_SECONDS} s",
            rule="all ranks finish their timings before the deadline",
            fix="try again when the machine is idle",
            deadline_seconds=DEADLINE_SECONDS,
        ) from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    last_lines = {
        rank: (errors.strip().splitlines() or ["no message"])[-1]
        for rank, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True))
        if process.returncode
    }
    if last_lines:  # show all: one line has the cause, the others only report that a peer was lost
        failed = "; ".join(f"rank {rank} of the calibration failed: {line}" for rank, line in last_lines.items())
        raise ResourceError(
            "E-CALIBRATION-RANK",
            failed,
            rule="every rank of the calibration ends without an error",
            fix="run `ingot doctor`, which checks the machine",
            ranks=list(last_lines),
        )
    return json.loads(outputs[0][0])


def fit(timings: list[Timing], limits: dict[str, float], uncalibrated: Cluster) -> Cluster:
    """Return `uncalibrated` with the rates that explain `timings` (in the order of `shapes`) with the least relative
    error.

    limits: the rates of products, attention, memory traffic and operations when nothing else runs, and those of
    collectives (absent with a single rank). Fitted rates never exceed these limits, even if timings scatter.
    """
    bf16 = [t for t in timings if t.run.train.precision == "bf16"]
    features = np.array([_features(t.run) for t in bf16])
    seconds = np.array([t.seconds for t in bf16])
    links = (1 / limits["link_bandwidth"], limits["link_seconds"]) if "link_bandwidth" in limits else (0, 0)
    least = np.array(
        [1 / limits["matmul"], 1 / limits["attention"], 1 / limits["bandwidth"], limits["op_seconds"], 0, *links]
    )
    per_unit = bounded_fit(features, seconds, least)
    per_flop, per_attention_flop, per_byte, per_operation, per_step, per_sent_byte, per_hop = map(float, per_unit)
    fp32 = [_seconds_per_flop(t, per_unit) for t in timings if t.run.train.precision == "fp32"]
    runtime, fragmentation = _memory(timings)
    error = np.abs(features @ per_unit / seconds - 1)
    return replace(
        uncalibrated,
        peak_flops={"bf16": 1 / per_flop, "fp32": 1 / float(np.median(fp32))},
        matmul_efficiency=1.0,
        attention_efficiency=per_flop / per_attention_flop,
        memory_bandwidth=1 / per_byte,
        op_seconds=per_operation,
        step_overhead_seconds=per_step,
        link_bandwidth=1 / per_sent_byte if per_sent_byte else uncalibrated.link_bandwidth,
        link_seconds=per_hop,
        runtime_bytes=runtime,
        fragmentation=fragmentation,
        resolution=float(error.mean()),
        measured=time.strftime("%Y-%m-%d"),
    )


def _features(run: RunConfig) -> list[float]:
    """Return the amounts of work in a step: FLOPs of products and of attention, bytes moved, operations, 1 for the step
    itself, bytes sent, hops of messages.
    """
    work, position = rank_work(run, "cpu"), positions(run)[0]
    sent = cpu_collectives(position, _UNIT_LINKS).value
    hops = cpu_collectives(position, replace(_UNIT_LINKS, link_seconds=1.0)).value - sent
    return [work.matmul_flops, work.attention_flops, work.moved_bytes, work.operations, 1.0, sent, hops]


def _seconds_per_flop(timing: Timing, per_unit: np.ndarray) -> float:
    """Return the seconds per FLOP of matrix products in the precision of `timing`, which the fit does not have.

    per_unit: the fitted seconds per unit of each feature (`_features`).
    Bytes and operations are assumed to cost the same as in the fit, attention to slow down by the same factor as
    products, and products and attention to take at least a twentieth of the step.
    """
    flops, attention_flops, *rest = _features(timing.run)
    left = timing.seconds - float(np.dot(rest, per_unit[2:]))
    return max(left, timing.seconds / 20) / (flops + attention_flops * per_unit[1] / per_unit[0])


def bounded_fit(features: np.ndarray, seconds: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Return the seconds per unit of each column of `features`, each at least `least`, that explain `seconds` with the
    smallest sum of squared relative errors.

    Every subset of the few columns is tried as the set of columns above their bound, so the optimum is exact.
    """
    scaled = features / seconds[:, None]
    left = 1 - scaled @ least
    scale = np.maximum(scaled.max(axis=0), np.finfo(float).tiny)  # with one rank nothing is sent
    best, best_error = least.copy(), float((left**2).sum())
    for count in range(1, features.shape[1] + 1):
        for columns in map(list, combinations(range(features.shape[1]), count)):
            chosen = scaled[:, columns] / scale[columns]
            above = np.linalg.lstsq(chosen, left, rcond=None)[0]
            error = float(((chosen @ above - left) ** 2).sum())
            if (above >= 0).all() and error < best_error - 1e-12:
                best, best_error = least.copy(), error
                best[columns] += above / scale[columns]
    return best


def _memory(timings: list[Timing]) -> tuple[int, float]:
    """Return (runtime_bytes, fragmentation): the first from the tiny run's memory, the second from how much more memory
    the largest run used than its tensors need.
    """
    minute, large = (sum(term.value for term in live_bill(t.run, "cpu").values()) for t in timings[:2])
    grown = timings[1].peak_bytes - timings[0].peak_bytes
    fragmentation = max(grown / (large - minute) - 1, 0.0)
    return round(timings[0].peak_bytes - minute * (1 + fragmentation)), round(fragmentation, 3)
