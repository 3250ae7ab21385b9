"""HTML to text: the main content of a page, by resiliparse (Bevendorff et al. 2018), on the lexbor parser."""

import re

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree, traverse_dom

from ingot.data.extract.encoding import decode_page
from ingot.data.sources.sniff import HTML_TYPES
from ingot.schema.document import Document, Drop

# Control characters except tab and line feed; marks that steer bidirectional layout; soft hyphens and zero-width
# spaces, which break words that look whole; the byte order mark. Joiners stay: they spell words in Persian and Hindi.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufffe\uffff]"
)
_LINE_ENDS = re.compile("\r\n?|[\u2028\u2029\x85]")
# The look-behind lets a match start only where a run of spaces starts, or a long run would take quadratic time.
_SPACE_AT_LINE_END = re.compile(r"(?<![ \t])[ \t]+\n")
_BLANK_LINES = re.compile(r"\n{3,}")


def clean_text(text: str) -> str:
    """Unix line ends, plain spaces, no invisible characters, at most one blank line between paragraphs."""
    text = _LINE_ENDS.sub("\n", text).replace("\xa0", " ")
    text = _INVISIBLE.sub("", text)
    text = _SPACE_AT_LINE_END.sub("\n", text)
    return _BLANK_LINES.sub("\n\n", text).strip()


class Extract:
    """Stage: makes document.text of document.raw and clears raw. Plain text passes through the same cleaning.

    max_bytes: of the decoded page. max_depth: nesting of elements. max_work: sum of the depths of all elements; the
    search for main content takes time in proportion to it (measured: 0.2 µs each, so 4 million are under a second).
    Rules: extract.too_large, extract.too_deep, extract.failed (the error's name), extract.empty.
    """

    name = "extract"
    ran = "resiliparse main content"

    def __init__(self, max_bytes: int = 16 << 20, max_depth: int = 1000, max_work: int = 4_000_000):
        self.max_bytes, self.max_depth, self.max_work = max_bytes, max_depth, max_work

    def __call__(self, document: Document) -> Drop | None:
        raw, document.raw = document.raw, b""
        if len(raw) > self.max_bytes:
            return Drop(self.name, "extract.too_large", f"{len(raw)} bytes")
        text, encoding = decode_page(raw, document.charset)
        document.notes["encoding"] = encoding
        if document.content_type in HTML_TYPES:
            try:
                tree = HTMLTree.parse(text)
                if drop := self._too_deep(text, tree):
                    return drop
                text = _main_content(tree)
            except Exception as error:  # whatever the parser cannot take costs one page, by name
                return Drop(self.name, "extract.failed", type(error).__name__)
        document.text = clean_text(text)
        return None if document.text else Drop(self.name, "extract.empty")

    def _too_deep(self, text: str, tree: HTMLTree) -> Drop | None:
        """Hostile nesting. The walk over the tree is slow (4 µs per element), so it is done where a bound is broken."""
        elements = text.count("<")  # at least
        root = tree.document.document_element if tree.document else None
        if root is None or elements <= min(self.max_depth, self.max_work**0.5):
            return None
        if root.query_selector(_deeper_than(self.max_depth)) is not None:
            return Drop(self.name, "extract.too_deep", f"over {self.max_depth} levels")
        harmless_depth = max(self.max_work // elements, 32)
        if harmless_depth < self.max_depth and root.query_selector(_deeper_than(harmless_depth)) is not None:
            depths: list[int] = []
            traverse_dom(root, lambda context: depths.append(context.depth), elements_only=True)
            if sum(depths) > self.max_work:
                value = f"{len(depths)} elements at mean depth {sum(depths) / len(depths):.0f}"
                return Drop(self.name, "extract.too_deep", value)
        return None


def _deeper_than(depth: int) -> str:
    """A selector of exactly the elements with at least `depth` ancestors, matched at native speed."""
    return ">".join(["*"] * (depth + 1))


def _main_content(tree: HTMLTree) -> str:
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
