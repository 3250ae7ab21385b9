"""The import of plug-ins: where they are found, what their errors say, when they are imported again, their identity."""

import json
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from tests.expect import refused

from ingot.plugins import load
from ingot.plugins.load import code_of, import_plugins, load_plugins
from ingot.plugins.schedule import SCHEDULES

PART = """
from ingot.plugins.schedule import SCHEDULES, SchedulePart

SCHEDULES.register(SchedulePart(name="{name}", rate=lambda *args: {rate}))
"""


def part(name: str = "flat", rate: float = 1.0) -> str:
    return PART.format(name=name, rate=rate)


def rate(name: str = "flat") -> float:
    return SCHEDULES[name].rate(1, 2, 1.0, None, None)


def offered(monkeypatch, module: str, name: str = "lab-parts", version: str = "2.1"):
    point = EntryPoint(name, module, load.GROUP)._for(SimpleNamespace(version=version))
    monkeypatch.setattr(load, "installed_plugins", lambda: {name: point})


def test_a_file_beside_the_run_file_is_imported_once(lab):
    folder = lab(parts=part() + "import sys\nsys.imports = getattr(sys, 'imports', 0) + 1\n")
    try:
        (code,) = load_plugins(["parts"], folder).values()
        assert load_plugins(["parts"], folder) == {"parts": code} and sys.imports == 1
    finally:
        del sys.imports
    assert rate() == 1.0 and SCHEDULES.module_of("flat") == "parts"


def test_without_plug_ins_nothing_is_searched(process, tmp_path):
    before = list(sys.path)
    assert load_plugins([], tmp_path / "nothing") == {} and sys.path == before


def test_an_installed_module_is_found_by_its_short_name(lab, tmp_path, monkeypatch):
    site = lab(own_parts=part())
    monkeypatch.syspath_prepend(str(site))
    offered(monkeypatch, "own_parts")
    (plugin,) = import_plugins(["lab-parts"], tmp_path)
    assert (plugin.module, plugin.file, plugin.version) == ("own_parts", site / "own_parts.py", "2.1")
    assert plugin.code == f"2.1 {code_of('own_parts', plugin.file)}"
    assert SCHEDULES.module_of("flat") == "lab-parts"


def test_an_entry_point_may_name_an_object_of_its_module(lab, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(lab(own_parts=part())))
    offered(monkeypatch, "own_parts:anything")
    assert import_plugins(["lab-parts"], tmp_path)[0].module == "own_parts"


def test_a_short_name_of_a_module_that_is_gone(lab, monkeypatch):
    offered(monkeypatch, "gone_parts")
    with refused("E-PLUGIN-MISSING", module="gone_parts"):
        load_plugins(["lab-parts"], lab(other=""))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("part", ["parts"]), ("deep", []), ("my.pars", ["parts"]), ("no.such.module", []), ("lab-part", ["lab-parts"])],
)
def test_a_missing_module(lab, monkeypatch, name, meant):
    offered(monkeypatch, "own_parts")
    folder = lab(parts="", my="", my__parts="")
    with refused("E-PLUGIN-MISSING", module=name, folder=str(folder), meant=meant):
        load_plugins([name], folder)


@pytest.mark.parametrize("name", ["__main__", "os.nothing", "sys"])
def test_modules_of_python_without_a_file_are_missing_and_stay(lab, name):
    before = dict(sys.modules)
    with refused("E-PLUGIN-MISSING", module=name):
        load_plugins([name], lab(parts=""))
    assert {module: sys.modules.get(module) for module in before} == before


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("x = 1\ny = {}['a']\n", 2, "KeyError: 'a'"),
        ("x = 1\n\nimport sys; sys.exit(3)\n", 3, "SystemExit: 3"),
        ("x = 1\nimport not_installed_here\n", 2, "ModuleNotFoundError: No module named 'not_installed_here'"),
        ("from math import no_such_name\n", 1, "ImportError"),
        ("def f():\n    raise ValueError('no GPU')\n\n\nf()\n", 2, "ValueError: no GPU"),
        ("x = 1\nif x\n", 2, "SyntaxError"),
    ],
)
def test_an_error_at_import_names_file_and_line(lab, text, line, found):
    folder = lab(parts=text)
    with refused("E-PLUGIN-IMPORT", module="parts", file=str(folder / "parts.py"), line=line) as caught:
        load_plugins(["parts"], folder)
    assert found in str(caught.value)


@pytest.mark.parametrize("text", ["import not_installed_here\n", "raise ValueError('bad')\n"])
def test_an_error_in_the_package_of_a_module_is_an_error_at_import(lab, text):
    folder = lab(my=text, my__parts=part())
    with refused("E-PLUGIN-IMPORT", module="my.parts", file=str(folder / "my" / "__init__.py"), line=1):
        load_plugins(["my.parts"], folder)


