"""Check how the project speaks: the first words of docstrings, the word list, and class names that are defined twice.

    python tools/words.py [FOLDER ...]     # the whole repository without one

Lines with `words: ok` in a comment, and those from `# words: off` to `# words: on`, are not checked.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

FOLDERS = ("src", "tools", "benchmarks", "examples", "tests", "docs", *sorted(p.name for p in Path().glob("*.md")))
OPENINGS = "Of And By With As Those What In Whether How Which Where Who Why It Its Returns Gives Raises Writes Reads"
BANNED = re.compile(
    r"\b(told|tell|tells|telling|said|in vain|behind|by the clock|by itself|by themselves|comes? to"  # words: ok
    r"|came to|stands?(?!-| for\b)|stood|lies?|meets?|whoever|mend|mends|mended)\b",  # words: ok
    re.IGNORECASE,
)


def bad_words(path: Path) -> list[str]:
    """Return one line per banned word of a source file or document."""
    text = re.sub(r"# words: off.*?# words: on", lambda m: "\n" * m[0].count("\n"), path.read_text("utf-8"), flags=re.S)
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if "words: ok" not in line]
    return [f"{path}:{n}: the word {match[0]!r}" for n, line in lines for match in BANNED.finditer(line)]


def bad_openings(path: Path, tree: ast.Module) -> list[str]:
    """Return one line per docstring that begins with neither a verb nor a noun phrase."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    nodes = [(getattr(n, "lineno", 1), ast.get_docstring(n)) for n in ast.walk(tree) if isinstance(n, kinds)]
    words = [(n, text.split()[0].strip("`,:;")) for n, text in nodes if text and text.strip()]
    return [f"{path}:{n}: a docstring begins with {word!r}" for n, word in words if word in OPENINGS.split()]


def main(folders: list[str]) -> int:
    problems, classes = [], defaultdict(list)
    for top in map(Path, folders or FOLDERS):
        files = [top] if top.is_file() else sorted(f for f in top.rglob("*") if f.suffix in (".py", ".md", ".toml"))
        for path in files:
            problems += bad_words(path) if path.name != "log.md" else []  # the log quotes what was tried
            tree = ast.parse(path.read_text("utf-8") if path.suffix == ".py" else "")
            problems += bad_openings(path, tree)
            for node in ast.walk(tree) if path.parts[0] == "src" else ():
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append(f"{path}:{node.lineno}")
    problems += [f"{places[0]}: class {name} also in {places[1:]}" for name, places in classes.items() if places[1:]]
    print("\n".join([*problems, f"{len(problems)} problems"]) if problems else "words: ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
