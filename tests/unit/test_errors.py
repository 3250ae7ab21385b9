"""Every error names its cause by a code, and a catalog describes every code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from tests.sources import SOURCE, source_nodes

from ingot import errors
from ingot.errors import IngotError, catalogs, describe

CODE = re.compile(r"E(-[A-Z0-9]+){1,4}")
KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, IngotError)}


@cache
def nodes() -> list[tuple[Path, ast.Call | ast.Constant | ast.ClassDef]]:
    """Return (file, node) of every call, text and class in the source."""
    found = []
    for path, inside in source_nodes().items():
        for node in inside:
            if isinstance(node, (ast.Call, ast.ClassDef)) or (
                isinstance(node, ast.Constant) and isinstance(node.value, str)
            ):
                found.append((path, node))
    return found


def without_code() -> list[str]:
    """Return the places that make an IngotError whose first argument is neither a code nor a value that holds one."""
    kinds = set(KINDS)
    for _, node in nodes():
        if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id in KINDS for b in node.bases):
            kinds.add(node.name)
    found = []
    for path, node in nodes():
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds):
            continue
        first = node.args[0] if node.args else None
        options = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
        passed_on = isinstance(first, (ast.Name, ast.Attribute, ast.Starred, ast.Subscript))
        literal = all(isinstance(o, ast.Constant) and CODE.fullmatch(str(o.value)) for o in options)
        if len(node.args) != 2 or not (literal or passed_on):
            found.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    return found


def compared() -> set[ast.Constant]:
    """Return the codes that the source compares an error with, which another package may raise."""
    comparisons = [node for inside in source_nodes().values() for node in inside if isinstance(node, ast.Compare)]
    return {part for node in comparisons for part in ast.walk(node) if isinstance(part, ast.Constant)}


def used() -> set[tuple[str, str]]:
    """Return (package, code) of every code in the source that is not `compared`."""
    found, only_compared = set(), compared()
    for path, node in nodes():
        if node in only_compared:
            continue
        inside = path.relative_to(SOURCE).parts
        if isinstance(node, ast.Constant) and CODE.fullmatch(node.value):
            found.add((inside[0] if len(inside) > 1 else "ingot", node.value))
    kinds = {("ingot", kind.kind) for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "kind")}
    return found - kinds - {("cli", "E-CODE")}  # the placeholder of help texts


def test_every_error_has_a_code():
    assert without_code() == []


def test_the_catalog_has_exactly_the_codes_that_are_raised():
    listed = {(package, code) for package, entries in catalogs().items() for code in entries}
    shared = {code for package, code in listed if package == "ingot"}  # of the ground floor, for every package
    raised = {("ingot" if code in shared else package, code) for package, code in used()}
    assert (sorted(raised - listed), sorted(listed - raised)) == ([], [])
    codes = {code for _, code in listed}
    assert {node.value for node in compared() if CODE.fullmatch(str(node.value))} <= codes


def test_a_code_is_listed_once_and_described_whole():
    seen: dict[str, str] = {}
    for package, entries in catalogs().items():
        assert {code: (seen[code], package) for code in entries if code in seen} == {}
        seen |= dict.fromkeys(entries, package)
        for code, entry in entries.items():
            assert CODE.fullmatch(code), code
            assert set(entry) == {"meaning", "causes", "fix"}, code
            assert entry["meaning"] and entry["fix"] and entry["causes"] and all(entry["causes"]), code


@pytest.mark.parametrize("code, found", [("E-DISK-SPACE", True), ("E-NO-SUCH", False)])
def test_describe(code, found):
    assert bool(describe(code)) is found


# Codes of one cause that ends a command in one place and a build in another.
TWO_CLASSES = {"E-CLASSIFIER-FORMAT", "E-CORPUS-MISSING", "E-TOKENIZER-MISMATCH", "E-TOKENIZER-UNSET"}


def test_a_code_belongs_to_one_class_and_so_to_one_exit_code():
    classes: dict[str, set[str]] = {}
    for _, node in nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS and node.args:
            first = node.args[0]
            for option in [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]:
                if isinstance(option, ast.Constant):
                    classes.setdefault(option.value, set()).add(node.func.id)
    assert {code for code, found in classes.items() if len(found) > 1} == TWO_CLASSES
