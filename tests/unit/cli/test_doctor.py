"""`ingot doctor --plugins` from a user's view."""

import json
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from tests.expect import reported

from ingot.cli.main import main
from ingot.plugins import load

PART = """
print("imported")
from dataclasses import dataclass
from ingot.plugins.schedule import SCHEDULES, SchedulePart

@dataclass(frozen=True, kw_only=True)
class Options:
    power: float = 0.5

SCHEDULES.register(SchedulePart(name="power_law", rate=lambda *args: 1.0, settings=Options))
"""
FILTER = """
from ingot.plugins.filters import FILTERS, Filter

FILTERS.register(Filter(name="digits", make=lambda settings: None))
"""


@pytest.fixture
def project(lab, monkeypatch):
    """A folder with a run file, a recipe and their plug-in; and one short name that a distribution offers."""
    point = EntryPoint("lab-parts", "lab_parts", load.GROUP)._for(SimpleNamespace(name="lab", version="2.1"))
    monkeypatch.setattr(load, "entry_points", lambda group: [point])
    folder = lab(power_law_parts=PART, broken_parts="x = 1\n1 / 0\n")
    for name in ("run.toml", "recipe.toml"):
        (folder / name).write_text('[plugins]\nmodules = ["power_law_parts"]\n')
    (folder / "broken.toml").write_text('[plugins]\nmodules = ["broken_parts"]\n')
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("file", ["run.toml", "recipe.toml", "."])
def test_plug_ins_of_a_file_are_listed(project, capsys, file):
    assert main(["doctor", "--plugins", file]) == 0
    text = capsys.readouterr().out
    for word in ("power_law_parts.py", "learning-rate schedule", "'power_law'", "schedule.kind", "power", "0.5"):
        assert word in text
    assert "lab-parts" in text and "imported" not in text and "Next:" not in text


def test_plug_ins_as_json(project, capsys):
    assert main(["doctor", "--plugins", "run.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (plugin,) = found["plugins"]
    assert plugin["name"] == plugin["module"] == "power_law_parts" and plugin["version"] == ""
    assert plugin["file"] == str(project / "power_law_parts.py") and len(plugin["code"]) == 16
    (part,) = plugin["parts"]
    assert part["settings"] == [{"name": "power", "type": "a number", "default": "0.5"}]
    assert found["installed"] == [{"name": "lab-parts", "module": "lab_parts", "distribution": "lab", "version": "2.1"}]


def test_a_file_is_not_answered_with_what_is_not_installed(project, monkeypatch, capsys):
    """Compares lines: without installed plug-ins, only the command without FILE reports that there are none."""
    monkeypatch.setattr(load, "entry_points", lambda group: [])
    (project / "power_law_parts.py").write_text(PART + FILTER)
    assert main(["doctor", "--plugins", "run.toml"]) == 0
    text = capsys.readouterr().out
    assert "filter 'digits', switched on by [filter.digits]" in text and "installed" not in text
    assert main(["doctor", "--plugins"]) == 0
    assert "installed" in capsys.readouterr().out


def test_without_a_file_nothing_is_imported(project, capsys):
    assert main(["doctor", "--plugins", "--json"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["plugins"] == [] and "imported" not in found.err


def test_a_plug_in_that_cannot_be_imported_is_an_error(project, capsys):
    assert main(["doctor", "--plugins", "broken.toml", "--json"]) == 3
    reported(capsys.readouterr().out, "E-PLUGIN-IMPORT", module="broken_parts", line=2)


def test_plug_ins_and_the_benchmark_exclude_each_other(project, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--plugins", "run.toml", "--bench"])
    assert stop.value.code == 2
