"""The syntax of every file of ingot, parsed once for all tests of a process that look at the source."""

import ast
import gc
from functools import cache
from pathlib import Path

import ingot

SOURCE = Path(ingot.__file__).parent


def nodes_of(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def parsed(folder: Path) -> dict[Path, list[ast.AST]]:
    """Return the nodes of every Python file below `folder`, in the order of ast.walk; files in the order of paths."""
    return {path: nodes_of(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


@cache
def source_nodes() -> dict[Path, list[ast.AST]]:
    gc.disable()
    try:
        found = parsed(SOURCE)
    finally:
        gc.enable()
    gc.freeze()  # a million nodes, which every collection of garbage would visit
    return found
