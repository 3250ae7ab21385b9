"""The stage that decodes a page and extracts its text. It has three methods with the same limits and cleaning.

`fast` is resiliparse (Bevendorff et al. 2018) on the lexbor parser; `accurate` is ingot's own method (see
docs/design/extraction.md); `trafilatura` is the package (Barbaresi 2021) without comments and with `fast=True`, which
uses its own rules without comparing the result with other extractors.
"""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5
from resiliparse.parse.html import HTMLTree, traverse_dom

from ingot.data.extract.page import TOO_DEEP, TOO_MANY, ParsedPage, parse_page
from ingot.data.guard import PluginCalls, broken_contract
from ingot.data.parts import Table, created, in_words, module_of, settings_of
from ingot.data.sources.sniff import HTML_TYPES
from ingot.errors import require
from ingot.plugins.extractor import EXTRACTORS
from ingot.plugins.registry import INGOT, resolve
from ingot.ranges import PositiveBytes, PositiveCount, PositiveQueue
from ingot.schema.corpus import Document, Drop

_USUAL_DEPTH = 64
# Control characters except tab and line feed; marks that control bidirectional layout; soft hyphens and zero-width
# spaces, which invisibly split words; the byte order mark. Joiners stay, because Persian and Hindi words need them.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufffe\uffff]"
)
_WIDE_LINE_ENDS = re.compile("[\u2028\u2029\x85]")
_BLANK_LINES = re.compile(r"\n{3,}")


class PageRefused(Exception):
    """A page exceeds a limit. rule: the drop rule ("extract.too_deep"). value: a text about the exceeded limit."""

    def __init__(self, rule: str, value: str):
        super().__init__(f"{rule}: {value}")
        self.rule, self.value = rule, value


@dataclass(frozen=True, kw_only=True)
class ExtractRules:
    """The method of extraction and limits; a page beyond a limit is dropped.

    method: "fast", "accurate", "trafilatura", or an extractor that a plug-in registers (plugins/extractor.py).
    max_bytes: size of the page. max_depth: levels of nested elements. max_work: sum of the depths of all elements (for
    "fast", whose time is proportional to this sum; 4 million take under a second). max_nodes: elements and pieces of
    text (for the other methods).
    """

    method: str = "accurate"
    max_bytes: PositiveBytes = 16 << 20
    max_depth: PositiveQueue = 1000
    max_work: PositiveCount = 4_000_000
    max_nodes: PositiveCount = 1_000_000

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.method not in EXTRACTORS:
            yield "method", EXTRACTORS.unknown(self.method)
        for name in ("max_bytes", "max_depth", "max_work", "max_nodes"):
            if getattr(self, name) < 1:
                yield name, f"is {getattr(self, name)}, must be at least 1"
        if self.max_depth > 10_000:
            yield "max_depth", f"is {self.max_depth}, must be at most 10000"
        if self.max_nodes > 100_000_000:
            yield "max_nodes", f"is {self.max_nodes}, must be at most 100000000"


def extract_text(html: str, rules: ExtractRules | None = None) -> str:
    """Return the main content of `html`, cleaned; "" if there is none.

    A line is a paragraph, a list item or a row of a table; a blank line separates blocks. Raises PageRefused for a page
    beyond a limit, MissingPartError if the package of the method is not installed, and the errors of that package or of
    a plug-in; ConfigError if the method of a plug-in has a setting without default, or does not return a text.
    """
    rules = rules or ExtractRules()
    if module_of("extractor", rules.method) != INGOT:
        return clean_text(Extract(rules).main_text(html))
    return clean_text(resolve(EXTRACTORS[rules.method].extract)(html, rules))


def extract_fast(html: str, rules: ExtractRules) -> str:
    return resiliparse_text(html, rules.max_depth, rules.max_work)


def extract_accurate(html: str, rules: ExtractRules) -> str:
    from ingot.data.extract.accurate import main_text

    return main_text(parse_within(html, rules))


def extract_trafilatura(html: str, rules: ExtractRules) -> str:
    parse_within(html, rules)
    trafilatura = require("trafilatura", "trafilatura")
    return trafilatura.extract(html, fast=True, include_comments=False) or ""


