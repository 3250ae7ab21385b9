"""The state of a rank's GPU, read from NVML every ten seconds: use, power, clocks, temperature and memory errors.

A thread reads it, because a call into a driver can hang. The Python bindings are an optional part (ingot[nvml]);
without them, and on machines without NVML, nothing is read. No torch.
"""

import contextlib
import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

READ_SECONDS = 10.0
_FRESH = 3  # readings that may be missing before the last one counts no more
# name of the number -> how it is read from the bindings and the handle of a GPU
_READERS: dict[str, Callable[[Any, Any], float]] = {
    "device/utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "device/memory_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "device/power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "device/power_limit_watts": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "device/sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "device/memory_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "device/temperature_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "device/throttle_reasons": lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
    "device/ecc_corrected": lambda nvml, gpu: _errors(nvml, gpu, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
    "device/ecc_uncorrected": lambda nvml, gpu: _errors(nvml, gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
}


def _errors(nvml: Any, gpu: Any, kind: int) -> float:
    return nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, nvml.NVML_VOLATILE_ECC)


class DeviceWatch:
    """The watch of one GPU, from now on until `close`.

    uuid: its identity in NVML, like GPU-5f3b.... every: seconds between two readings.
    """

    def __init__(self, uuid: str, every: float = READ_SECONDS):
        self._uuid, self._every = uuid, every
        self._newest: tuple[float, dict[str, float]] = 0.0, {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="device", daemon=True)
        self._thread.start()

    def values(self) -> dict[str, float]:
        """Return the numbers of the newest reading by name; {} if there was none for a while. Does not wait."""
        read_at, values = self._newest
        return values if time.monotonic() - read_at < _FRESH * self._every else {}

    def close(self) -> None:
        """End the thread, without waiting for it: it may hang in a driver."""
        self._ends.set()

    def _watch(self) -> None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:  # there is no driver
            return
        try:
            gpu = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            readers = dict(_READERS)
            while readers and not self._ends.is_set():
                values: dict[str, float] = {}
                for name in list(readers):
                    try:
                        values[name] = float(readers[name](nvml, gpu))
                    except AttributeError:  # these bindings have it not
                        del readers[name]
                    except (nvml.NVMLError, TypeError, ValueError) as error:
                        if getattr(error, "value", None) == nvml.NVML_ERROR_NOT_SUPPORTED:  # other errors may pass
                            del readers[name]
                self._newest = time.monotonic(), values
                self._ends.wait(self._every)
        except nvml.NVMLError:  # NVML does not know the device, as a part of one (MIG)
            return
        finally:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
