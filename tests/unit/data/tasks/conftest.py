"""Processes to kill."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest


def _parents() -> dict[int, int]:
    """pid -> parent of every process that is no zombie."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                state, parent = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                found[int(folder.name)] = int(parent)
    return found


@pytest.fixture
def children() -> Callable[[int], list[int]]:
    """`children(pid)`: the living children of a process, by number."""
    return lambda pid: sorted(child for child, parent in _parents().items() if parent == pid)


@pytest.fixture
def until() -> Callable[..., None]:
    """`until(condition)` waits for it to be true, and fails after some seconds."""

    def wait(condition: Callable[[], object], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s"
            time.sleep(0.01)

    return wait


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """`alive(pid)`: whether it runs; a zombie does not."""
    return lambda pid: pid in _parents()
