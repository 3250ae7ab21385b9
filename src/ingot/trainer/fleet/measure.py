"""The measurements of one machine, in a process of its own: `python -m ingot.trainer.fleet.measure FOLDER SECONDS`.

It reads requests from standard input, a JSON object per line, and answers each with one line. {"do": "machine"}: rates
and wrong results (fleet/judge.py). {"do": "open"}: {"port": P} of a store for a pair. {"do": "link", "rank": R, "host":
H, "port": P}: {"link": bytes per second} of sums over the pair.
"""

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ingot.trainer.launch.link import interface_of

_PATTERNS = (0x00, 0xFF, 0xAA, 0x55)
_DISK_BYTES = 64 << 20
_LINK_ELEMENTS = 4 << 20
_PAIR_SECONDS = 60.0  # that one of a pair waits for the other


def main() -> None:
    """Answer requests until standard input is closed."""
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    store: TCPStore | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "machine":
            answer = measure_machine(folder, seconds)
        elif request["do"] == "open":
            store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            answer = {"port": store.port}
        else:
            mine = store if request["rank"] == 0 else None
            answer = {"link": measure_link(request["rank"], request["host"], request["port"], seconds, mine)}
        print(json.dumps(answer), flush=True)


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
    """Return bytes per second of copies for some seconds, and how many bytes did not keep a pattern."""
    size = 4 << 30 if device.type == "cuda" else 128 << 20
    source, copy = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    wrong, spent, count = 0, 0.0, 0
    while count < len(_PATTERNS) or spent < seconds:
        source.fill_(_PATTERNS[count % len(_PATTERNS)])
        _finish(device)
        began = time.perf_counter()
        copy.copy_(source)
        _finish(device)
        spent += time.perf_counter() - began
        wrong += int((copy != _PATTERNS[count % len(_PATTERNS)]).sum())
        count += 1
    return 2 * size * count / spent, wrong


def measure_disk(folder: Path) -> tuple[float, int]:
    """Return bytes per second of a file that is written, flushed and read back, and 1 if it came back otherwise."""
    path, data = folder / f".doctor-{os.getpid()}.tmp", os.urandom(_DISK_BYTES)
    began = time.perf_counter()
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read = path.read_bytes()
        seconds = time.perf_counter() - began
    finally:
        path.unlink(missing_ok=True)
    return 2 * _DISK_BYTES / seconds, int(hashlib.sha256(read).digest() != hashlib.sha256(data).digest())


def measure_link(rank: int, host: str, port: int, seconds: float, store: TCPStore | None = None) -> float:
    """Return bytes per second of sums over two machines. store: of this process, if it is rank 0."""
    patience = timedelta(seconds=_PAIR_SECONDS)
    store = store or TCPStore(host, port, is_master=False, timeout=patience)
    on_gpu = torch.cuda.is_available()
    if interface := interface_of(host if rank == 0 else _own_address(host)):  # as the ranks of a run have it
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


def _own_address(host: str) -> str:
    """Return the address of this machine from which it reaches `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # nothing is sent
        return probe.getsockname()[0]


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
    with contextlib.suppress(KeyboardInterrupt):
        main()
