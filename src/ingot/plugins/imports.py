"""The imports of modules, as their source says: a plug-in that imports a changed one has to be imported again.

A module and the package that contains it count as one, by the first part of their name: they are imported together.
"""

import ast
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path


def first_name(module: str) -> str:
    """Return the name of the top-level module or package that contains `module`."""
    return module.partition(".")[0]


def family(first: str) -> list[str]:
    """Return the imported modules of a top-level module or package, by name."""
    return [name for name in list(sys.modules) if f"{name}.".startswith(f"{first}.")]


def with_importers(changed: Collection[str], among: Iterable[str]) -> set[str]:
    """Return `changed` and those of `among` that import one of them, also by way of others of `among`.

    Both are names of top-level modules or packages.
    """
    if not changed:
        return set()
    imported = {one: {first_name(name) for name in _imports_of_family(one)} for one in among}
    found = set(changed)
    while more := {one for one, names in imported.items() if one not in found and names & found}:
        found |= more
    return found


def reached_from(module: str, expands: Callable[[str], bool]) -> set[str]:
    """Return the modules that an import of `module` imports, by name, and those of their packages.

    expands: says of a top-level module or package whether the imports of its source are followed.
    """
    found: set[str] = set()
    todo = [module]
    while todo:
        if (one := todo.pop()) in found:
            continue
        found.add(one)
        if first_name(one) == first_name(module) or expands(first_name(one)):
            todo += [*family(first_name(one)), *imported_names(one)]
    return found


def _imports_of_family(first: str) -> set[str]:
    return {name for module in family(first) for name in imported_names(module)}


def imported_names(module: str) -> frozenset[str]:
    """Return the modules that the source of an imported module imports, by name, with the packages that contain them.

    A name that `from` imports counts as a module too. Relative imports are left out. No name if the source cannot be
    read.
    """
    own = vars(sys.modules[module]) if module in sys.modules else {}
    file = str(own.get("__file__") or "")
    if not file.endswith(".py"):
        return frozenset()
    try:
        state = Path(file).stat()
        return _read_imports(file, state.st_mtime_ns, state.st_size)
    except (OSError, SyntaxError, ValueError):
        return frozenset()


@functools.lru_cache(maxsize=1024)
def _read_imports(file: str, changed_ns: int, size: int) -> frozenset[str]:
    tree = ast.parse(Path(file).read_bytes())
    names = {name for node in ast.walk(tree) for name in _names_in(node)}
    return frozenset(".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 2))


def _names_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:  # relative ones stay in the package
        yield from (f"{node.module}.{one.name}" for one in node.names if one.name != "*")
        yield node.module