def parse_within(html: str, rules: ExtractRules) -> ParsedPage:
    """Return the parsed page. Raises PageRefused if it is beyond `max_depth` or `max_nodes`."""
    page = parse_page(html.encode("utf-8", "replace"), rules.max_depth, rules.max_nodes)
    if page.status == TOO_DEEP:
        raise PageRefused("extract.too_deep", f"over {rules.max_depth} levels")
    if page.status == TOO_MANY:
        raise PageRefused("extract.too_many_nodes", f"over {rules.max_nodes} elements and texts")
    return page


class Extract:
    """The stage that sets document.text from document.raw and clears raw. Plain text is cleaned in the same way.

    Drop rules: extract.too_large, extract.too_deep, extract.too_many_nodes, extract.failed (with the name of the
    exception), extract.plugin (with the error of a plug-in's method), extract.empty. table: the settings of a plug-in's
    method. The constructor raises MissingPartError if the package of the method is not installed.
    """

    name = "extract"

    def __init__(self, rules: ExtractRules | None = None, table: Table | None = None):
        self.rules = rules or ExtractRules()
        method, part = self.rules.method, EXTRACTORS[self.rules.method]
        if method == "trafilatura":
            require("trafilatura", "trafilatura")
        self._extract = resolve(part.extract)
        self._settings: Any = self.rules
        self._calls: PluginCalls | None = None
        package = f"{part.package} {created('extractor', method, version, part.package)}" if part.package else ""
        if (module := module_of("extractor", method)) != INGOT:
            self._settings = settings_of("extractor", method, table)
            self._calls = PluginCalls(in_words("extractor", method), self.name)
            package = ", ".join(filter(None, (f"plug-in {module}", package)))
        self.ran = f"{method}: {package}, {part.describes}"

    def __call__(self, document: Document) -> Drop | None:
        raw, document.raw = document.raw, b""
        if len(raw) > self.rules.max_bytes:
            return Drop(self.name, "extract.too_large", f"{len(raw)} bytes")
        text, encoding = decode_page(raw, document.charset)
        document.notes["encoding"] = encoding
        if document.content_type in HTML_TYPES:
            try:
                document.text = clean_text(self.main_text(text))
            except PageRefused as refused:
                return Drop(self.name, refused.rule, refused.value)
            except Exception as error:
                if self._calls:
                    return self._calls.raised(error)
                # parsers raise exceptions of many types; an exception drops only this page
                return Drop(self.name, "extract.failed", type(error).__name__)
        else:
            # Blank lines and indentation of source code are kept.
            document.text = clean_text(text, blank_lines="code_language" in document.notes)
        return None if document.text else Drop(self.name, "extract.empty")

    def main_text(self, html: str) -> str:
        """Return the text that the method finds, not cleaned. Raises PageRefused, and what the method raises."""
        if self._calls is None:
            return self._extract(html, self._settings)
        parse_within(html, self.rules)
        text = self._extract(html, self._settings)
        self._calls.returned()
        if not isinstance(text, str):
            raise broken_contract(self._calls.part, f"returned {type(text).__name__}", "an extractor returns a str")
        return text


def resiliparse_text(html: str, max_depth: int, max_work: int) -> str:
    """Return the main content that resiliparse finds. Raises PageRefused if nesting is too deep, and parser errors.

    max_depth: levels of nested elements. max_work: sum of the depths of all elements; the time of the search for main
    content is proportional to this sum (measured: 0.2 µs per level).
    """
    tree = HTMLTree.parse(html)
    check_depth(html, tree, max_depth, max_work)
    return tree_text(tree)


def tree_text(tree: HTMLTree) -> str:
    return extract_plain_text(
        tree,
        preserve_formatting=True,
        main_content=True,
        list_bullets=False,
        alt_texts=False,
        links=False,
        form_fields=False,
        noscript=False,
        comments=False,
    )


