"""Plug-ins in one long-lived process, such as a notebook: edited, imported by the program, beside several run files."""

import importlib
import sys
from pathlib import Path

import pytest
from tests.expect import refused
from tests.unit.plugins.test_load import offered, part, rate

from ingot.plugins.filters import FILTERS, Filter
from ingot.plugins.load import import_plugins, load_plugins
from ingot.plugins.registry import Registry
from ingot.plugins.schedule import SCHEDULES
from ingot.plugins.source import FORMATS, InputFormat


@pytest.fixture
def other(tmp_path):
    """`other(**files)` writes modules into the folder of another run file, and returns the folder."""

    def write(**files: str) -> Path:
        folder = tmp_path / "other"
        for name, text in files.items():
            path = (folder / name.replace("__", "/")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder

    return write


def owners(*names: str) -> list[str]:
    return [SCHEDULES.module_of(name) for name in names]


# -- edits --

BASE = "VALUE = {}\ndef f(): return VALUE\n"
IMPORTS = {
    "import": ("import base\n", "base.VALUE"),
    "from": ("from base import f\n", "f()"),
    "a number": ("from base import VALUE\n", "VALUE"),
    "all": ("from base import *\n", "f()"),
    "in a condition": ("if True:\n    import base as b\n", "b.f()"),
    "by a helper": ("from helper import f\n", "f()"),
    "by two helpers": ("from far import f\n", "f()"),
}


@pytest.mark.parametrize("form", IMPORTS)
def test_a_plug_in_that_imports_a_changed_one_is_imported_again(lab, form):
    text, value = IMPORTS[form]
    folder = lab(base=BASE.format(1.0), helper="from base import f\n", far="from helper import f\n")
    lab(parts=f"{text}NOW = {value}\n" + part(rate="NOW"))
    load_plugins(["base", "parts"], folder)
    lab(base=BASE.format(2.0))
    load_plugins(["base", "parts"], folder)
    assert rate() == 2.0


def test_a_relative_import_of_a_changed_package(lab):
    folder = lab(lib="", lib__base=BASE.format(1.0), my="", my__inner="from .. import inner\n")
    lab(my="from . import parts\n", my__parts="import lib.base\nNOW = lib.base.VALUE\n" + part(rate="NOW"))
    lab(user="from my.parts import NOW\n" + part("user", "NOW"))
    load_plugins(["lib.base", "my", "user"], folder)
    lab(lib__base=BASE.format(2.0))
    load_plugins(["lib.base", "my", "user"], folder)
    assert rate() == rate("user") == 2.0


def test_imports_in_a_circle(lab):
    folder = lab(one="import two\n" + part("one"), two="import three\n" + part("two"), three="import one\n")
    load_plugins(["one", "two"], folder)
    before = sys.modules["three"]
    lab(two="import three\n" + part("new"))
    load_plugins(["one", "two"], folder)
    assert "two" not in SCHEDULES and owners("one", "new") == ["one", "two"] and sys.modules["three"] is not before


def test_plug_ins_that_import_nothing_changed_stay(lab):
    folder = lab(base=BASE.format(1.0), parts="import base\n" + part(), alone=part("alone"))
    load_plugins(["base", "parts", "alone"], folder)
    before = {name: sys.modules[name] for name in ("base", "parts", "alone")}
    lab(parts="import base\n" + part("new"))
    load_plugins(["base", "parts", "alone"], folder)
    assert [name for name, module in before.items() if sys.modules[name] is module] == ["base", "alone"]


def test_a_plug_in_of_another_run_is_imported_again_when_that_run_is_loaded(lab):
    folder = lab(base=BASE.format(1.0), parts="from base import VALUE\n" + part(rate="VALUE"))
    load_plugins(["base"], folder)
    load_plugins(["parts"], folder)
    lab(base=BASE.format(2.0))
    load_plugins(["base"], folder)
    assert "flat" not in SCHEDULES
    load_plugins(["parts"], folder)
    assert rate() == 2.0
    lab(base=BASE.format(3.0))
    load_plugins(["parts"], folder)
    assert rate() == 3.0


def test_a_part_moves_from_one_plug_in_to_another(lab):
    folder = lab(one="", two=part())
    load_plugins(["one", "two"], folder)
    lab(one=part(), two="")
    load_plugins(["one", "two"], folder)
    assert owners("flat") == ["one"]


def test_parts_of_an_unchanged_module_that_a_changed_plug_in_imports_stay(lab):
    folder = lab(parts="import helper\n", helper=part())
    load_plugins(["parts"], folder)
    lab(parts="import helper  # changed\n")
    load_plugins(["parts"], folder)
    assert owners("flat") == ["parts"] and rate() == 1.0


def test_after_an_error_parts_of_a_module_that_was_imported_stay(lab):
    folder = lab(parts="import helper\nimport broken\n", helper=part(), broken=part("half") + "1 / 0\n")
    with refused("E-PLUGIN-IMPORT"):
        load_plugins(["parts"], folder)
    lab(broken=part("half"))
    load_plugins(["parts"], folder)
    assert owners("flat", "half") == ["parts", "parts"]


# -- modules that the program imports itself --


@pytest.fixture
def program(lab, monkeypatch):
    """`program(name, **files)` writes the files and imports a module of them, as a notebook beside the run file."""

    def run(name: str, **files: str) -> Path:
        monkeypatch.syspath_prepend(str(folder := lab(**files)))
        importlib.import_module(name)
        return folder

    return run


FILES = {
    "parts": {"parts": part()},
    "my.parts": {"my": "", "my__parts": part()},
    "my": {"my": "from . import inner\n", "my__inner": part()},
    "users": {"users": "import helper\n", "helper": part()},
    "far": {"far": "import lib\n", "lib": "from . import inner\n", "lib__inner": part()},
}


@pytest.mark.parametrize("module", FILES)
def test_parts_of_a_module_that_the_program_imported_become_the_plug_ins(program, module):
    folder = program(module, **FILES[module])
    before = sys.modules[module]
    assert owners("flat") == ["__main__"]
    load_plugins([module], folder)
    assert owners("flat") == [module] and sys.modules[module] is before


def test_a_part_of_another_module_of_the_program_stays_its_own(program):
    folder = program("mine", parts="", mine=part())
    load_plugins(["parts"], folder)
    assert owners("flat") == ["__main__"]


@pytest.mark.parametrize("module", ["parts", "my.parts", "my"])
def test_a_module_that_changed_since_the_program_imported_it_is_imported_again(program, lab, module):
    folder = program(module, **FILES[module])
    lab(**{name: text.replace("1.0", "2.0") for name, text in FILES[module].items()})
    load_plugins([module], folder)
    assert owners("flat") == [module] and rate() == 2.0


def test_helpers_in_the_programs_folder_are_imported_again(program, lab):
    text = "from helper import VALUE\n" + part(rate="VALUE")
    folder = program("parts", parts=text, helper="from base import VALUE\n", base="VALUE = 1.0\n" + part("base"))
    lab(base="VALUE = 2.0\n" + part("base"))
    load_plugins(["base", "parts"], folder)
    assert rate() == 2.0 and owners("flat", "base") == ["parts", "base"]


def test_a_changed_module_with_a_short_name_is_imported_again(program, lab, tmp_path, monkeypatch):
    program("own_parts", own_parts=part())
    offered(monkeypatch, "own_parts")
    lab(own_parts=part(rate=2.0))
    load_plugins(["lab-parts"], tmp_path)
    assert owners("flat") == ["lab-parts"] and rate() == 2.0


def test_a_changed_module_that_no_file_names_stays(program, lab):
    folder = program("mine", parts="", mine=part())
    lab(mine=part(rate=2.0))
    load_plugins(["parts"], folder)
    assert rate() == 1.0


def test_a_module_that_registers_through_another_one_is_the_origin(program, lab):
    helper = "from ingot.plugins.schedule import SCHEDULES\ndef add(one): SCHEDULES.register(one)\n"
    text = part().replace("SCHEDULES.register", "helper.add") + "import helper\n"
    text = "import helper\n" + text
    folder = program("parts", helper=helper, parts=text)
    lab(parts=text.replace("1.0", "2.0"))
    load_plugins(["parts"], folder)
    assert owners("flat") == ["parts"] and rate() == 2.0


@pytest.mark.parametrize("names", [["one"], ["two"], ["one", "two"], ["two", "one"]])
def test_parts_belong_to_plug_ins_as_in_a_new_process(lab, names):
    folder = lab(one="import two\n" + part("of_one"), two=part("of_two"))
    load_plugins(names, folder)
    if "one" in names:
        assert owners("of_one", "of_two") == ["one", "two" if "two" in names else "one"]
    else:
        assert "of_one" not in SCHEDULES and owners("of_two") == ["two"]
    for again in (["one", "two"], ["two"], ["one"]):
        load_plugins(again, folder)
        assert owners("of_two") == ["two" if "two" in again else "one"]


# -- plug-ins of the same name beside several run files --


@pytest.mark.parametrize("module", ["parts", "my.parts"])
def test_a_module_of_the_same_name_beside_another_run_file_replaces_the_first(lab, other, module):
    name = module.replace(".", "__")  # my is a package without __init__.py
    folders = [lab(**{f"{name}": part(rate=1.0)}), other(**{name: part(rate=2.0)})]
    for unlink in (folder / "my" / "__init__.py" for folder in folders):
        unlink.unlink(missing_ok=True)
    for place in (0, 1, 0, 1):
        assert import_plugins([module], folders[place])[0].file.is_relative_to(folders[place])
        assert rate() == place + 1.0 and owners("flat") == [module]


def test_a_helper_of_the_same_name_beside_another_run_file(lab, other):
    text = "from helper import VALUE\n" + part(rate="VALUE")
    folders = [lab(parts=text, helper="VALUE = 1.0\n"), other(parts=text, helper="VALUE = 2.0\n")]
    for place in (0, 1, 0):
        load_plugins(["parts"], folders[place])
        assert rate() == place + 1.0


def test_the_second_file_registers_what_another_plug_in_of_the_first_does(lab, other):
    first, second = lab(parts="", extra=part(rate=1.0)), other(parts=part(rate=2.0))
    for _ in range(2):
        load_plugins(["parts", "extra"], first)
        assert rate() == 1.0 and owners("flat") == ["extra"]
        load_plugins(["parts"], second)
        assert rate() == 2.0 and owners("flat") == ["parts"]


def test_two_run_files_choose_between_versions_of_a_part(lab):
    folder = lab(v1=part(rate=1.0), v2=part(rate=2.0))
    for version in (1, 2, 2, 1):
        load_plugins([f"v{version}"], folder)
        assert rate() == version
    with refused("E-PLUGIN-NAME", name="flat"):
        load_plugins(["v1", "v2"], folder)


@pytest.mark.parametrize("in_path", ["", "folder"])
@pytest.mark.parametrize("imports", [False, True])
def test_the_programs_own_folder_has_a_module_of_the_same_name(lab, other, monkeypatch, in_path, imports):
    first, second = lab(parts=part(rate=1.0)), other(parts=part(rate=2.0))
    monkeypatch.chdir(first)
    sys.path.insert(0, in_path and str(first))
    if imports:
        importlib.import_module("parts")
    for folder, value in ((second, 2.0), (first, 1.0), (second, 2.0)):
        load_plugins(["parts"], folder)
        assert rate() == value and owners("flat") == ["parts"]


def test_a_folder_of_data_is_not_a_module(lab, other):
    folder = lab(parts="import data\n" + part(rate="data.VALUE"), data="VALUE = 1.0\n")
    load_plugins(["parts"], folder)
    before = sys.modules["data"]
    (other(parts="") / "data").mkdir()
    load_plugins(["parts"], other())
    assert sys.modules["data"] is before


# -- cells of a notebook --


def cell(text: str) -> None:
    exec(compile(text, "<cell>", "exec"), {"__name__": "__main__"})


def test_a_cell_that_runs_again_replaces_its_part(process):
    for value in (1.0, 2.0):
        cell(part(rate=value))
        assert rate() == value and owners("flat") == ["__main__"]


def test_a_cell_replaces_no_other_part(lab):
    load_plugins(["parts"], lab(parts=part()))
    for name in ("flat", "cosine"):
        with refused("E-PLUGIN-NAME", kind="learning-rate schedule", name=name):
            cell(part(name, 2.0))
    assert rate() == 1.0 and owners("flat", "cosine") == ["parts", "ingot"]


def test_a_plug_in_does_not_replace_a_part_of_a_cell(lab):
    cell(part())
    with refused("E-PLUGIN-NAME", name="flat"):
        load_plugins(["parts"], lab(parts=part(rate=2.0)))
    assert rate() == 1.0


def test_a_module_does_not_register_a_part_twice(lab):
    with refused("E-PLUGIN-NAME", name="flat"):
        load_plugins(["parts"], lab(parts=part() + part()))


def test_a_wrong_part_does_not_replace_the_earlier_one(process):
    cell(part())
    with refused("E-PLUGIN-CONTRACT"):
        cell(part(rate=2.0).replace("lambda *args", "lambda step"))
    assert rate() == 1.0


def test_a_cell_may_register_its_endings_again_but_not_those_of_others(process):
    given = {"InputFormat": InputFormat, "FORMATS": FORMATS, "__name__": "__main__"}
    text = 'FORMATS.register(InputFormat(name="odd", read="x:y", endings=({},)))'
    for endings in ("'odd'", "'odd', 'odder'"):
        exec(text.format(endings), given)
    with refused("E-FORMAT-ENDING", ending="txt"):
        exec(text.format("'txt'"), given)
    assert FORMATS["odd"].endings == ("odd", "odder")


def test_a_filter_does_not_follow_itself(process):
    given = {"Filter": Filter, "FILTERS": FILTERS, "__name__": "__main__"}
    exec('FILTERS.register(Filter(name="odd", make="x:y"))', given)
    with refused("E-FILTER-PLACE", name="odd", after="odd"):
        exec('FILTERS.register(Filter(name="odd", make="x:y", after="odd"))', given)


def test_an_import_leaves_no_trace_of_whose_it_was(lab):
    load_plugins(["parts"], lab(parts=part()))
    assert Registry.importing is None and not Registry.chosen and not Registry.displaced
