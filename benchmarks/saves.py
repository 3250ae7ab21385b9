"""Checkpoints in the background (checkpoint.mode = "async") against those that training waits for, on one CPU rank.

Two models: the quickstart's, and one of 135M parameters. In every round each way takes a turn: steps without a save, a
save that training waits for and the same steps, a save in the background and the same steps. With idle training, a save
in the background takes turns with a plain copy of its bytes, a plain sequential write with fsync, and that write with
the hashes that a manifest records. All figures are medians.

    python benchmarks/saves.py [--rounds 5] [--models tiny smollm2-135m] [--parts training copy idle] [--folder DIR]
"""

import argparse
import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import zlib
from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from record import record

STEPS = {"tiny": 10, "smollm2-135m": 2}  # steps of a turn: an interval between two saves
MIB = 1 << 20
STARTED = "INGOT_BENCHMARK_STARTED"


class Rank:
    """A run of one rank of the model, with its steps and both ways of saving."""

    def __init__(self, model: str, folder: Path):
        import numpy as np
        import torch

        from ingot.planner.request.presets import load_model
        from ingot.schema.parallel import Parallel
        from ingot.schema.run import Data, RunConfig, Train
        from ingot.schema.run_folder import RunFolder
        from ingot.trainer.build import build_parts
        from ingot.trainer.checkpoint.background import BackgroundSaver
        from ingot.trainer.checkpoint.files import CheckpointFacts
        from ingot.trainer.loader.ledger import segment_of
        from ingot.trainer.loader.loader import Batch
        from ingot.trainer.mesh.mesh import cpu_group
        from ingot.trainer.step import train_step

        preset = load_model(model)
        batch, seq_len = (preset.train.global_batch, preset.train.seq_len) if preset.train.global_batch else (1, 128)
        run = RunConfig(
            name="benchmark",
            model=preset.arch,
            data=Data(tokens=""),
            train=Train(
                steps=1, seq_len=seq_len, global_batch=batch, micro_batch=batch, compile="off", precision="fp32"
            ),
            parallel=Parallel(dp_shard=1),
        )
        device = torch.device("cpu")
        parts = build_parts(run, device, Path())
        ids = torch.randint(0, preset.arch.vocab_size, (batch, seq_len + 1), generator=torch.Generator().manual_seed(0))
        inputs, targets = ids[None, :, :-1].contiguous(), ids[None, :, 1:].contiguous()
        sample = Batch(1, np.zeros(0, np.int64), inputs, targets, None, 0.0)
        self.step = lambda: train_step(parts, sample, run.optim.lr).loss.item()
        self.state, self.folder, self.steps = parts.state, RunFolder(folder), STEPS.get(model, 2)
        self.facts = CheckpointFacts(
            step=0, tokens=0, settings={}, config_sha256="c" * 64, data_fingerprint="d" * 64, layout={"dp_shard": 1}
        )
        self._segment = segment_of
        self.background = BackgroundSaver(self.folder, device, cpu_group(timedelta(hours=1), "checkpoints"))
        for _ in range(3):
            self.step()

    def next_save(self):
        """The facts of the next checkpoint, its ledger of one segment, and the content of that."""
        import numpy as np

        self.facts = replace(self.facts, step=self.facts.step + 1)
        entry, content = self._segment(1, self.facts.step, np.zeros((self.facts.step, 1), np.int64))
        return self.facts, (entry,), content

    def save_waiting(self) -> float:
        """Seconds that training waits for a save with mode "sync"."""
        from ingot.trainer.checkpoint.save import save_checkpoint

        facts, ledger, content = self.next_save()
        began = time.perf_counter()
        save_checkpoint(self.folder, facts, self.state, ledger, keep=1, segment=content)
        return time.perf_counter() - began

    def begin_save(self):
        """Begin a save with mode "async"; its `stall_seconds` is how long training waited."""
        facts, ledger, content = self.next_save()
        return self.background.start(facts, self.state, ledger, content, 1, 0, time.monotonic())

    def end_save(self, save) -> None:
        save.wait()
        if save.error is not None:
            raise save.error


