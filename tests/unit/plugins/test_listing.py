"""The description of plug-ins that a file names: their parts with settings, and the names that installed ones offer."""

import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

from tests.expect import refused

from ingot.plugins import load
from ingot.plugins.listing import ListedPart, ListedSetting, OfferedPlugin, list_plugins, offered_plugins
from ingot.plugins.load import code_of

PARTS = """
from dataclasses import dataclass, field
from typing import Literal
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback
from ingot.plugins.filters import FILTERS, Filter
from ingot.plugins.schedule import SCHEDULES, SchedulePart
from ingot.ranges import Steps

@dataclass(frozen=True, kw_only=True)
class Options:
    timescale: Steps
    way: Literal["up", "down"] = "up"
    words: tuple[str, ...] = ("a", "b")
    table: dict[str, float] = field(default_factory=dict)
    more: int | None = None

CALLBACKS.register(CallbackPart(name="watch", make=StepCallback))
SCHEDULES.register(SchedulePart(name="inverse", rate=lambda *args: 1.0, settings=Options))
FILTERS.register(Filter(name="odd", make="no_such_module:Odd", rules=("odd.rule",)))
"""


def test_a_plug_in_is_described_with_its_parts_and_settings(lab):
    folder = lab(parts=PARTS)
    (folder / "run.toml").write_text('[plugins]\nmodules = ["parts"]\n')
    for file in (folder / "run.toml", folder):
        (plugin,) = list_plugins(file)
        assert (plugin.name, plugin.module, plugin.version) == ("parts", "parts", "")
        assert (plugin.file, plugin.code) == (str(folder / "parts.py"), code_of("parts", folder / "parts.py"))
        parts = {part.name: part for part in plugin.parts}
        assert parts["watch"] == ListedPart("callback", "watch", "[callbacks.watch]", ())
        assert (parts["odd"].kind, parts["odd"].key) == ("filter", "[filter.odd]")
        assert parts["inverse"].key == "schedule.kind"
        assert parts["inverse"].settings == (
            ListedSetting("timescale", "a whole number from 0 to 1,000,000,000", None),
            ListedSetting("way", "one of 'up', 'down'", '"up"'),
            ListedSetting("words", 'a list like ["text", ...]', '["a", "b"]'),
            ListedSetting("table", "a section of keys and values, { name = 0.5 }", "{  }"),
            ListedSetting("more", "a whole number or absent", "absent"),
        )


def test_only_the_table_plugins_is_read(lab):
    """Recipes and run files that are not finished are described as well."""
    folder = lab(parts="")
    (folder / "recipe.toml").write_text(
        'nonsense = 1\n[plugins]\nmodules = ["parts"]\nfolder = "."\n[optim]\nlr = "x"\n'
    )
    (plugin,) = list_plugins(folder / "recipe.toml")
    assert plugin.parts == ()


def test_plug_ins_are_looked_for_in_their_folder(lab, tmp_path):
    lab(parts="")
    (tmp_path / "run.toml").write_text('[plugins]\nmodules = ["parts"]\nfolder = "lab"\n')
    assert [plugin.name for plugin in list_plugins(tmp_path / "run.toml")] == ["parts"]


def test_a_file_without_plug_ins(lab, tmp_path):
    (tmp_path / "run.toml").write_text('name = "x"\n')
    assert list_plugins(tmp_path / "run.toml") == []


def test_mistakes_have_their_line(lab, tmp_path):
    folder = lab(parts="1 / 0\n")
    (file := folder / "run.toml").write_text('[plugins]\nmodules = ["parts"]\nfolde = "x"\n')
    with refused("E-CONFIG-SETTINGS", keys=["plugins.folde"]) as caught:
        list_plugins(file)
    assert f"{file}:3:" in caught.value.found
    file.write_text("plugins = 3\n")
    with refused("E-CONFIG-SETTINGS", keys=["plugins"]):
        list_plugins(file)
    file.write_text('[plugins]\nmodules = ["parts"]\n')
    with refused("E-PLUGIN-IMPORT", file=str(folder / "parts.py"), line=1):
        list_plugins(file)
    with refused("E-CONFIG-MISSING"):
        list_plugins(tmp_path / "absent.toml")


def test_installed_names_are_listed_without_an_import(monkeypatch):
    distribution = SimpleNamespace(name="lab", version="2.1")
    points = [
        EntryPoint("second", "second_parts", load.GROUP)._for(distribution),
        EntryPoint("first", "lab_parts.torch:register", load.GROUP),
    ]
    monkeypatch.setattr(load, "entry_points", lambda group: points)
    assert offered_plugins() == [
        OfferedPlugin("first", "lab_parts.torch", "", ""),
        OfferedPlugin("second", "second_parts", "lab", "2.1"),
    ]
    assert "second_parts" not in sys.modules
