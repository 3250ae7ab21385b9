"""The structure that import-linter cannot hold: no circle of files, no long file, no private torch but in one place."""

import ast
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import pytest
from tests.sources import SOURCE, nodes_of, parsed, source_nodes

ROOT = Path(__file__).parents[2]
LONGEST = 400


def imports(source: Path, nodes: dict[Path, list[ast.AST]]) -> dict[str, set[str]]:
    """Return module -> the modules it imports, anywhere in the file: in functions and under TYPE_CHECKING too. nodes:
    those of the files below the folder `source`.
    """
    files = {".".join(("ingot", *path.relative_to(source).with_suffix("").parts)): path for path in nodes}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        used = set()
        for node in nodes[path]:
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                used |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        # Importing a name from a package is importing the module of that name, if there is one.
        inner = {module for module in used if module in files}
        found[name] = {m for m in inner if not any(other.startswith(f"{m}.") for other in inner)} - {name}
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one circle, or an empty list."""
    state: dict[str, int] = {}
    path: list[str] = []

    def visit(module: str) -> list[str]:
        state[module] = 1
        path.append(module)
        for other in sorted(graph[module]):
            if state.get(other) == 1:
                return [*path[path.index(other) :], other]
            if other not in state and (found := visit(other)):
                return found
        path.pop()
        state[module] = 2
        return []

    sys.setrecursionlimit(10_000)
    return next((found for module in sorted(graph) if module not in state and (found := visit(module))), [])


def test_no_circle_of_files():
    # `ingot` itself imports the planner for `from ingot import plan`, on demand.
    graph = {name: used - {"ingot"} for name, used in imports(SOURCE, source_nodes()).items()}
    assert circle(graph) == []


def test_a_circle_is_found(tmp_path):
    for name, text in {
        "a": "from ingot.b import x",
        "b": "def f():\n    from ingot import c",
        "c": "import ingot.a",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert circle(imports(tmp_path, parsed(tmp_path))) == ["ingot.a", "ingot.b", "ingot.c", "ingot.a"]


# Private names of PyTorch. Counted in every file of src that imports torch:
#   - an import from torch with a part that begins with an underscore ("torch._dynamo", "from torch.x import _y");
#   - an attribute that begins with one underscore and that no class, function or assignment of src defines;
#   - a method of a subclass that overrides a private method of nn.Module or of a dispatch mode.

OVERRIDES = {"_apply", "_should_skip_dynamo"}


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def defined_names(files: Iterable[list[ast.AST]]) -> set[str]:
    names = set()
    for node in (node for nodes in files for node in nodes):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names - OVERRIDES


def imports_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def private_names(nodes: list[ast.AST], defined: set[str]) -> list[tuple[int, str]]:
    found = []
    if not any(name.split(".")[0] == "torch" for node in nodes for name in imports_of(node)):
        return []
    for node in nodes:
        for name in imports_of(node):
            if name.split(".")[0] == "torch" and is_private(name):
                found.append((node.lineno, name))
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in defined:
            found.append((node.lineno, node.attr))
        if isinstance(node, ast.FunctionDef) and node.name in OVERRIDES:
            found.append((node.lineno, node.name))
    return found


def test_one_file_touches_private_names_of_torch():
    files, own = source_nodes(), SOURCE / "trainer" / "torch_private.py"
    defined = defined_names(nodes for path, nodes in files.items() if path != own)
    found = {path: names for path, nodes in files.items() if (names := private_names(nodes, defined))}
    assert found.pop(own)
    assert not found, {str(path.relative_to(SOURCE)): names for path, names in found.items()}


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch.distributed.distributed_c10d import _x",
        "import torch\nx = torch.ops._c10d_functional",
        "from torch import nn\nclass A(nn.Module):\n    def _apply(self, fn): ...",
        "import torch\ndef f(x): return x.untyped_storage()._cdata",
    ],
)
def test_a_private_name_is_found(line):
    assert private_names(nodes_of(line), set())


def test_no_file_is_too_long():
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST} == {}


def test_pytest_enters_every_folder_of_tests(pytestconfig):
    folders = {folder.name for path in (ROOT / "tests").rglob("test_*.py") for folder in path.relative_to(ROOT).parents}
    patterns = pytestconfig.getini("norecursedirs")
    assert {name for name in folders if any(fnmatch(name, pattern) for pattern in patterns)} == set()


def test_the_words_check_finds_what_it_is_for(tmp_path):
    (tmp_path / "src").mkdir()
    text = '"""Of a file."""\n\n\nclass Twice:\n    """The user is told."""\n'  # words: ok
    (tmp_path / "src" / "a.py").write_text(text + '\n\nclass Twice:\n    """Another."""\n')
    command = [sys.executable, str(ROOT / "tools" / "words.py"), "src"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "src/a.py:1: a docstring begins with 'Of'" in done.stdout
    assert "src/a.py:5: the word 'told'" in done.stdout  # words: ok
    assert "class Twice also in" in done.stdout


PICKLING = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
PICKLED_COLLECTIVES = {
    *("broadcast_object_list", "gather_object", "all_gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}


def unpickles(tree: ast.AST) -> list[str]:
    """Return what in a file of the source may unpickle something."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if name.split(".")[0] in PICKLING or name in PICKLED_COLLECTIVES]
        elif isinstance(node, ast.Attribute):
            whole = f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else ""
            found += [node.attr] if node.attr in PICKLED_COLLECTIVES else []
            found += [whole] if whole in ("torch.load", "torch.save") else []
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
    return found


def test_nothing_is_unpickled():
    """Neither what comes from the network nor what is on disk."""
    files = {str(path.relative_to(SOURCE)): unpickles(ast.parse(path.read_text())) for path in SOURCE.rglob("*.py")}
    assert {path: found for path, found in files.items() if found} == {}


def test_what_unpickles_is_found():
    text = "import pickle\nfrom torch.distributed import gather_object\ndist.broadcast_object_list(x)\n"
    text += "torch.load(path)\nnp.load(path, allow_pickle=True)\nfrom dill import loads\n"
    found = ["pickle", "gather_object", "broadcast_object_list", "torch.load", "allow_pickle", "dill"]
    assert sorted(unpickles(ast.parse(text))) == sorted(found)
