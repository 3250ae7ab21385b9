"""Plug-ins of a test: files in a folder of its own, and nothing of them in the process afterwards."""

import pytest

from ingot.plugins import load


@pytest.fixture
def process(monkeypatch):
    """A process that has loaded no plug-ins yet; what the test loads is forgotten afterwards, as after every test."""
    monkeypatch.setattr(load, "_loaded", {})
    monkeypatch.setattr(load, "_folders", [])


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
