"""Functions that the benchmarks share: alternating runs, CPU seconds of process trees, medians, and the JSON record."""

import ast
import contextlib
import ctypes
import datetime
import importlib.metadata
import os
import platform
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ingot.machine.facts import read_machine
from ingot.storage import write_json

RESULTS = Path(__file__).parent / "results"
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
T = TypeVar("T")


def alternate(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return wall-clock seconds per function and round.

    Every round runs each function once, so that a busy time of the machine affects all functions alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def tree_cpu_seconds(function: Callable[[], T]) -> tuple[T, float]:
    """Run `function`; return its result and the CPU seconds of all processes that it starts, at any depth.

    The kernel adds the time of a process to that of its parent when the parent waits for it. A process whose parent
    ends first would be waited for by init, and its time lost; here this process adopts it and waits for it (Linux).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    before = os.times()
    result = function()
    with contextlib.suppress(ChildProcessError):  # raised when no child is left
        while True:
            os.waitpid(-1, 0)
    after = os.times()
    return result, after.children_user + after.children_system - before.children_user - before.children_system


def running_cpu_seconds(roots: Iterable[int]) -> float:
    """Return the CPU seconds so far of the running processes `roots` and of all their descendants, from /proc.

    The time of descendants that have ended is in the figure if their parents waited for them.
    """
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended
        pid = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    tree = list(roots)
    for pid in tree:
        tree += children.get(pid, [])
    return sum(ticks.get(pid, 0) for pid in tree) / os.sysconf("SC_CLK_TCK")


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in seconds.items()}


def docstrings(limit_bytes: int) -> list[str]:
    """Return English text that every machine has: docstrings of the standard library, one document per module."""
    documents, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or size >= limit_bytes:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue  # the test files of the standard library hold broken sources on purpose
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        text = "\n\n".join(ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, kinds)).strip()
        if text:
            documents.append(text)
            size += len(text.encode())
    return documents


def record(name: str, results: object, packages: Sequence[str]) -> Path:
    """Write results/NAME.json: `results` with the date, the machine, the versions and the command; return its path."""
    path, machine = RESULTS / f"{name}.json", read_machine()
    write_json(
        path,
        {
            "date": datetime.date.today().isoformat(),
            "command": "python " + " ".join([str(_script()), *sys.argv[1:]]),
            "machine": {"cpu": machine.cpu, "cores": machine.cores, "load_average": round(os.getloadavg()[0], 2)},
            "versions": {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in packages},
            "results": results,
        },
    )
    return path


def _script() -> Path:
    """Return the path of the running benchmark, relative to the root of the project."""
    path = Path(sys.argv[0]).resolve()
    root = Path(__file__).resolve().parents[1]
    return path.relative_to(root) if path.is_relative_to(root) else path
