"""Stage: a page to its text. Three methods, with one set of caps and the same cleaning behind each.

`fast` is resiliparse; `accurate` is ours (see docs/design/extraction.md); `trafilatura` is the package (Barbaresi 2021)
with `fast=True`, its own rules without the comparison to other extractors, and without comments.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version

from ingot.data.extract.clean import clean_text
from ingot.data.extract.encoding import decode_page
from ingot.data.extract.page import TOO_DEEP, TOO_MANY, Page, parse_page
from ingot.data.extract.refused import Refused
from ingot.data.sources.sniff import HTML_TYPES
from ingot.errors import require
from ingot.schema.document import Document, Drop

_RAN = {
    "fast": ("resiliparse", "main content"),
    "accurate": ("ingot", "main content"),
    "trafilatura": ("trafilatura", "fast"),
}


@dataclass(frozen=True, kw_only=True)
class ExtractRules:
    """method: "fast", "accurate" or "trafilatura". The others are caps; a page beyond one is dropped by name.

    max_bytes: of the page. max_depth: nesting of elements. max_work: sum of the depths of all elements ("fast" takes
    time in proportion to it; 4 million are under a second). max_nodes: elements and pieces of text ("accurate" and
    "trafilatura").
    """

    method: str = "accurate"
    max_bytes: int = 16 << 20
    max_depth: int = 1000
    max_work: int = 4_000_000
    max_nodes: int = 1_000_000

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.method not in _RAN:
            yield "method", f"is {self.method!r}, must be one of {', '.join(_RAN)}"
        for name in ("max_bytes", "max_depth", "max_work", "max_nodes"):
            if getattr(self, name) < 1:
                yield name, f"is {getattr(self, name)}, must be at least 1"
        if self.max_depth > 10_000:
            yield "max_depth", f"is {self.max_depth}, must be at most 10000"
        if self.max_nodes > 100_000_000:
            yield "max_nodes", f"is {self.max_nodes}, must be at most 100000000"


def extract_text(html: str, rules: ExtractRules | None = None) -> str:
    """The main content of `html`, cleaned; "" where there is none.

    A line is a paragraph, a list item or a row of a table; blank lines are between blocks. Raises Refused for a page
    beyond a cap, MissingPartError where the package of the method is not installed, and whatever a package raises.
    """
    rules = rules or ExtractRules()
    if rules.method == "fast":
        from ingot.data.extract.fast import main_text

        return clean_text(main_text(html, rules.max_depth, rules.max_work))
    page = parse_page(html.encode("utf-8", "replace"), rules.max_depth, rules.max_nodes)
    _check(page, rules)
    if rules.method == "accurate":
        from ingot.data.extract.accurate import main_text

        return clean_text(main_text(page))
    trafilatura = require("trafilatura", "trafilatura")
    return clean_text(trafilatura.extract(html, fast=True, include_comments=False) or "")


def _check(page: Page, rules: ExtractRules) -> None:
    if page.status == TOO_DEEP:
        raise Refused("extract.too_deep", f"over {rules.max_depth} levels")
    if page.status == TOO_MANY:
        raise Refused("extract.too_many_nodes", f"over {rules.max_nodes} elements and texts")


class Extract:
    """Stage: makes document.text of document.raw and clears raw. Plain text passes through the same cleaning.

    Rules: extract.too_large, extract.too_deep, extract.too_many_nodes, extract.failed (the error's name),
    extract.empty. Raises MissingPartError at once where the package of the method is not installed.
    """

    name = "extract"

    def __init__(self, rules: ExtractRules | None = None):
        self.rules = rules or ExtractRules()
        package, what = _RAN[self.rules.method]
        if self.rules.method == "trafilatura":
            require("trafilatura", "trafilatura")
        self.ran = f"{self.rules.method}: {package} {version(package)}, {what}"

    def __call__(self, document: Document) -> Drop | None:
        raw, document.raw = document.raw, b""
        if len(raw) > self.rules.max_bytes:
            return Drop(self.name, "extract.too_large", f"{len(raw)} bytes")
        text, encoding = decode_page(raw, document.charset)
        document.notes["encoding"] = encoding
        if document.content_type in HTML_TYPES:
            try:
                document.text = extract_text(text, self.rules)
            except Refused as refused:
                return Drop(self.name, refused.rule, refused.value)
            except Exception as error:  # whatever a parser cannot take costs one page, by name
                return Drop(self.name, "extract.failed", type(error).__name__)
        else:
            # Blank lines of source code are its own.
            document.text = clean_text(text, blank_lines="code_language" in document.notes)
        return None if document.text else Drop(self.name, "extract.empty")
