"""The guide's pages: the prose of the docstrings of installed packages, one HTML page per module.

No package is imported. A docstring is a triple-quoted string at the start of a file, or on the line after a line that
ends in a colon; `ast.literal_eval` reads it. This takes two seconds for 82 MB of source, whereas parsing whole modules
takes half a minute.
"""

import ast
import inspect
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path

# torch installs the others; without torch, those that are installed are used.
PACKAGES = ("torch", "numpy", "sympy", "networkx")
_SKIPPED_FOLDERS = frozenset(["site-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo"])
_SKIPPED_TOPS = frozenset(["antigravity", "this"])

# Matches every triple-quoted string, so that the end of a string is never mistaken for the beginning of the next.
_STRING = re.compile(r"([A-Za-z]{0,2})(\"\"\"|''')(.*?)(?<!\\)\2", re.DOTALL)
_DEFINITION = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_ONLY_COMMENTS = re.compile(r"(?:\s*#[^\n]*)*\s*")
_HEADER_REACH = 2000  # characters before a docstring in which its `def` or `class` is searched for

_ROLE = re.compile(r":[\w:+-]+:`(?:[^`<]*<)?[~!]?([^`>]+)>?`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`__?")
_TICKS = re.compile(r"`{1,2}([^`]+)`{1,2}_{0,2}")
_STARS = re.compile(r"(?<!\w)\*{1,2}([^*\s][^*]*?)\*{1,2}(?!\w)")
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*$")
_CODE = re.compile(r"[{}|\\]|>>>|==|::|\w\(\w+=|^\.\. |^:\w+|^[-*+] |^@")
_GOOGLE_LABEL = re.compile(r"^\*{0,2}[\w.]+(?: \([^)]*\))?:\s+")
_SECTION = re.compile(r"^\s*[A-Z]\w+:?$")  # "Args:", "Parameters"
_UNDERLINE = re.compile(r"^([=~^\-\"'#*+])\1{2,}$")
_PROSE_SECTIONS = frozenset(["notes", "note", "description", "summary", "introduction", "explanation", "details"])


@dataclass(frozen=True, slots=True)
class GuidePage:
    """A page of the guide. module: the dotted name. sections: pairs (name of an object, its paragraphs); the paragraphs
    of the module come first and have the name ""."""

    module: str
    sections: tuple[tuple[str, tuple[str, ...]], ...]


def source_files() -> list[tuple[str, Path]]:
    """Return (module name, file) of the standard library and of the installed PACKAGES, sorted by name."""
    found = []
    for root, prefix in _roots():
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS)
            dotted = ".".join([*prefix, *Path(folder).relative_to(root).parts])
            for file in files:
                stem = file.removesuffix(".py")
                if stem == file or stem == "__main__" or (not dotted and stem in _SKIPPED_TOPS):
                    continue
                module = dotted if stem == "__init__" else f"{dotted}.{stem}".lstrip(".")
                found.append((module, Path(folder) / file))
    return sorted(found)


def _roots() -> Iterator[tuple[Path, list[str]]]:
    yield Path(sysconfig.get_path("stdlib")), []
    for name in PACKAGES:
        spec = find_spec(name) if name not in sys.modules else sys.modules[name].__spec__
        if spec and spec.submodule_search_locations:
            yield Path(next(iter(spec.submodule_search_locations))), [name]


def read_page(module: str, file: Path) -> GuidePage:
    """Read the prose of one source file; repeated paragraphs are kept once. The page has no sections if there is no
    prose."""
    source = file.read_text(encoding="utf-8", errors="replace")
    seen: set[str] = set()
    sections = []
    for name, docstring in docstrings(source):
        paragraphs = tuple(p for p in prose(docstring) if not (p in seen or seen.add(p)))
        if paragraphs:
            sections.append((name, paragraphs))
    return GuidePage(module, tuple(sections))


def docstrings(source: str) -> Iterator[tuple[str, str]]:
    """Yield pairs (name of the class or function, docstring) in the order of the file; the module's name is ""."""
    for match in _STRING.finditer(source):
        before = source[max(0, match.start() - _HEADER_REACH) : match.start()]
        code = before.rstrip()
        at_top = match.start() == len(before) and _ONLY_COMMENTS.fullmatch(code) is not None
        below_header = code.endswith(":") and "\n" in before[len(code) :]
        if match[1].lower() not in ("", "r", "u") or not (at_top or below_header):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes such as "\d" in docstrings
                text = ast.literal_eval(match[0])
        except (SyntaxError, ValueError):
            continue  # not a string literal, for example half of a commented-out string
        name = "" if at_top else _name_above(code)
        if at_top or name:
            yield name, text