def test_an_error_of_ingot_in_a_plug_in_stays(lab):
    folder = lab(parts=part("cosine"))
    with refused("E-PLUGIN-NAME", kind="learning-rate schedule", name="cosine"):
        load_plugins(["parts"], folder)
    assert SCHEDULES.module_of("cosine") == "ingot"


def test_after_an_error_the_corrected_module_can_be_imported(lab):
    folder = lab(my=part("first"), my__parts=part("second") + "1 / 0\n")
    with refused("E-PLUGIN-IMPORT", line=5):
        load_plugins(["my.parts"], folder)
    assert "first" not in SCHEDULES and "second" not in SCHEDULES
    lab(my=part("first"), my__parts=part("second"))
    load_plugins(["my.parts"], folder)
    assert rate("first") == rate("second") == 1.0


def test_a_plug_in_must_not_have_the_name_of_another_module(lab):
    folder = lab(colorsys=part())
    with refused("E-PLUGIN-SHADOWED", module="colorsys"):
        load_plugins(["colorsys"], folder)
    folder = lab(json="", json__parts=part())
    with refused("E-PLUGIN-MISSING", module="json.parts"):  # Python looks in its own json
        load_plugins(["json.parts"], folder)


def test_a_link_to_a_module_is_not_another_module(lab, tmp_path):
    (tmp_path / "real.py").write_text(part())
    folder = lab(other="")
    (folder / "parts.py").symlink_to(tmp_path / "real.py")
    assert import_plugins(["parts"], folder)[0].file == tmp_path / "real.py"


def test_a_file_beside_the_run_file_does_not_replace_a_module_of_python(lab):
    folder = lab(random="raise SystemExit", parts="import random\n" + part())
    load_plugins(["parts"], folder)


def test_a_changed_file_is_imported_again_without_its_old_parts(lab):
    folder = lab(parts=part("old", 1.0))
    before = load_plugins(["parts"], folder)
    lab(parts=part("new", 2.0))  # of the same size, within the same second
    after = load_plugins(["parts"], folder)
    assert before != after and "old" not in SCHEDULES and rate("new") == 2.0


def test_a_changed_package_is_imported_again_as_a_whole(lab):
    folder = lab(my=part("zero"), my__a=part("one"), my__b="from my.c import *\n" + part("two"), my__c="")
    load_plugins(["my.a", "my.b"], folder)
    lab(my__c=part("three"))
    load_plugins(["my.a", "my.b"], folder)
    assert [SCHEDULES.module_of(name) for name in ("zero", "one", "two", "three")] == ["my.a", "my.a", "my.b", "my.b"]


def test_files_of_the_same_name_beside_other_run_files(lab, tmp_path):
    first, second = lab(parts=part("one")), tmp_path / "second"
    second.mkdir()
    (second / "parts.py").write_text(part("two"))
    load_plugins(["parts"], first)
    load_plugins(["parts"], second)
    assert "one" not in SCHEDULES and "two" in SCHEDULES
    load_plugins(["parts"], first)
    assert "two" not in SCHEDULES and "one" in SCHEDULES


def test_a_module_beside_another_run_file_is_missing(lab, tmp_path):
    """Another process, which has not imported the plug-ins of that run, would not find it."""
    load_plugins(["parts"], lab(parts=part(), other=""))
    for name in ("parts", "other"):
        with refused("E-PLUGIN-MISSING", module=name):
            load_plugins([name], tmp_path)


def test_the_identity_of_a_single_file_is_its_own(lab):
    folder = lab(parts="x = 1", other="y = 1")
    before = code_of("parts", folder / "parts.py")
    lab(other="y = 2")
    assert code_of("parts", folder / "parts.py") == before
    lab(parts="x = 2")
    assert code_of("parts", folder / "parts.py") != before


@pytest.mark.parametrize("module, file", [("my", "__init__.py"), ("my.a", "a.py")])
def test_the_identity_of_a_package_is_that_of_all_its_files(lab, module, file):
    folder = lab(my="", my__a="", my__inner="", my__inner__b="x = 1") / "my"
    seen = [code_of(module, folder / file)]
    (folder / "data.json").write_text("{}")
    assert code_of(module, folder / file) == seen[0]
    lab(my__inner__b="x = 2")
    seen.append(code_of(module, folder / file))
    (folder / "inner" / "b.py").rename(folder / "inner" / "c.py")
    seen.append(code_of(module, folder / file))
    assert len(set(seen)) == 3


def test_the_identity_does_not_depend_on_the_place(lab, tmp_path):
    folder = lab(my="", my__a="x = 1")
    before = code_of("my.a", folder / "my" / "a.py")
    folder.rename(tmp_path / "elsewhere")
    assert code_of("my.a", tmp_path / "elsewhere" / "my" / "a.py") == before


def test_prints_of_a_plug_in_go_to_standard_error(lab, capsys):
    folder = lab(my="print('package')\n", my__parts="print('module')\n")
    load_plugins(["my.parts"], folder)
    print(json.dumps({}))
    assert capsys.readouterr() == ("{}\n", "package\nmodule\n")
