"""Errors of plug-ins during a run. An error of their code ends a run for good: a restart would repeat it. A rank or a
device that was lost while a plug-in waited for it costs a restart, as always."""

import contextlib
import re
from collections.abc import Callable, Iterator

import torch

from ingot.errors import IngotError, RunFailed
from ingot.plugins.load import frame_of, last_line, place_of
from ingot.trainer.resilience.leaving import is_about_a_peer

_DeviceError: type[Exception] = getattr(torch, "AcceleratorError", IngotError)  # torch 2.8 and later
_DEVICE = re.compile(r"CUDA error|CUDA driver|cuBLAS|cuDNN|CUBLAS_|CUDNN_|NVML", re.I)  # a device that fails
# (what was raised, with its place; file; line) -> the error that ends the run
MadeError = Callable[[str, str, int], IngotError]


@contextlib.contextmanager
def blamed(made: MadeError) -> Iterator[None]:
    """Turn an error of a plug-in's code into the one that `made` returns."""
    try:
        yield
    except (IngotError, _DeviceError):
        raise
    except Exception as error:
        if is_about_a_peer(str(error)) or _DEVICE.search(str(error)):
            raise
        _, file, line = frame_of(error) or ("", *place_of(error))
        raise made(f"raised {last_line(error)}" + (f" ({file}:{line})" if file else ""), file, line) from error


@contextlib.contextmanager
def plugins_blamed() -> Iterator[None]:
    """Turn an error that was raised while code of a plug-in ran, such as a layer, into a RunFailed that names it."""
    try:
        yield
    except (IngotError, _DeviceError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        place = frame_of(error)
        if place is None or is_about_a_peer(str(error)) or _DEVICE.search(str(error)):
            raise
        plugin, file, line = place
        raise RunFailed(
            "E-PLUGIN-RAISED",
            f"plug-in {plugin!r} raised {last_line(error)} ({file}:{line})",
            rule="an error of a plug-in's code ends the run: a restart would repeat it",
            fix="correct the plug-in, then run the same command again: it continues from the last checkpoint",
            plugin=plugin,
            file=file,
            line=line,
        ) from error