def check_depth(html: str, tree: HTMLTree, max_depth: int, max_work: int) -> None:
    """Raise PageRefused if an element has `max_depth` or more ancestors, or if the depths of all elements add up to
    more than `max_work`: extraction time grows with that sum. Pages less than 32 levels deep are never refused for it.

    Adding up the depths needs a slow walk over the tree (4 µs per element). CSS selectors, the shortest first, find the
    few deep pages, and only those that may exceed `max_work` are walked.
    """
    elements = html.count("<")  # at least the number of elements with a start tag in the page
    root = tree.document.document_element if tree.document else None
    if root is None or elements <= min(max_depth, max_work**0.5):
        return
    harmless_depth = max(max_work // elements, 32)
    if not _is_deeper(root, min(_USUAL_DEPTH, max_depth, harmless_depth)):
        return
    if _is_deeper(root, max_depth):
        raise PageRefused("extract.too_deep", f"over {max_depth} levels")
    if harmless_depth < max_depth and _is_deeper(root, harmless_depth):
        depths: list[int] = []
        traverse_dom(root, lambda context: depths.append(context.depth), elements_only=True)
        if sum(depths) > max_work:
            raise PageRefused(
                "extract.too_deep", f"{len(depths)} elements at mean depth {sum(depths) / len(depths):.0f}"
            )


def _is_deeper(root, depth: int) -> bool:
    """Return True if an element has at least `depth` ancestors. Use a CSS selector, which runs at native speed."""
    return root.query_selector(">".join(["*"] * (depth + 1))) is not None


def clean_text(text: str, *, blank_lines: bool = False) -> str:
    """Return `text` with Unix line ends, plain spaces, no invisible characters, and at most one blank line in a row.

    blank_lines: keep all blank lines, and the indentation of the first line.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.isascii():
        text = _WIDE_LINE_ENDS.sub("\n", text).replace("\xa0", " ")
    text = _INVISIBLE.sub("", text)
    if " \n" in text or "\t\n" in text:
        text = "\n".join([line.rstrip(" \t") for line in text.split("\n")])
    if blank_lines:
        return text.strip("\n").rstrip()
    if "\n\n\n" in text:
        text = _BLANK_LINES.sub("\n\n", text)
    return text.strip()


# -- encodings --


_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_META = re.compile(rb"<meta[^>]{1,300}?charset\s*=\s*[\"']?\s*([\w.:-]{2,40})", re.IGNORECASE)
_META_BYTES = 4096
# WHATWG name -> Python encoding that is a superset: pages declare the smaller encoding but use the larger one.
_SUPERSETS = {"gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "iso8859-11": "cp874"}
_TOLERATED_ERRORS = 0.01
_HEAD_BYTES = 1024


def decode_page(raw: bytes, header_charset: str) -> tuple[str, str]:
    """Return (text, name of the encoding used). Never raises; bytes that do not decode become U+FFFD.

    The order: byte order mark; UTF-16 if the pattern of zero bytes shows it; UTF-8 if all bytes are valid (text in
    another encoding is almost never valid UTF-8, and headers are often wrong); the HTTP header; the meta element;
    detection by uchardet. A declared encoding is used if at most 1% of the characters fail; otherwise the encoding with
    the fewest failures is used. Only WHATWG encodings are possible, so no page can choose a slow or unusual codec.
    """
    for bom, name in _BOMS:
        if raw.startswith(bom):
            return raw[len(bom) :].decode(name, "replace"), name
    if name := _unmarked_utf16(raw[:_HEAD_BYTES]):
        return raw.decode(name, "replace"), name
    declared = [name for name in (_known(header_charset), _known(_meta_charset(raw))) if name]
    if "iso2022_jp" not in declared:  # this encoding uses only ASCII bytes, so it would look like UTF-8
        try:
            return raw.decode("utf-8"), "utf-8"
        except UnicodeDecodeError:
            pass  # not UTF-8: try the encodings that the page declares
    best = ("", "", 2.0)
    for name in (*declared, None, "utf-8"):
        name = name or _known(detect_encoding(raw) or "") or "cp1252"
        text = raw.decode(name, "replace")
        errors = text.count("\ufffd") / max(len(text), 1)
        if errors < best[2]:
            best = (text, name, errors)
        if errors <= _TOLERATED_ERRORS:
            break
    return best[0], best[1]


def _unmarked_utf16(head: bytes) -> str:
    """Return "utf-16-le" or "utf-16-be" if every other byte of `head` is zero, as in UTF-16 markup, else "".

    Such bytes are also valid UTF-8, so this check comes before UTF-8.
    """
    zeros = [head[first::2].count(0) for first in (0, 1)]
    if sum(zeros) * 3 <= len(head) or min(zeros) * 10 > max(zeros):
        return ""
    return "utf-16-le" if zeros[1] > zeros[0] else "utf-16-be"


def _meta_charset(raw: bytes) -> str:
    match = _META.search(raw[:_META_BYTES])
    return match[1].decode("ascii", "ignore") if match else ""


def _known(charset: str) -> str:
    """Return Python's name of the WHATWG encoding with the label `charset`, or ""."""
    name = map_encoding_to_html5(charset, fallback_utf8=False) if charset else None
    return _SUPERSETS.get(name, name) if name else ""
