"""A clock of one module: `time.sleep` belongs to all threads of the process, also to those an earlier test left."""

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest


def own_time(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **functions: Callable[..., object]) -> None:
    """`time.NAME` is `functions[NAME]` in this module; nobody else sees a change."""
    assert "time" in vars(module), f"{module.__name__} does not import time"
    monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), **functions}))
