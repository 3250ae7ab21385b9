"""The facts of a machine, and the checks of doctor."""

import os
import shutil
import signal
import socket

import pytest

from ingot.machine import doctor, facts
from ingot.machine.facts import Gpu, Machine, parse_gpus, read_machine, this_cluster, visible_gpus
from ingot.machine.processes import identity_of, is_gone

GIB = 1024**3
MIXED = (Gpu("A", 1, ""), Gpu("B", 1, ""))
GOOD = Machine(cores=4, cpu="some", memory_bytes=16 * GIB, available_bytes=12 * GIB, gpus=())


def test_this_machine_is_read():
    machine = read_machine()
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert 0 < machine.available_bytes <= machine.memory_bytes


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_a_containers_cpu_quota_counts(tmp_path, files, cores):
    write(tmp_path, files)
    assert facts._cpu_quota(tmp_path) == cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (8 * GIB, 6 * GIB)),
        ({"memory.max": str(2 * GIB), "memory.current": str(GIB // 2)}, (2 * GIB, 2 * GIB - GIB // 2)),
        ({"memory.max": "max"}, (8 * GIB, 6 * GIB)),
        ({"memory/memory.limit_in_bytes": str(9223372036854771712)}, (8 * GIB, 6 * GIB)),
        ({"memory/memory.limit_in_bytes": str(4 * GIB), "memory/memory.usage_in_bytes": "0"}, (4 * GIB, 4 * GIB)),
    ],
)
def test_a_containers_memory_limit_counts(tmp_path, files, expected):
    write(tmp_path, files)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable: {6 * GIB // 1024} kB\n")
    assert facts.host_memory(tmp_path, meminfo) == expected


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_gpus_are_parsed_and_hidden_ones_left_out():
    gpus = parse_gpus("NVIDIA H200, 143771, 550.54\nNVIDIA H200, 143771, 550.54\ngarbage\n")
    assert gpus == (Gpu("NVIDIA H200", 143771 * 2**20, "550.54"),) * 2
    assert [len(visible_gpus(gpus, v)) for v in (None, "", "1", "0,1", "7,0", "-1", "GPU-aa,GPU-bb")] == [
        2, 0, 1, 2, 0, 0, 2,
    ]  # fmt: skip


def test_a_machine_becomes_a_cluster():
    cpu = this_cluster(GOOD)
    assert (cpu.device, cpu.devices_per_node, cpu.memory_bytes) == ("cpu", 2, 16 * GIB)
    gpu = this_cluster(Machine(cores=4, cpu="", memory_bytes=GIB, available_bytes=GIB, gpus=(Gpu("X", 80, "1"),) * 8))
    assert (gpu.device, gpu.devices_per_node, gpu.memory_bytes, gpu.device_name) == ("cuda", 8, 80, "X")
    assert this_cluster(GOOD, ranks=3).devices == 3


def statuses(checks):
    return {c.name: c.status for c in checks}


def test_every_problem_comes_with_its_way_out(tmp_path):
    checks = doctor.examine(GOOD, tmp_path)
    assert all(c.found and (c.status == "ok" or c.fix) for c in checks)
    assert statuses(checks)["cores"] == "ok" and len(checks) >= 12


@pytest.mark.parametrize(
    ("machine", "name", "status"),
    [
        (Machine(cores=1, cpu="", memory_bytes=8 * GIB, available_bytes=8 * GIB, gpus=()), "cores", "warn"),
        (Machine(cores=2, cpu="", memory_bytes=8 * GIB, available_bytes=2 * GIB, gpus=()), "memory", "warn"),
        (Machine(cores=2, cpu="", memory_bytes=GIB, available_bytes=GIB // 2, gpus=()), "memory", "fail"),
        (
            Machine(cores=2, cpu="", memory_bytes=8 * GIB, available_bytes=8 * GIB, gpus=MIXED),
            "gpus",
            "warn",
        ),
    ],
)  # fmt: skip
def test_weak_machines(tmp_path, machine, name, status):
    assert statuses(doctor.examine(machine, tmp_path))[name] == status


def test_a_full_disk_and_a_folder_not_made_yet(tmp_path, monkeypatch):
    assert statuses(doctor.examine(GOOD, tmp_path / "not" / "there"))["disk"] == "ok"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    assert statuses(doctor.examine(GOOD, tmp_path))["disk"] == "fail"


def test_missing_and_old_torch(tmp_path, monkeypatch):
    for version, status in ((None, "warn"), ("2.4.1", "fail"), ("2.13.0+cpu", "ok")):
        monkeypatch.setattr(doctor, "_version", lambda package, v=version: v)
        assert statuses(doctor.examine(GOOD, tmp_path))["torch"] == status


def test_a_host_without_loopback(tmp_path, monkeypatch):
    def nowhere(name):
        raise OSError("no such host")

    monkeypatch.setattr(socket, "gethostbyname", nowhere)
    assert statuses(doctor.examine(GOOD, tmp_path))["loopback"] == "fail"


def test_looking_at_the_machine_needs_no_torch(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from ingot.machine.facts import read_machine;"
        "from ingot.machine.doctor import examine; examine(read_machine(), Path('.'));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60)


def test_a_process_whose_exit_code_nobody_has_read_is_gone():
    """Such as under a container whose first process reads none."""
    child = os.fork()
    if child == 0:
        signal.pause()
    process = identity_of(child)
    assert process and not is_gone(process)
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert is_gone(process)
    os.waitpid(child, 0)
    assert is_gone(process)
