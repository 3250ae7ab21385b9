"""The parser's tables of elements: which tags close which open elements.

The tables simplify the tree construction of the HTML standard (section 13.2.6): no element is inserted, moved or
reopened. They keep the rules that decide which elements enclose a text.
"""

from enum import IntFlag
from functools import cache

import numpy as np

TEXT, OTHER, BREAK = 0, 1, 2  # ids of text nodes, of elements not listed here, of <br>


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_BLOCK = _words(
    "address article aside blockquote center details dialog dir div dl fieldset figcaption figure footer form header "
    "hgroup main menu nav ol section summary ul listing search"
)
_HEADINGS = _words("h1 h2 h3 h4 h5 h6")
_TABLE_PARTS = _words("caption colgroup tbody thead tfoot tr td th")
_VOID = _words(
    "area base basefont bgsound col embed frame hr img image input keygen link meta param source track wbr br"
)
_RAW = _words("script style noscript iframe noembed noframes textarea title xmp")
_INLINE = _words(
    "a abbr acronym applet audio b bdi bdo big blink button canvas cite code data datalist del dfn em font i ins kbd "
    "label legend map mark marquee math meter nobr object optgroup option output picture progress q rb rp rt rtc ruby "
    "s samp select slot small span strike strong sub sup svg template time tt u var video amp-ad"
)
_FIRST = ("", "", "br")  # TEXT, OTHER, BREAK
_REST = (*_words("html head body p pre li dd dt table"), *_BLOCK, *_HEADINGS, *_TABLE_PARTS, *_VOID, *_RAW, *_INLINE)
NAMES = (*_FIRST, *dict.fromkeys(name for name in _REST if name != "br"))
ID = {name: number for number, name in enumerate(NAMES) if name}


class TagRule(IntFlag):
    VOID = 1  # the element has no content
    RAW = 2  # the content is not parsed
    RAW_TO_END = 4  # ... even if the end tag is missing; other raw elements without an end tag are parsed normally
    HEADING = 8  # an end tag of any heading ends the element
    PRE = 16  # white space in the element is significant
    FOREIGN = 32  # inside this element, "/>" ends an element
    ONCE = 64  # a second start tag is ignored
    NO_END = 128  # end tags are ignored


# A start tag ends the outermost open element of the groups that it closes. An element that stops a group hides the
# open elements of the group from its content.
GROUPS = ("p", "li", "definition", "cell", "row", "section", "option", "a", "button", "ruby", "heading", "head")
BARRIERS = ("special", "scope", "table", "list")  # an end tag closes nothing outside the innermost open barrier element

_SCOPE = {"html", "table", "td", "th", "caption", "applet", "marquee", "object", "template"}
_SPECIAL = {*_BLOCK, *_HEADINGS, *_TABLE_PARTS, *_RAW, *_SCOPE} | {"body", "head", "p", "pre", "li", "dd", "dt"}
_IN_HEAD = {
    "base",
    "basefont",
    "bgsound",
    "link",
    "meta",
    "noframes",
    "noscript",
    "script",
    "style",
    "template",
    "title",
}
_MEMBERS = {
    "p": {"p"},
    "li": {"li"},
    "definition": {"dd", "dt"},
    "cell": {"td", "th"},
    "row": {"tr"},
    "section": {"tbody", "thead", "tfoot", "caption", "colgroup"},
    "option": {"option"},
    "a": {"a"},
    "button": {"button"},
    "ruby": {"rt", "rp"},
    "heading": set(_HEADINGS),
    "head": {"head"},
}
_STOPPED_BY = {
    "p": _SCOPE | {"button"},
    "li": _SPECIAL - {"address", "div", "p", "li"},
    "definition": _SPECIAL - {"address", "div", "p", "dd", "dt"},
    "cell": {"table", "template"},
    "row": {"table", "template"},
    "section": {"table", "template"},
    "option": _SPECIAL | {"select"},
    "a": _SPECIAL,
    "button": _SCOPE,
    "ruby": _SPECIAL | {"ruby"},
    "heading": _SPECIAL - set(_HEADINGS),
    "head": set(),
}
_CLOSED_BY = {
    "p": {*_BLOCK, *_HEADINGS, "p", "pre", "li", "dd", "dt", "table", "hr", "xmp"},
    "li": {"li"},
    "definition": {"dd", "dt"},
    "cell": {"td", "th", "tr", "tbody", "thead", "tfoot", "caption", "colgroup"},
    "row": {"tr", "tbody", "thead", "tfoot", "caption", "colgroup"},
    "section": {"tbody", "thead", "tfoot", "caption", "colgroup"},
    "option": {"option", "optgroup"},
    "a": {"a"},
    "button": {"button"},
    "ruby": {"rt", "rp"},
    "heading": set(_HEADINGS),
    "head": set(NAMES) - _IN_HEAD - {"html", "head"},  # and unknown elements
}
_BARRIER_MEMBERS = {
    "special": _SPECIAL,
    "scope": _SCOPE,
    "table": {"html", "table", "template"},
    "list": _SCOPE | {"ul", "ol"},
}


def _rules(name: str) -> int:
    found = TagRule(0)
    for rule, names in (
        (TagRule.VOID, _VOID),
        (TagRule.RAW, _RAW),
        (TagRule.RAW_TO_END, ("script", "style")),
        (TagRule.HEADING, _HEADINGS),
        (TagRule.PRE, ("pre", "listing")),
        (TagRule.FOREIGN, ("svg", "math")),
        (TagRule.ONCE, ("html", "head", "body")),
        (TagRule.NO_END, ("html", "body")),
    ):
        if name in names:
            found |= rule
    return int(found)


def _barrier(name: str) -> str:
    if name == "li":
        return "list"
    if name in _TABLE_PARTS or name == "table":
        return "table"
    return "scope" if name in _SPECIAL else "special"


@cache
def tag_rules() -> np.ndarray:
    """Return uint16 [len(NAMES), 6], one row per tag.

    The columns: TagRule flags, groups that the element belongs to, groups that it closes, groups that it stops,
    barriers that it forms, and the barrier for its end tag. Groups and barriers are bits in the order of GROUPS and
    BARRIERS; the last column is an index into BARRIERS.
    """
    table = np.zeros((len(NAMES), 6), np.uint16)
    for number, name in enumerate(NAMES):
        bits = [
            sum((name in sets[g]) << i for i, g in enumerate(GROUPS)) for sets in (_MEMBERS, _CLOSED_BY, _STOPPED_BY)
        ]
        barriers = sum((name in _BARRIER_MEMBERS[b]) << i for i, b in enumerate(BARRIERS))
        table[number] = [_rules(name), *bits, barriers, BARRIERS.index(_barrier(name))]
    return table
