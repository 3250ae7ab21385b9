"""The public surface: `import ingot`. A change of it changes public_names.txt and is in CHANGELOG.md."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ingot

ROOT = Path(__file__).parents[2]
NAMES = sorted(ingot._MODULES)
TORCH = {"evaluate", "export", "load_model", "train", "resume"}  # they compute with a model, or start ranks that do


def load_tool():
    spec = importlib.util.spec_from_file_location("public_names", ROOT / "tools" / "public_names.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


def test_a_change_of_the_surface_is_in_the_golden_file_and_in_the_changelog():
    assert TOOL.surface() == TOOL.FILE.read_text(), "run: python tools/public_names.py"
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert TOOL.digest(TOOL.surface()) in changelog, "write what changed into CHANGELOG.md, with the new digest"
    assert [name for name in NAMES if not re.search(rf"`[^`]*\b{name}\b[^`]*`", changelog)] == []


def test_the_names_are_in_one_table():
    assert sorted(ingot.__all__) == sorted(["__version__", *NAMES]) and set(NAMES) <= set(dir(ingot))
    modules = {path.stem for path in Path(ingot.__file__).parent.iterdir()}
    assert modules & set(NAMES) == set(), "a public name hides a module"


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_documented_with_an_example(name):
    node = TOOL.definition(name)
    text = ast.get_docstring(node)
    assert text and f"ingot.{name}(" in text, f"{name} has no example"
    assert re.search(r"\b[Rr]aises\b", text), f"{name}: which errors?"
    for one in TOOL.members(node) if isinstance(node, ast.ClassDef) else ():
        public = not one.name.startswith("_")
        assert ast.get_docstring(one) or not public, f"{name}.{one.name}"


def test_every_name_is_called_in_a_test():
    called = set()
    for path in (ROOT / "tests" / "unit" / "api").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("ingot."):
                called.add(ast.unparse(node.func).removeprefix("ingot."))
    assert set(NAMES) - called == set()
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in NAMES if not re.search(rf"\b{name}\b", page)] == []


def test_names_that_compute_with_no_model_import_no_torch():
    code = (
        "import sys, ingot\n"
        f"for name in {[name for name in NAMES if name not in TORCH]}: getattr(ingot, name)\n"
        "assert 'torch' not in sys.modules\n"
        f"for name in {sorted(TORCH)}: getattr(ingot, name)\n"
        "assert 'torch' not in sys.modules, 'only the call imports torch'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_functions_print_nothing():
    for path in (ROOT / "src" / "ingot" / "api").glob("*.py"):
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
        assert not {name for name in calls if name == "print" or name.startswith(("sys.stdout", "sys.stderr"))}, path


def test_python_dash_m_ingot_is_the_command():
    def run(*program: str) -> tuple[int, str, str]:
        done = subprocess.run([*program], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    for words in (["--version"], ["no-such-verb"], ["explain", "E-DATASET-STATE", "--json"]):
        command = run(sys.executable, "-c", "import sys; from ingot.cli.main import main; sys.exit(main())", *words)
        assert run(sys.executable, "-m", "ingot", *words) == command
