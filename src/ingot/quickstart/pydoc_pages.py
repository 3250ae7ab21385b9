"""A script that renders the documentation of the standard library as HTML pages, one JSON line each.

The script imports the modules that it documents, so it runs in a separate process with a deadline. The environment is
empty, because pydoc prints the values of module variables, and no environment variable may appear in a page. Modules
that open windows, print, or show the state of the process are left out.

    env -i PYTHONHASHSEED=0 python -s -P pydoc_pages.py OUT.jsonl

Each line is {"path": "/library/json.html", "html": "..."}. The fixed hash seed fixes the order in which sets print.
"""

import importlib
import inspect
import json
import pkgutil
import pydoc
import re
import sys
import sysconfig
import warnings
from pathlib import Path

# First line: modules with side effects on import, or windows. Second line: their pages show this process or machine.
_SKIPPED_NAMES = """
    antigravity this idlelib turtle turtledemo tkinter test lib2to3 ensurepip pydoc_data
    os posix nt sys site sysconfig platform gc pwd grp spwd resource venv
"""
_SKIPPED = frozenset(_SKIPPED_NAMES.split())
_ADDRESS = re.compile(r"(at|handle)( |&nbsp;)(?:0x)?[0-9a-fA-F]{6,16}\b")


def module_names() -> list[str]:
    """Return the names of the public modules of the standard library, and of the modules in its packages."""
    names = []
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in _SKIPPED:
            continue
        names.append(name)
        folder = Path(sysconfig.get_path("stdlib")) / name
        if folder.is_dir():
            names += [f"{name}.{module.name}" for module in pkgutil.iter_modules([str(folder)])]
    return [n for n in names if not n.rpartition(".")[2].startswith("_") and not n.endswith(".tests")]


def module_page(name: str) -> str | None:
    """Return the page that `pydoc -w` would write, without addresses and local folders; None if the import fails."""
    try:
        module = importlib.import_module(name)
        page = pydoc.html.page(pydoc.describe(module), pydoc.html.document(module, name))
    except (Exception, SystemExit):
        return None  # a module for another platform, or one that needs a library that is not installed
    for folder in (sysconfig.get_path("stdlib"), sys.prefix, sys.base_prefix):
        page = page.replace(folder, "/usr/lib/python3")
    return _ADDRESS.sub(r"\1\g<2>0x0", page)


def topic_pages() -> list[tuple[str, str]]:
    """Return (name, page) of the language topics of `help()`, such as "FORMATTING"."""
    topics = importlib.import_module("pydoc_data.topics").topics
    pages = []
    for name, text in sorted(topics.items()):
        body = f"<h1>{name}</h1>\n<pre>{pydoc.html.escape(text)}</pre>"
        pages.append((name, pydoc.html.page(f"topic {name}", body)))
    return pages


def main(out: str) -> None:
    warnings.simplefilter("ignore")
    # If there is no docstring, pydoc searches the source for comments; this took 40% of the time and found nothing.
    inspect.getcomments = lambda object: None
    with Path(out).open("w", encoding="utf-8") as file:
        for name in module_names():
            if page := module_page(name):
                file.write(json.dumps({"path": f"/library/{name}.html", "html": page}) + "\n")
                file.flush()  # so that pages are kept if the deadline passes
        for name, page in topic_pages():
            file.write(json.dumps({"path": f"/topics/{name}.html", "html": page}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
