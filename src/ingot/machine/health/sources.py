"""The sources of health reports that this machine has."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ingot.machine.facts import Gpu, visible_gpus
from ingot.machine.health.kernel_log import KernelLog
from ingot.machine.health.nvidia import NvidiaSmi
from ingot.machine.health.report import HealthProvider, HealthReport
from ingot.machine.health.report_file import ReportFile

_GPU = "GPU "  # devices that are GPUs begin with it


def open_sources(*files: Path) -> list[HealthProvider]:
    """Return the sources of this machine: the kernel's log if this user may read it, nvidia-smi if it is installed, and
    `files`."""
    sources: list[HealthProvider] = [ReportFile(file) for file in files]
    for make in (KernelLog, NvidiaSmi):
        with contextlib.suppress(OSError):
            sources.append(make())
    return sources


def own_gpus(environment: Mapping[str, str] = os.environ) -> frozenset[str] | None:
    """Return the bus addresses of the GPUs that CUDA_VISIBLE_DEVICES gives to this process; None if it has them all, or
    if that cannot be found out."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not visible or not visible.replace(",", "").replace(" ", "").isdigit() or not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    buses = tuple(Gpu(line.strip(), 0, "") for line in answer.splitlines() if line.strip())
    return frozenset(bus_address(gpu.name) for gpu in visible_gpus(buses, visible))


def concerns(report: HealthReport, gpus: frozenset[str] | None) -> bool:
    """Return whether a report is about this process's machine or one of its GPUs, not about a GPU of another job."""
    if gpus is None or not report.device.startswith(_GPU) or ":" not in report.device:
        return True
    return bus_address(report.device.removeprefix(_GPU)) in gpus


def bus_address(text: str) -> str:
    """Return domain, bus and device of a PCI address, in one form: nvidia-smi writes 00000000:3B:00.0, the kernel
    0000:3b:00."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"
