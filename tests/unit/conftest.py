"""Plug-ins of a test: files in a folder of its own, and nothing of them in the process afterwards."""

import sys
import sysconfig
from pathlib import Path

import pytest

import ingot
from ingot.plugins import load
from ingot.plugins.registry import INGOT, Registry

INSTALLED = tuple(str(Path(path)) for path in (*sysconfig.get_paths().values(), Path(ingot.__file__).parent))


@pytest.fixture
def process(monkeypatch, tmp_path_factory):
    """Undo, after the test, every change of sys.path, sys.modules, the registries and the loaded plug-ins.

    Modules of ingot and of installed packages stay: torch cannot be imported twice.
    """
    earlier = str(tmp_path_factory.getbasetemp())
    for name in [n for n, m in sys.modules.items() if str(vars(m).get("__file__") or "").startswith(earlier)]:
        del sys.modules[name]
    parts = {registry: dict(registry._entries) for registry in Registry.every}
    modules = dict(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(load, "_loaded", {})
    monkeypatch.setattr(load, "_folders", [])
    yield
    for registry in Registry.every:  # a registry may be imported first by the plug-in of the test
        own = {name: entry for name, entry in registry._entries.items() if entry.module == INGOT}
        registry._entries = parts.get(registry, own)
    for name in [name for name, module in sys.modules.items() if modules.get(name) is not module]:
        own = vars(sys.modules[name])  # attributes of torch.classes are made when they are asked for
        places = [own.get("__file__") or "", *own.get("__path__", ())]
        if any(place and not place.startswith(INSTALLED) for place in places):
            del sys.modules[name]


@pytest.fixture
def lab(process, tmp_path):
    """`lab(**files)` writes Python files below the folder of a run file, and returns the folder: lab(parts="x = 1")
    writes parts.py, lab(my="", my__parts="x = 1") the package my/__init__.py with the module my/parts.py.
    """
    folder = tmp_path / "lab"

    def write(**files: str):
        packages = {name.rpartition("__")[0] for name in files}
        for name, text in files.items():
            place = [*name.split("__"), *["__init__"] * (name in packages)]
            path = folder.joinpath(*place).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder

    return write
