"""The measurements of one machine, in a process of its own: `python -m ingot.trainer.fleet.measure FOLDER SECONDS`.

It reads requests from standard input, a JSON object per line, and answers each with one line. {"do": "machine"}: rates
and wrong results (fleet/judge.py). {"do": "clock"}: {"clock": seconds}. {"do": "open"}: {"port": P} of a store for a
pair. {"do": "link", "rank": R, "host": H, "port": P}: {"link": bytes per second} of sums over the pair, 0 if none was
completed: then the other machine may be the bad one.
"""

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ingot.machine.interfaces import address_towards, interface_of
from ingot.machine.processes import die_with_parent

_PATTERNS = (0x00, 0xFF, 0xAA, 0x55)
_GPU_BYTES, _CPU_BYTES, _DISK_BYTES = 4 << 30, 128 << 20, 64 << 20
_LINK_ELEMENTS = 4 << 20
_PAIR_SECONDS = 60.0  # that one of a pair waits for the other


def main() -> None:
    """Answer requests until standard input is closed."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NCCL prints to standard output, where an answer is a line
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    store: TCPStore | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "machine":
            answer = measure_machine(folder, seconds)
        elif request["do"] == "clock":
            answer = {"clock": time.time()}
        elif request["do"] == "open":
            store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            answer = {"port": store.port}
        else:
            mine = store if request["rank"] == 0 else None
            answer = {"link": 0.0}
            try:
                answer["link"] = measure_link(request["rank"], request["host"], request["port"], seconds, mine)
            except RuntimeError:  # of gloo, NCCL or the store
                traceback.print_exc()
        print(json.dumps(answer), file=answers, flush=True)


def measure_machine(folder: Path, seconds: float) -> dict:
    """Return rates and wrong results of computation, memory and the disk of `folder`: of the slowest device."""
    if torch.cuda.is_available():
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    else:
        devices = [torch.device("cpu")]
    rates, wrong = {}, {}
    for name, measure in (("matmul", measure_matmul), ("memory", measure_memory)):
        each = [measure(device, seconds) for device in devices]
        rates[name], wrong[name] = min(rate for rate, _ in each), sum(count for _, count in each)
    rates["disk"], wrong["disk"] = measure_disk(folder)
    return {"rates": rates, "wrong": wrong}


def measure_matmul(device: torch.device, seconds: float) -> tuple[float, int]:
    """Return FLOP/s of equal matrix products for some seconds, and how many differ from the first one in any bit."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (768, torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2))
    first, wrong, spent, count = a @ b, 0, 0.0, 0
    _finish(device)
    for _ in _for(seconds):
        began = time.perf_counter()
        product = a @ b
        _finish(device)
        spent, count = spent + time.perf_counter() - began, count + 1
        wrong += not torch.equal(product, first)
    return 2 * size**3 * count / spent, wrong


def measure_memory(device: torch.device, seconds: float) -> tuple[float, int]:
    """Return bytes per second of copies for some seconds, and how many words of eight bytes did not keep a pattern."""
    size = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    source, copy = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    words = [int.from_bytes(bytes([pattern]) * 8, signed=True) for pattern in _PATTERNS]
    wrong, spent, count = 0, 0.0, 0
    ends = time.monotonic() + seconds  # to fill and compare takes several times as long as a copy
    while count < len(_PATTERNS) or time.monotonic() < ends:
        source.fill_(_PATTERNS[count % len(_PATTERNS)])
        _finish(device)
        began = time.perf_counter()
        copy.copy_(source)
        _finish(device)
        spent += time.perf_counter() - began
        wrong += int((copy.view(torch.int64) != words[count % len(words)]).sum())
        count += 1
    return 2 * size * count / spent, wrong


def measure_disk(folder: Path) -> tuple[float, int]:
    """Return bytes per second of a file that is written, flushed and read back, and 1 if it came back otherwise."""
    path, data = folder / f".doctor-{os.getpid()}.tmp", os.urandom(_DISK_BYTES)
    with path.open("w+b", buffering=0) as file:
        path.unlink()  # whatever ends this process, no file is left
        began = time.perf_counter()
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        read = file.readall()
        seconds = time.perf_counter() - began
    return 2 * _DISK_BYTES / seconds, int(hashlib.sha256(read).digest() != hashlib.sha256(data).digest())


def measure_link(rank: int, host: str, port: int, seconds: float, store: TCPStore | None = None) -> float:
    """Return bytes per second of sums over two machines. store: of this process, if it is rank 0."""
    patience = timedelta(seconds=_PAIR_SECONDS)
    store = store or TCPStore(host, port, is_master=False, timeout=patience)
    on_gpu = torch.cuda.is_available()
    if interface := interface_of(host if rank == 0 else address_towards(host)):  # as the ranks of a run have it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=2, timeout=patience)
    try:
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        values = torch.zeros(_LINK_ELEMENTS, device=device)
        dist.all_reduce(values)
        _finish(device)
        began, count, goes_on = time.perf_counter(), 0, torch.ones(1, device=device)
        while goes_on.item():
            dist.all_reduce(values)
            count += 1
            goes_on.fill_(float(rank == 0 and time.perf_counter() - began < seconds))
            dist.all_reduce(goes_on)  # rank 0 decides for both
        return values.nbytes * count / (time.perf_counter() - began)
    finally:
        dist.destroy_process_group()


def _for(seconds: float) -> Iterator[None]:
    """Go on for `seconds`, once at least."""
    ends = time.monotonic() + seconds
    yield
    while time.monotonic() < ends:
        yield


def _finish(device: torch.device) -> None:
    finish: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    finish()


if __name__ == "__main__":
    main()
