import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from ingot.schema.metrics import METRICS
from ingot.trainer.telemetry.device_watch import DeviceWatch

DEVICE = {metric.name for metric in METRICS if metric.name.startswith("device/")}


class NVMLError(Exception):
    def __init__(self, value):
        self.value = value


def known_gpu(uuid: str) -> str:
    if uuid != "GPU-1":
        raise NVMLError(6)  # NVML_ERROR_NOT_FOUND
    return "gpu"


def bindings(**changes) -> ModuleType:
    """A module like pynvml, with one GPU."""
    found = ModuleType("pynvml")
    counts = {0: 3, 1: 1}
    vars(found).update(
        NVMLError=NVMLError,
        NVML_ERROR_NOT_SUPPORTED=3,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        NVML_MEMORY_ERROR_TYPE_CORRECTED=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=known_gpu,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=93, memory=40),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=17, total=80),
        nvmlDeviceGetPowerUsage=lambda gpu: 651_500,
        nvmlDeviceGetEnforcedPowerLimit=lambda gpu: 700_000,
        nvmlDeviceGetClockInfo=lambda gpu, clock: {1: 1755, 2: 2619}[clock],
        nvmlDeviceGetTemperature=lambda gpu, sensor: 64,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 4,
        nvmlDeviceGetTotalEccErrors=lambda gpu, kind, counter: counts[kind],
    )
    vars(found).update(changes)
    return found


@pytest.fixture
def watch(monkeypatch):
    """watch(uuid, module) -> a watch of this GPU that reads all the time, after its first reading."""
    started = []

    def make(uuid="GPU-1", module=None):
        monkeypatch.setitem(sys.modules, "pynvml", module or bindings())
        one = DeviceWatch(uuid, every=0.01)
        started.append(one)
        return one

    yield make
    for one in started:
        one.close()
        one._thread.join(30)


def reading(one: DeviceWatch) -> dict[str, float]:
    deadline = time.monotonic() + 30
    while not one._newest[1]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return one._newest[1]


def test_all_numbers_of_a_gpu(watch):
    assert reading(watch()) == {
        "device/utilization": 0.93,
        "device/memory_bytes": 17,
        "device/power_watts": 651.5,
        "device/power_limit_watts": 700,
        "device/sm_clock_mhz": 1755,
        "device/memory_clock_mhz": 2619,
        "device/temperature_celsius": 64,
        "device/throttle_reasons": 4,
        "device/ecc_corrected": 3,
        "device/ecc_uncorrected": 1,
    }


def refuses(*_):
    raise NVMLError(3)


def test_what_a_gpu_does_not_have_is_left_out(watch):
    module = bindings(nvmlDeviceGetTotalEccErrors=refuses)
    del module.nvmlDeviceGetCurrentClocksThrottleReasons
    missing = {"device/ecc_corrected", "device/ecc_uncorrected", "device/throttle_reasons"}
    assert DEVICE - reading(watch(module=module)).keys() == missing


def test_an_error_that_passes_costs_one_reading_of_its_number(watch):
    calls = []

    def temperature(gpu, sensor):
        calls.append(sensor)
        if len(calls) == 1:
            raise NVMLError(999)
        return 64

    one = watch(module=bindings(nvmlDeviceGetTemperature=temperature))
    reading(one)
    deadline = time.monotonic() + 30
    while "device/temperature_celsius" not in one._newest[1]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert one._newest[1].keys() == DEVICE


@pytest.mark.parametrize("module", [None, bindings(nvmlInit=refuses)], ids=["not installed", "no driver"])
def test_without_nvml_nothing_is_read(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "pynvml", module)  # None: the import fails
    one = DeviceWatch("GPU-1")
    one._thread.join(30)
    assert not one._thread.is_alive() and one.values() == {}


def test_a_gpu_that_nvml_does_not_know_ends_the_watch(watch):
    one = watch("GPU-2")
    one._thread.join(30)
    assert not one._thread.is_alive() and one.values() == {}


def test_a_driver_that_hangs_keeps_nobody_and_its_last_reading_ages(watch):
    calls, released = [], threading.Event()

    def power(gpu):
        calls.append(gpu)
        if len(calls) > 1:
            released.wait(30)
        return 1000

    one = watch(module=bindings(nvmlDeviceGetPowerUsage=power))
    assert reading(one)["device/power_watts"] == 1.0
    deadline = time.monotonic() + 30
    while one.values() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert one.values() == {}
    one.close()  # returns
    assert one._thread.is_alive()
    released.set()
