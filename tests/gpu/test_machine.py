"""The state of a real card: its counters by nvidia-smi and NVML, the checks of `ingot doctor`, and its rates."""

import json
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ingot.machine.health.nvidia import NvidiaSmi
from ingot.machine.health.report import HealthReport
from ingot.machine.health.sources import concerns, open_sources, own_gpus
from ingot.trainer.fleet.measure import measure_matmul, measure_memory
from ingot.trainer.record import device_uuid
from ingot.trainer.telemetry.device_watch import DeviceWatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_smi = pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="needs nvidia-smi")

# No device is outside of them: from a small card to several times an H200 (990 TFLOP/s in bf16, 4.8 TB/s).
FLOPS, MEMORY_BYTES, DISK_BYTES = (1e12, 5e15), (5e10, 2e13), (1e6, 1e12)
SECONDS = 30.0


def ask(field: str) -> list[str]:
    """Return a field of nvidia-smi of each card."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split("\n")[:-1]


def doctor(*options: str) -> dict:
    """Return the result of `ingot doctor`, which has to find a sound machine."""
    command = [sys.executable, "-m", "ingot.cli.main", "doctor", "--json", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@needs_smi
def test_nvidia_smi_knows_all_fields_and_its_counters_are_numbers():
    source = NvidiaSmi()
    reports, ends = source.poll(), time.monotonic() + SECONDS
    try:
        while source._running is not None and time.monotonic() < ends:
            time.sleep(0.05)
            reports += source.poll()
    finally:
        source.close()
    assert not [report.words for report in reports if report.kind == "silent_source"]
    counters = {field for _, field in source._before}
    devices = {device for device, _ in source._before}
    if "Enabled" in ask("ecc.mode.current"):
        assert counters == {f"ecc.errors.{kind}.volatile.total" for kind in ("corrected", "uncorrected")}
        assert devices == {f"GPU {bus}" for bus in ask("pci.bus_id")}


@needs_smi
def test_reports_of_the_own_card_count_and_those_of_others_do_not():
    assert NvidiaSmi.name in {source.name for source in open_sources()}
    (address,) = own_gpus({"CUDA_VISIBLE_DEVICES": "0"}) or {""}
    assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}", address)
    own, other = (HealthReport(kind="xid", device=f"GPU {bus}", code=79) for bus in (ask("pci.bus_id")[0], "0:ff:1f.0"))
    assert concerns(own, frozenset({address})) and not concerns(other, frozenset({address}))


def test_nvml_reads_errors_heat_and_memory_of_this_device():
    pytest.importorskip("pynvml", reason="needs ingot[nvml]")
    kept = torch.zeros(1 << 28, device="cuda")  # 1 GiB
    uuid = device_uuid(torch.device("cuda", torch.cuda.current_device()))
    assert uuid is not None
    watch = DeviceWatch(uuid, every=0.2)
    try:
        ends = time.monotonic() + SECONDS
        while not (values := watch.values()) and time.monotonic() < ends:
            time.sleep(0.05)
    finally:
        watch.close()
    assert 5 < values["device/temperature_celsius"] < 110
    assert 5 < values["device/power_watts"] <= 1.5 * values["device/power_limit_watts"]
    assert values["device/memory_bytes"] >= kept.nbytes and values["device/sm_clock_mhz"] > 100
    for name in ("device/ecc_corrected", "device/ecc_uncorrected"):  # absent on cards without ECC
        assert values.get(name, 0.0) >= 0 and float(values.get(name, 0.0)).is_integer()


@needs_smi
def test_the_doctor_names_the_card_and_finds_it_sound():
    (check,) = (one for one in doctor()["checks"] if one["name"] == "gpus")
    assert check["status"] == "ok" and ask("name")[0] in check["found"]


def test_the_doctor_measures_the_device_of_this_machine(tmp_path):
    result = doctor(str(tmp_path), "--nodes", "1")
    (one,) = result["fleet"]
    assert result["unfit"] == [] and set(one["wrong"].values()) == {0}
    for name, (least, most) in {"matmul": FLOPS, "memory": MEMORY_BYTES, "disk": DISK_BYTES}.items():
        assert least < one["rates"][name] < most, name


class Flips(TorchFunctionMode):
    """Flips a bit in the results of one function, from the second call on."""

    def __init__(self, *names: str):
        super().__init__()
        self.names, self.calls = names, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in self.names:
            self.calls += 1
            if self.calls > 1:
                with torch._C.DisableTorchFunction():
                    result.view(torch.int16 if result.itemsize == 2 else torch.uint8).view(-1)[-1] ^= 1
        return result


@pytest.mark.parametrize(
    ("measure", "names", "rates"),
    [(measure_matmul, ("matmul", "__matmul__"), FLOPS), (measure_memory, ("copy_",), MEMORY_BYTES)],
)
def test_equal_work_has_equal_bits_at_the_rate_of_a_device_and_a_wrong_bit_is_counted(measure, names, rates):
    device = torch.device("cuda")
    rate, wrong = measure(device, 0.5)
    assert wrong == 0 and rates[0] < rate < rates[1]
    with Flips(*names) as flips:
        _, wrong = measure(device, 0.2)
    assert wrong == flips.calls - 1 > 0
