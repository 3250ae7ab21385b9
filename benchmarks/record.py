"""Shared by the benchmarks: alternating runs, medians, and a JSON record that says where the figures come from."""

import ast
import datetime
import importlib.metadata
import os
import platform
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ingot.machine.facts import read_machine
from ingot.storage import write_json

RESULTS = Path(__file__).parent / "results"


def alternate(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Wall seconds per function and round. Every round runs each once, in turn, so that a busy spell hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in seconds.items()}


def docstrings(limit_bytes: int) -> list[str]:
    """English text that every machine has: docstrings of the standard library, one document per module."""
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
    """Write results/NAME.json with date, machine, versions and command beside `results`."""
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
    """The running benchmark, as it is called from the project's root."""
    path = Path(sys.argv[0]).resolve()
    root = Path(__file__).resolve().parents[1]
    return path.relative_to(root) if path.is_relative_to(root) else path
