"""Traces written by hand, in the format that torch's profiler exports."""

from typing import Any

from ingot.rehearse.profile.trace import WINDOW

MAIN, BACKWARD = 11, 12
STREAM, NCCL_STREAM = 7, 20


def host(name: str, begin: float, end: float, *, thread: int = MAIN, cat: str = "cpu_op", **args) -> dict[str, Any]:
    """Return an event of the host. Times in microseconds; args: Input_Dims stands for "Input Dims"."""
    facts = {key.replace("_", " "): value for key, value in args.items()}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": begin,
        "dur": end - begin,
        "args": facts,
    }


def noted(name: str, begin: float, end: float, **more) -> dict[str, Any]:
    return host(name, begin, end, cat="user_annotation", **more)


def launch(number: int, at: float, **more) -> dict[str, Any]:
    return host("cudaLaunchKernel", at, at + 1, cat="cuda_runtime", correlation=number, **more)


def kernel(name: str, begin: float, end: float, number: int = 0, *, stream: int = STREAM, group: str = "") -> dict:
    """Return a kernel of the device. number: of its launch; 0: none is in the trace. group: of an exchange."""
    args = ({"correlation": number} if number else {}) | ({"Process Group Name": group} if group else {})
    event = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": begin, "dur": end - begin}
    return event | {"args": args}


def window(begin: float, end: float) -> dict[str, Any]:
    return noted(WINDOW, begin, end)