def in_training(rank: Rank, rounds: int) -> dict:
    """Blocked time of both ways of saving, and what a save costs the steps after it."""
    alone: list[float] = []
    blocked: dict[str, list[float]] = defaultdict(list)
    turn: dict[str, list[float]] = defaultdict(list)
    written: list[float] = []
    for number in range(rounds + 1):
        save, new = None, defaultdict(float)
        for way in ("none", "sync", "async"):
            began = time.perf_counter()
            if way == "sync":
                new["sync"] = rank.save_waiting()
            elif way == "async":
                save = rank.begin_save()
            steps = []
            for _ in range(rank.steps):
                step_began = time.perf_counter()
                rank.step()
                steps.append(time.perf_counter() - step_began)
            new[f"turn {way}"] = time.perf_counter() - began
            if way == "none":
                new["step"] = statistics.median(steps)
        rank.end_save(save)
        if number == 0:
            continue  # the first snapshot makes its memory
        alone.append(new["step"])
        blocked["sync"].append(new["sync"])
        blocked["async"].append(save.stall_seconds)
        written.append(save.write_seconds)
        for way in ("none", "sync", "async"):
            turn[way].append(new[f"turn {way}"])
    step, stall = statistics.median(alone), statistics.median(blocked["async"])
    slower = {w: statistics.median(x / y - 1 for x, y in zip(turn[w], turn["none"], strict=True)) for w in blocked}
    return {
        "step_ms": 1e3 * step,
        "blocked_ms": 1e3 * stall,
        "blocked_share_of_step": stall / step,
        "sync_blocked_ms": 1e3 * statistics.median(blocked["sync"]),
        "write_seconds_in_training": statistics.median(written),
        "interval_steps": rank.steps,
        "interval_seconds": statistics.median(turn["none"]),
        "interval_slower_async": slower["async"],
        "interval_slower_sync": slower["sync"],
    }


def against_copy(rank: Rank, rounds: int) -> dict:
    """Measure how long training waits for a save in the background, relative to a plain copy of its bytes.

    The same threads copy before each save and after its end, so that both see the same load.
    """
    flat, copy = flat_tensors(rank)
    rank.end_save(rank.begin_save())  # the first snapshot makes its memory
    stalls, copies = [], [seconds_of(lambda: copy.copy_(flat))]
    for _ in range(rounds):
        save = rank.begin_save()
        rank.end_save(save)
        stalls.append(save.stall_seconds)
        copies.append(seconds_of(lambda: copy.copy_(flat)))
    ratios = [2 * stall / (copies[i] + copies[i + 1]) for i, stall in enumerate(stalls)]
    return {
        "bytes": flat.numel(),
        "copies_ms": 1e3 * statistics.median(copies),
        "stalls_ms": 1e3 * statistics.median(stalls),
        "stall_relative_to_copies": statistics.median(ratios),
        "stall_relative_to_copies_least": min(ratios),
        "stall_relative_to_copies_most": max(ratios),
        "load": os.getloadavg()[0],
    }


def flat_tensors(rank: Rank):
    """Return all bytes that a save of `rank` writes as one tensor, and another one of that size to copy them to."""
    import torch

    from ingot.trainer.checkpoint.save import file_contents

    tensors = file_contents(rank.state)[1]
    flat = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors])
    return flat, torch.empty_like(flat).fill_(1)