def _name_above(code: str) -> str:
    """Return the name in the last `def` or `class` line of `code`, "" if there is none."""
    place = max(code.rfind("def "), code.rfind("class "))
    match = _DEFINITION.match(code, code.rfind("\n", 0, max(place, 0)) + 1)
    return match[1] if match else ""


def prose(docstring: str) -> list[str]:
    """Return the sentences of a docstring without their markup, one string per paragraph.

    Doctests, code, lists, headings, and the names and types in tables of parameters are left out.
    """
    paragraphs = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        lines = block.split("\n")
        if len(lines) > 2 and _UNDERLINE.match(lines[1]) and lines[0].strip().lower() in _PROSE_SECTIONS:
            lines = lines[2:]
        if ">>>" in block or any(_CODE.search(line) for line in lines):
            continue
        paragraphs += filter(_is_prose, map(_plain, _entries(lines)))
    return paragraphs


def _entries(lines: list[str]) -> Iterator[str]:
    """Yield the entries of a block: its whole text if it is plain, or the descriptions if it is a parameter table."""
    if not any(line[:1].isspace() or _UNDERLINE.match(line) for line in lines):
        yield " ".join(line.strip() for line in lines)
        return
    entry: list[str] = []
    indent = 0
    for line in [*lines, "end"]:
        here = len(line) - len(line.lstrip())
        if here <= indent or not entry:
            if entry:
                # A label "x : array_like" is alone on the line above its description; "x (Tensor): " is on the same
                # line.
                first = _GOOGLE_LABEL.sub("", entry[0])
                yield " ".join(entry[1:] if first == entry[0] and len(entry) > 1 else [first, *entry[1:]])
            entry, indent = [], here
        if not _UNDERLINE.match(line.strip()) and not _SECTION.match(line):
            entry.append(line.strip())


def _is_prose(text: str) -> bool:
    if not _SENTENCE_END.search(text):
        return False
    words = text.split()
    alphabetic = sum(word[0].isalpha() or word[-1].isalpha() for word in words)
    return len(words) >= 5 and alphabetic >= 0.85 * len(words)


def _plain(text: str) -> str:
    if "`" not in text and "*" not in text:
        return text
    text = _ROLE.sub(lambda match: match[1].rpartition(".")[2] if "." in match[1] else match[1], text)
    text = _LINK.sub(r"\1", text)
    return _STARS.sub(r"\1", _TICKS.sub(r"\1", text))


def url_path(module: str) -> str:
    """Return the path of a module's page: 'torch.nn.functional' -> '/torch/nn/functional.html'."""
    return "/" + module.replace(".", "/") + ".html"


def render_page(page: GuidePage, neighbors: list[str]) -> str:
    """Return the HTML of a page of the guide: navigation, article, footer. neighbors: names of modules to link to."""
    links = "\n".join(f'      <li><a href="{url_path(n)}">{escape(n)}</a></li>' for n in neighbors)
    crumbs = " / ".join(escape(part) for part in page.module.split("."))
    body = []
    for name, paragraphs in page.sections:
        if name:
            body.append(f'    <h2 id="{escape(name)}">{escape(name)}</h2>')
        body += [f"    <p>{escape(text, quote=False)}</p>" for text in paragraphs]
    article = "\n".join(body)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <title>{escape(page.module)} | The Guide</title>
  <link rel="stylesheet" href="/static/guide.css">
  <script>document.documentElement.className = "js";</script>
</head>
<body>
  <header><a class="logo" href="/">The Guide</a>
    <form action="/search"><input name="q" placeholder="Search"><button>Go</button></form></header>
  <nav class="sidebar"><h3>Modules</h3>
    <ul>
{links}
    </ul>
  </nav>
  <main><article>
    <div class="breadcrumbs">{crumbs}</div>
    <h1>{escape(page.module)}</h1>
{article}
  </article></main>
  <footer><p>Made from the documentation of installed packages.
    <a href="/about.html">About</a> | <a href="/contact.html">Contact</a></p></footer>
</body>
</html>
"""


def render_mirror(page: GuidePage) -> str:
    """Return the HTML of the page on the mirror site: the same text in another template, so a near-duplicate."""
    paragraphs = [text for _, texts in page.sections for text in texts]
    article = "".join(f'<div class="para">{escape(text, quote=False)}</div>' for text in paragraphs)
    return (
        f"<html><head><title>{escape(page.module)} - mirrored docs</title></head><body><table width=100%><tr><td>"
        f"<b>Mirror of documentation</b></td></tr></table><div id=content><h3>{escape(page.module)}</h3>{article}</div>"
        f"<div class=footer>Mirrored with care. Updated daily.</div></body></html>"
    )
