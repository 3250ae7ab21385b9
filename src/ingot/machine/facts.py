"""Facts about this machine (cores, memory, accelerators), read from the system without torch, and the machine file: a
Cluster as JSON, which `doctor --bench` writes and `plan --cluster` reads.

Limits of the container (cgroup v1 and v2, CPU affinity) are taken into account, because a process cannot use more.
"""

import json
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ingot.config import from_dict, to_dict
from ingot.errors import ConfigError
from ingot.schema.cluster import Cluster
from ingot.storage import write_json

_MIB = 1024**2
# Assumed memory of a CPU rank before its model, if it was not measured: interpreter, torch and gloo (340-352 MiB seen).
_CPU_RUNTIME_BYTES = 350 * _MIB
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes a huge number for "no limit"


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi reports it. memory_bytes: total memory. driver: version of the driver."""

    name: str
    memory_bytes: int
    driver: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine. cores: number of cores that this process may use. cpu: name of the processor. memory_bytes: total
    memory that processes may use; available_bytes: memory that is free now.
    """

    cores: int
    cpu: str
    memory_bytes: int
    available_bytes: int
    gpus: tuple[Gpu, ...]


def read_machine() -> Machine:
    total, available = host_memory()
    return Machine(
        cores=usable_cores(),
        cpu=_cpu_name(),
        memory_bytes=total,
        available_bytes=available,
        gpus=find_gpus(),
    )


def this_cluster(machine: Machine, ranks: int = 0) -> Cluster:
    """Return this machine as a Cluster without rates, which is enough to plan memory, but not time.

    ranks: number of processes to plan for; 0: one per GPU, or up to two on the CPU.
    """
    if machine.gpus:
        gpu = machine.gpus[0]
        return Cluster(
            name=socket.gethostname(),
            device="cuda",
            devices_per_node=ranks or len(machine.gpus),
            memory_bytes=gpu.memory_bytes,
            host_memory_bytes=machine.memory_bytes,
            device_name=gpu.name,
        )
    return Cluster(
        name=socket.gethostname(),
        device="cpu",
        devices_per_node=ranks or min(machine.cores, 2),
        memory_bytes=machine.memory_bytes,
        runtime_bytes=_CPU_RUNTIME_BYTES,
    )


def usable_cores() -> int:
    """Return the number of cores that this process may use, from its affinity and the container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    return max(1, min(cores, int(quota))) if quota else cores


def _cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    v2 = _read(root / "cpu.max").split()
    if len(v2) == 2 and v2[0] != "max":
        return int(v2[0]) / int(v2[1])
    quota, period = _read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def host_memory(root: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """Return (total, available) bytes of memory, both at most the container's limit."""
    values = {}
    for line in _read(meminfo).splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    total = values.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = values.get("MemAvailable", total)
    for limit_file, used_file in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ):
        limit = _read(limit_file)
        if limit.isdigit() and int(limit) < min(total, _NO_LIMIT_BYTES):
            total = int(limit)
            used = _read(used_file)
            available = min(available, total - int(used) if used.isdigit() else total)
    return total, available


def find_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES allows; none without nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return ()
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return ()  # no GPU can be used; the doctor's check of GPUs reports the reason
    return visible_gpus(parse_gpus(answer), os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(answer: str) -> tuple[Gpu, ...]:
    """Parse the output of nvidia-smi, with lines such as 'NVIDIA H200, 143771, 550.54' (name, MiB, driver)."""
    gpus = []
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[1].isdigit():
            gpus.append(Gpu(fields[0], int(fields[1]) * _MIB, fields[2]))
    return tuple(gpus)


def visible_gpus(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA shows if CUDA_VISIBLE_DEVICES is `visible` (None: not set).

    As in CUDA, the list ends at the first invalid entry. UUIDs are not looked up: each counts as a GPU like the first.
    """
    if visible is None:
        return gpus
    chosen = []
    for word in (w.strip() for w in visible.split(",")):
        if word.isdigit() and int(word) < len(gpus):
            chosen.append(gpus[int(word)])
        elif word.startswith(("GPU-", "MIG-")) and gpus:
            chosen.append(gpus[0])
        else:
            break
    return tuple(chosen)


def _cpu_name() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _read(path: Path) -> str:
    """Return the text of a file without white space at its ends, or "" if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# -- the machine file --


def write_cluster(path: Path, cluster: Cluster) -> None:
    write_json(path, to_dict(cluster))


def read_cluster(path: Path) -> Cluster:
    """Read a machine file. Raises ConfigError if the file is missing or invalid."""
    fix = "write one with `ingot doctor --bench`"
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            "E-MACHINE-MISSING",
            f"there is no machine file at {path}",
            rule="--cluster takes the name of a cluster (8xh100) or the path of a machine file",
            fix=fix,
            path=str(path),
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            "E-MACHINE-UNREADABLE",
            f"{path} cannot be read ({error})",
            rule="a machine file is one JSON object",
            fix=fix,
            path=str(path),
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            "E-MACHINE-UNREADABLE",
            f"{path} does not contain a JSON object",
            rule="a machine file is one JSON object",
            fix=fix,
            path=str(path),
            found=type(values).__name__,
        )
    return from_dict(Cluster, values, where=lambda key: f"{path} ({key})")
