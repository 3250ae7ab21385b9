"""Tests leave the process of the tests as they found it: tests/isolation.py restores it."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.isolation import forget_compiled, restored, seed

from ingot.data.tasks import task
from ingot.plugins.callback import CALLBACKS, CallbackPart
from ingot.plugins.registry import Registry

ROOT = Path(__file__).parents[2]
FIXTURES = "from tests.conftest import unchanged_by_file, unchanged_by_test\n"
SEES = """
import os, signal, sys
from pathlib import Path
import pytest
from ingot.plugins import load
from ingot.plugins.mixture import MIXTURES
from ingot.plugins.registry import Registry

def found(*names):
    return [
        [name for name in names if name in sys.modules],
        [name for name in names if name in MIXTURES],
        [name for name in names if name in load._loaded],
        [name for name in names if any(place.endswith(name) for place in sys.path)],
        [name for name in names if f"LEFT_{name}" in os.environ],
        [name for name in names if any(registry.kind == name for registry in Registry.every)],
        [name for name in names if Path.cwd().name == name],
        [name for name in names if signal.getsignal(signal.SIGUSR1) == name.__len__],
    ]

def leave(folder, name):
    folder = folder / name
    folder.mkdir()
    part = f"MIXTURES.register(MixturePolicy(name={name!r}, weights=len))"
    (folder / f"{name}.py").write_text(f"from ingot.plugins.mixture import MIXTURES, MixturePolicy\\n{part}\\n")
    load.load_plugins([name], folder)
    os.environ[f"LEFT_{name}"] = "1"
    Registry(name, "nothing")
    os.chdir(folder)
    signal.signal(signal.SIGUSR1, name.__len__)
"""
LEAVES = f"""{SEES}
@pytest.fixture(scope="module")
def used(tmp_path_factory):
    leave(tmp_path_factory.mktemp("a"), "of_file")

def test_leaves(used, tmp_path):
    leave(tmp_path, "of_test")
    assert found("of_file", "of_test")[:6] == [["of_file", "of_test"]] * 6
    assert found("of_file", "of_test")[6:] == [["of_test"]] * 2

def test_of_the_same_file():
    assert found("of_test") == [[]] * 8
    assert found("of_file") == [["of_file"]] * 8
"""
NEXT = f"""{SEES}
@pytest.mark.parametrize("what", range(8))
def test_of_the_next_file(what):
    assert found("of_file", "of_test")[what] == []
"""


@pytest.mark.parametrize(("fixtures", "red"), [(FIXTURES, 0), ("", 9)], ids=["isolated", "as pytest does it"])
def test_files_and_tests_start_with_a_clean_process(tmp_path, fixtures, red):
    for name, text in {"conftest": fixtures, "test_a": LEAVES, "test_b": NEXT}.items():
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    variables = os.environ | own
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=variables, capture_output=True, text=True)
    counts = f"{red} failed, {10 - red} passed" if red else "10 passed"
    assert done.stdout.splitlines()[-1].startswith(counts), done.stdout


def test_parts_and_task_functions_of_a_test_are_forgotten_and_those_of_ingot_stay():
    names, registries, functions = CALLBACKS.names(), list(Registry.every), dict(task._FUNCTIONS)
    with restored():
        CALLBACKS.register(CallbackPart(name="of a test", make=len))
        CALLBACKS.add_built_in(CallbackPart(name="of a floor above", make=len))
        Registry("thing", "[things]")
        task.task_function("of a test")(_task)
        Registry.importing = "left"
    try:
        assert CALLBACKS.names() == [*names, "of a floor above"]
        assert Registry.every == registries and Registry.importing is None
        assert functions == task._FUNCTIONS
    finally:
        del CALLBACKS._entries["of a floor above"]


def _task(specification: "int", attempt: "int") -> int:
    return specification


def test_modules_of_ingot_that_were_imported_twice_are_one_again():
    import ingot.units

    first = sys.modules["ingot.units"]
    with restored():
        del sys.modules["ingot.units"], ingot.units
        import ingot.units

        assert sys.modules["ingot.units"] is ingot.units is not first
    assert sys.modules["ingot.units"] is ingot.units is first


def test_a_module_that_may_hold_copies_is_imported_again():

    late = "ingot.data.tasks.drill"
    sys.modules.pop(late, None)
    with restored():
        del sys.modules["ingot.units"]
    assert late not in sys.modules


def test_random_numbers_are_the_same_after_other_tests():
    np = pytest.importorskip("numpy")
    seed()
    before = random.random(), np.random.random()
    seed()
    assert (random.random(), np.random.random()) == before


def test_flags_of_torch_are_restored():
    torch = pytest.importorskip("torch")
    dist = pytest.importorskip("torch.distributed")
    seed()
    number = torch.rand(())
    with restored():
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    seed()
    assert torch.equal(torch.rand(()), number) and torch.get_default_dtype() == torch.float32
    assert torch.get_num_threads() == 1 and torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled() and not dist.is_initialized()


def test_torch_that_a_test_imports_first_has_the_flags_of_its_import(monkeypatch):
    torch = pytest.importorskip("torch")
    with monkeypatch.context() as hidden:
        hidden.delitem(sys.modules, "torch")
        inside = restored()
        inside.__enter__()
    torch.set_default_dtype(torch.float64)
    inside.__exit__(None, None, None)
    assert torch.get_default_dtype() == torch.float32


def test_compiled_code_is_forgotten():
    torch, compiled = pytest.importorskip("torch"), []
    doubled = torch.compile(lambda x: 2 * x, backend=lambda graph, inputs: compiled.append(graph) or graph.forward)
    for _ in range(2):
        doubled(torch.ones(3))
    assert len(compiled) == 1
    forget_compiled()
    doubled(torch.ones(3))
    assert len(compiled) == 2
