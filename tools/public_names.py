"""Write tests/unit/public_names.txt, every public name of `import ingot` with its signature, from the source:

    python tools/public_names.py

It prints the digest of the file, which CHANGELOG.md names next to what changed.
"""

import ast
import hashlib
from pathlib import Path

import ingot

FILE = Path(__file__).parents[1] / "tests" / "unit" / "public_names.txt"
SOURCE = Path(ingot.__file__).parents[1]


def definition(name: str) -> ast.FunctionDef | ast.ClassDef:
    """Return the syntax of a public function or class."""
    path = SOURCE / (ingot._MODULES[name].replace(".", "/") + ".py")
    kinds = (ast.FunctionDef, ast.ClassDef)
    return next(n for n in ast.parse(path.read_text("utf-8")).body if isinstance(n, kinds) and n.name == name)


def members(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Return the public methods and properties of a class, and those that Python calls for an operator."""
    functions = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    return [one for one in functions if not one.name.startswith("_") or one.name in ("__init__", "__len__", "__iter__")]


def signature(node: ast.FunctionDef, name: str) -> str:
    """Return the signature as it is in the source, on one line."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
        return f"{name}{returns}"
    return f"{name}({ast.unparse(node.args)}){returns}"


def surface() -> str:
    """Return the text of the file."""
    lines = []
    for name in sorted(ingot._MODULES):
        node = definition(name)
        if isinstance(node, ast.ClassDef):
            lines += [f"class {name}", *(signature(one, f"    {one.name}") for one in members(node))]
        else:
            lines.append(signature(node, name))
    return "\n".join(lines) + "\n"


def digest(text: str) -> str:
    """Return the digest by which CHANGELOG.md names a version of the file."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


if __name__ == "__main__":
    FILE.write_text(surface())
    print(f"{FILE.name} {digest(surface())}")