def seconds_of(function) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def idle(rank: Rank, rounds: int) -> dict:
    """A save in the background while the rank does nothing, against plain programs on the same bytes."""
    flat, copy = flat_tensors(rank)
    data = memoryview(flat.numpy())
    path, took = rank.folder.root / "plain", defaultdict(list)
    ways = ["write", "write_sha", "write_hashes", "save"]
    rank.end_save(rank.begin_save())  # the first snapshot makes its memory
    for number in range(rounds):
        took["copy"].append(seconds_of(lambda: copy.copy_(flat)))
        # Each way takes each place: memory that another way has just freed makes a write of cached pages faster.
        for name in ways[number % len(ways) :] + ways[: number % len(ways)]:
            if name == "save":
                save_idle(rank, len(data), took)
                continue
            began, cpu = time.perf_counter(), time.process_time()
            plain_write(path, data, ways.index(name))
            took[name].append(time.perf_counter() - began)
            took[f"{name} cpu"].append(time.process_time() - cpu)
            path.unlink()
    m = {name: statistics.median(values) for name, values in took.items()}
    return {
        "bytes": len(data),
        "copy_ms": 1e3 * m["copy"],
        "blocked_relative_to_copy": m["stall"] / m["copy"],
        "plain_write_mb_per_second": len(data) / m["write"] / 1e6,
        "writer_mb_per_second": len(data) / m["save"] / 1e6,
        "writer_rate_relative_to_plain_write": m["write"] / m["save"],
        "writer_cpu_seconds": m["save cpu"],
        "cpu_relative_to_write_with_sha256": m["save cpu"] / m["write_sha cpu"],
        "cpu_relative_to_write_with_sha256_and_crc32": m["save cpu"] / m["write_hashes cpu"],
        "extra_memory_in_snapshots": m["memory"],
    }


def save_idle(rank: Rank, size: int, took: dict[str, list[float]]) -> None:
    """Save once in the background, and add the figures to `took`. size: bytes of the tensors."""
    own, cpu = resident(os.getpid()), cpu_seconds(rank.background.writer_pid)
    save = rank.begin_save()
    with Peak(rank.background.writer_pid) as peak:
        rank.end_save(save)
    took["save"].append(save.write_seconds)
    took["save cpu"].append(cpu_seconds(rank.background.writer_pid) - cpu)
    took["stall"].append(save.stall_seconds)
    snapshot = os.fstat(rank.background._snapshot.fd).st_blocks * 512
    took["memory"].append((snapshot + peak.bytes + max(0, resident(os.getpid()) - own)) / size)


def plain_write(path: Path, data: memoryview, hashes: int) -> None:
    """Write `data` sequentially, durably, with no hash, a SHA-256 or a SHA-256 and a CRC-32."""
    sha256, crc32 = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for start in range(0, len(data), MIB):
            chunk = data[start : start + MIB]
            if hashes:
                sha256.update(chunk)
            if hashes > 1:
                crc32 = zlib.crc32(chunk, crc32)
            file.write(chunk)
        os.fsync(file.fileno())


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Bytes of private memory (not of files, nor shared) that a process has in use."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The private memory that a process takes at most within a with block, over that at its start."""

    def __init__(self, pid: int):
        self._pid, self._done, self.bytes = pid, threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, args=(resident(pid),))

    def _watch(self, before: int) -> None:
        while not self._done.wait(0.005):
            self.bytes = max(self.bytes, resident(self._pid) - before)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()


PARTS = {"training": in_training, "copy": against_copy, "idle": idle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (default: 5)")
    parser.add_argument("--models", nargs="+", default=list(STEPS), help="presets (default: all that are named above)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default: all)")
    parser.add_argument("--folder", help="a folder on the disk to measure (default: that of temporary files)")
    args = parser.parse_args()
    from ingot.trainer.mesh.start import start, worker_environment

    if STARTED not in os.environ:  # allocators and OpenMP read their settings when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **worker_environment(1), STARTED: "1"})
    start("cpu", 600)
    results: dict = {"rounds": args.rounds}
    for model in args.models:
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        rank = Rank(model, folder)
        try:
            results[model] = {
                name: value for part in args.parts for name, value in PARTS[part](rank, args.rounds).items()
            }
        finally:
            rank.background.close()
            shutil.rmtree(folder)
        for name, value in results[model].items():
            print(f"{model:14} {name:46} {value:,.3f}", flush=True)
        del rank
    print(record("saves", results, ["ingot", "torch", "numpy"]))


if __name__ == "__main__":
    main()
