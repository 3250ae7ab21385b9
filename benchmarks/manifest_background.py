"""The cost for rank 0 of a background save by many ranks: Llama 3 405B's blocks, at tp 8 x dp_shard 128 and ZeRO-3.

    python benchmarks/manifest_background.py LAYERS STAGES [--rounds 3]      8 16: 16,384 ranks, 8 layers each

The code is that of rank 0 and of its writer process. The other ranks are not there: the collectives hand out what they
would send, and no tensor is written. Meanwhile the main thread counts in Python, as the training thread that launches
kernels: its slowest sequence of counts is the longest that it waited for the lock of the interpreter, and the processor
time of the thread that saves is the most that it waited in total.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from manifest import DP, TP, make_part
from record import record

from ingot.schema.checkpoint import LedgerSegment, segment_file
from ingot.schema.run_folder import RunFolder
from ingot.storage import sha256_bytes
from ingot.trainer.checkpoint import agree
from ingot.trainer.checkpoint.background import BackgroundSaver, _Image
from ingot.trainer.checkpoint.files import CheckpointFacts
from ingot.trainer.checkpoint.message import as_value, pack_json

_COUNTS = 2_000  # between two looks at the clock: well below a millisecond


class AllRanks:
    """The process group of a job, seen by rank 0, without the other ranks: what they send is in `messages`."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, parts: list[bytes]):
        sizes = [as_value(pack_json(1 << 20)) for _ in parts]
        self._rounds = [self._framed(sizes), self._framed(list(map(as_value, parts)))]
        self._next = 0

    @staticmethod
    def _framed(messages: list[bytes]) -> list[torch.Tensor]:
        longest = max(map(len, messages))
        rows = torch.zeros(len(messages), 8 + longest, dtype=torch.uint8)
        for row, message in zip(rows, messages, strict=True):
            framed = len(message).to_bytes(8, "little") + message
            row[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        return list(rows)

    def is_initialized(self) -> bool:
        return True

    def get_rank(self) -> int:
        return 0

    def get_world_size(self) -> int:
        return len(self._rounds[0])

    def broadcast(self, *_: Any, **__: Any) -> None:
        pass

    def all_reduce(self, longest: torch.Tensor, *_: Any, **__: Any) -> None:
        longest.fill_(len(self._rounds[self._next][0]) - 8)

    def gather(self, _: torch.Tensor, parts: list[torch.Tensor], **__: Any) -> None:
        torch._foreach_copy_(parts, self._rounds[self._next])
        self._next = 1 - self._next


def count_until(done: threading.Event) -> list[float]:
    """Count until `done`; return the seconds of each sequence of counts."""
    took = []
    while not done.is_set():
        began = time.perf_counter()
        for _ in range(_COUNTS):
            pass
        took.append(time.perf_counter() - began)
    return took


def memory(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(parts: list[bytes], rounds: int, root: Path) -> dict[str, float]:
    agree.dist = AllRanks(parts)  # pyright: ignore[reportAttributeAccessIssue]
    saver, group = BackgroundSaver(RunFolder(root), torch.device("cpu"), None), object()
    saver._group = group  # pyright: ignore[reportAttributeAccessIssue]
    saver._writer.write = lambda *_: parts[0]  # this rank's own file is not the subject
    finish, seconds = saver._writer.finish, defaultdict(list)
    pid, segment = saver.writer_pid, b"\0" * 8
    assert pid is not None

    def timed_finish(*args: Any) -> int:
        began = time.perf_counter()
        saved = finish(*args)
        seconds["writer_seconds"].append(time.perf_counter() - began)
        return saved

    saver._writer.finish = timed_finish
    image = _Image(None, -1, 0, 0, None)
    entry = LedgerSegment(file=segment_file(1, 1), first_step=1, last_step=1, sha256=sha256_bytes(segment))
    for step in range(1, rounds + 1):
        facts = CheckpointFacts(step, 0, {}, "c" * 64, "d" * 64, {})
        done, cpu, failed = threading.Event(), [0.0], []

        def save(facts=facts, done=done, cpu=cpu, failed=failed) -> None:
            try:
                saver._save(facts, image, (entry,), segment, 1, 0)
            except Exception as error:
                failed.append(error)
            cpu[0] = time.thread_time()
            done.set()

        saver._writer.begin()
        began = time.perf_counter()
        thread = threading.Thread(target=save)
        thread.start()
        counts = count_until(done)
        thread.join()
        if failed:
            raise failed[0]
        seconds["save_seconds"].append(time.perf_counter() - began)
        seconds["rank_thread_cpu_seconds"].append(cpu[0])
        seconds["longest_wait_of_training_ms"].append(1e3 * max(counts))
        seconds["writer_peak_mb"].append((memory(pid, "VmHWM")) / 1e6)
    saver.close()
    return {name: statistics.median(values) for name, values in seconds.items()} | {
        "ranks": len(parts),
        "sent_mb": sum(map(len, parts)) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", type=int)
    parser.add_argument("stages", type=int)
    parser.add_argument("--rounds", type=int, default=3, help="saves (default: 3)")
    args = parser.parse_args()
    parts = [make_part(rank, args.layers).to_bytes() for rank in range(TP * DP * args.stages)]
    with tempfile.TemporaryDirectory() as root:
        results = measure(parts, args.rounds, Path(root))
    for name, value in results.items():
        print(f"{name:34} {value:,.3f}")
    print(record("manifest_background", results, ["ingot", "torch"]))


if __name__ == "__main__":
    main()
