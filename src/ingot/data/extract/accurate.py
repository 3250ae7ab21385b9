"""The main content of a page: which of its rows are text that people came to read.

Four steps over the flat arrays of a page, each a few sums:

1. What is never content goes by its tag (`nav`, `button`, ...) or because it is hidden; what its class, id or role
   calls noise goes if it holds little prose.
2. The root of the content is the element that is marked as such and holds a good share of the prose, or, without
   marks, the innermost element with most of it. A standfirst between the title and the root is taken in.
3. Inside of the root, noise goes again, then cards (boxes of links), paragraphs of links, labels, headings of nothing.
4. What is left is written down, one line per paragraph.

Prose is text in paragraphs that are long, or have the punctuation of sentences, and are not mostly links. The ideas are
old: density of links (Kohlschütter et al. 2010, Boilerpipe), marked containers in a fixed order (Barbaresi 2021,
trafilatura), conditional cleaning of boxes (Arc90's Readability). The constants were set on one half of the pages that
docs/design/extraction.md names, and confirmed on the other.
"""

import html as html_entities
import json
import re
from dataclasses import dataclass

import numpy as np

from ingot.data.extract.page import Page
from ingot.data.extract.tags import ID
from ingot.data.extract.vocabulary import Mark

# Prose.
_PARAGRAPH, _SENTENCES = 50, 3  # characters that make one with punctuation; marks that make one of any length
_LONG = 200  # characters that make one without punctuation
_LITTLE = 300  # less prose than this on a page: then all text that is not links counts
# Noise: the largest share of the page's prose that an element may hold and still go.
_LIGHT_SHARE, _HEAVY_SHARE, _HEAVY_SHARE_INSIDE = 1 / 6, 2 / 3, 0.9
_BODY_SHARE = 1 / 8  # an element marked as text that holds more is never noise
_HOLDS = 1 / 3  # marks the ancestors of an element with more as no noise
# The root.
_LEAST_PROSE = 150
_SHARES = (1 / 8, 1 / 4)  # of the page's prose, that a root of each tier has at least
_ONE_OF_MANY = 0.6  # the best element of a tier holds that share of what the tier holds; else their common ancestor
_NEARLY_ALL = 0.9  # an element inside with that share is the better root
_MOST = 0.75  # share of the page's prose of a root without marks
# The standfirst.
_LEAD, _LEADS = 120, 1000  # characters: of each paragraph, at least; of all, at most
# Inside of the root.
_TOO_LITTLE = 250  # characters; then once more without the rules for noise, and the page's structured data
_CARD_LINKS, _CARD_PROSE = 0.5, 100  # a box with at least that share in links and at most that prose is a card
_TEASERS = 3  # as many neighbours at least that announce other pages are no text of this one
_TEASER_TITLE, _TEASER_RUNS, _TEASER_PROSE = 15, 4, 500  # characters of the link; paragraphs and prose of one, at most
_TAG_BYTES = 4096  # of a link, looked through for where it leads
_TEXT = 500  # characters of prose beside all teasers, or half: else they are what the page is about
_PLAIN, _PLAIN_SHARE = 20, 1 / 6  # characters that are not links in a paragraph that is mostly links
_CELL = 150  # characters of a cell of a table of data, at most
_LABEL = 25  # a shorter text outside of paragraphs, without punctuation, is a label


def _tags(names: str) -> np.ndarray:
    table = np.zeros(256, bool)
    table[[ID[name] for name in names.split()]] = True
    return table


def _bits(*marks: Mark) -> np.uint64:
    return np.uint64(sum(int(mark) for mark in marks))


_BLOCK = _tags(
    "html body address article aside blockquote center details dialog dir div dl dd dt fieldset figcaption figure "
    "footer form header hgroup main menu nav ol p pre section summary ul li listing search h1 h2 h3 h4 h5 h6 hr table "
    "caption colgroup thead tbody tfoot tr td th"
)
_TIGHT = _tags("li tr td th dt dd")  # no blank line around them
_LINE = _BLOCK | _tags("br")
_NEVER = _tags(
    "head title nav button select option datalist textarea template svg math dialog menu object applet audio video "
    "canvas map input iframe noscript script style noembed noframes xmp progress meter legend label search fieldset "
    "amp-ad"
)
_CHROME = _tags("aside footer figcaption")
_PROTECTED = _tags("html body main article")  # their classes speak of the page, not of them
_ROOTS = _tags("div section article main td center form")
_HEADING = _tags("h1 h2 h3 h4 h5 h6")
_TEASER_BOXES = _tags("div li article section")
_CARDS = _tags("div ul ol section table dl aside form figure li header footer center tr")
_PARAGRAPHS = _tags("p h1 h2 h3 h4 h5 h6 li pre td th dd dt blockquote")
_CELLS = _tags("td th")
_PRE = _tags("pre listing")
_LIGHT = _bits(Mark.NAVIGATION, Mark.SHARE, Mark.META, Mark.AD, Mark.CAPTION)  # never long texts
_HEAVY = _bits(Mark.FOOTER, Mark.SIDE, Mark.RELATED, Mark.COMMENT, Mark.REQUEST)
_BODY, _ARTICLE = _bits(Mark.BODY), _bits(Mark.ARTICLE)
_HIDDEN, _LINK, _DATA = _bits(Mark.HIDDEN), _bits(Mark.LINK), _bits(Mark.DATA)

_JOINTS = ("", " ", "\t", "\n", "\n\n")
_ELLIPSES = tuple(map(str.encode, ("...", "…", "&hellip;", "...]", "…]", "&hellip;]")))
_NOWHERE = re.compile(rb"""href\s*=\s*["']?\s*(?:#|javascript:)""", re.IGNORECASE)  # opens something on this page
_NUMBER_TOO_LONG = re.compile(r"&#(?:\d{8,}|[xX][0-9a-fA-F]{7,});?")
_ARTICLE_BODY = re.compile(rb'"articleBody"\s*:\s*("[^"\\]*+(?:\\.[^"\\]*+)*+")')


def main_text(page: Page) -> str:
    """Its main content, not cleaned yet; "" where there is none. A line is a paragraph, a blank line parts blocks."""
    rows = _Rows(page)
    kept = _select(rows)
    text = _write(rows, kept)
    if len(text) < _TOO_LITTLE:
        return max(text, _article_body(page), key=len)
    return text


class _Rows:
    """A page with what every step asks for."""

    def __init__(self, page: Page):
        self.page, self.size = page, len(page.tag)
        self.text = page.tag == 0
        self.linked = self.within((page.tag == ID["a"]) & ((page.flags & _LINK) != 0))
        self.cells = self._data_cells()
        self.block = self.edges(_BLOCK[page.tag] & ~self.cells)

    def _data_cells(self) -> np.ndarray:
        """bool: cells of rows in which every cell is short and has no blocks. Such a row is one line of text."""
        page, is_cell = self.page, _CELLS[self.page.tag]
        if not is_cell.any():
            return is_cell
        blocks, chars = self.sums(_LINE[page.tag]), self.sums(page.chars)
        row = is_cell & (page.parent >= 0) & (page.tag[page.parent] == ID["tr"])
        large = row & ((blocks > 1) | (chars > _CELL))
        broken = np.zeros(self.size, bool)
        broken[page.parent[large]] = True
        return row & ~broken[page.parent]

    def edges(self, elements: np.ndarray) -> np.ndarray:
        """How many starts and ends of `elements` (bool) come up to each row."""
        rows = np.flatnonzero(elements)
        edges = np.bincount(self.page.end[rows], minlength=self.size + 1)
        edges[rows] += 1
        return np.cumsum(edges[: self.size])

    def within(self, elements: np.ndarray) -> np.ndarray:
        """bool: which rows are in one of `elements` (bool), or are one."""
        rows = np.flatnonzero(elements)
        change = -np.bincount(self.page.end[rows], minlength=self.size + 1)
        change[rows] += 1
        return np.cumsum(change[: self.size]) > 0

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Of `values`, over each row and everything inside of it."""
        total = np.zeros(self.size + 1, np.int64)
        np.cumsum(values, out=total[1:])
        return total[self.page.end] - total[:-1]

    def runs(self, chosen: np.ndarray) -> "_Runs":
        """The chosen text rows in runs without a block's edge between them: paragraphs, whatever their element."""
        page, rows = self.page, np.flatnonzero(self.text & chosen)
        if not len(rows):
            none = np.zeros(0, np.int64)
            return _Runs(rows, none, none, none, none, none)
        block = self.block[rows]
        first = np.flatnonzero(np.concatenate(([True], block[1:] != block[:-1])))
        chars = page.chars[rows]
        linked = np.where(self.linked[rows], chars, 0)
        chars, linked, marks = (np.add.reduceat(values, first) for values in (chars, linked, page.marks[rows]))
        return _Runs(rows, rows[first], np.diff(np.append(first, len(rows))), chars, linked, marks)

    def prose(self, chosen: np.ndarray) -> np.ndarray:
        """Characters of prose among the chosen rows, each paragraph's at its first row."""
        runs = self.runs(chosen)
        plain, weight = runs.chars - runs.linked, np.zeros(self.size, np.int64)
        sentences = (runs.chars >= _PARAGRAPH) & (runs.marks > 0) | (runs.marks > _SENTENCES) | (runs.chars >= _LONG)
        weight[runs.head] = np.where(sentences & (runs.linked * 3 <= runs.chars), plain, 0)
        if weight.sum() < _LITTLE:
            weight[runs.head] = np.maximum(plain - 2 * runs.linked, 0)
        return weight


@dataclass(frozen=True, slots=True)
class _Runs:
    """rows: of text. The other arrays are per run: its first row, number of rows, and characters, characters in links
    and marks of sentences."""

    rows: np.ndarray
    head: np.ndarray
    length: np.ndarray
    chars: np.ndarray
    linked: np.ndarray
    marks: np.ndarray

    def of(self, chosen: np.ndarray) -> np.ndarray:
        """The rows of the chosen runs."""
        return self.rows[np.repeat(chosen, self.length)]


def _select(rows: _Rows) -> np.ndarray:
    """bool [rows]: the rows of the main content."""
    page = rows.page
    alive = _visible(rows)
    prose = rows.prose(alive)
    inside, total = rows.sums(prose), int(prose.sum())
    if not total:
        return alive
    light, heavy = _noise(rows, alive, inside, total)
    clean = alive & ~rows.within(light & (inside <= total * _LIGHT_SHARE) | heavy & (inside <= total * _HEAVY_SHARE))
    prose = rows.prose(clean)
    root = _root(rows, clean, prose)
    kept = np.zeros(rows.size, bool)
    kept[root] = True
    kept[_standfirst(rows, clean, root.start)] = True
    kept &= alive
    prose = rows.prose(kept)
    inside, total = rows.sums(prose), int(prose.sum())
    noise = light & (inside <= total * _LIGHT_SHARE) | heavy & (inside <= total * _HEAVY_SHARE_INSIDE)
    best = _paragraphs(rows, kept & ~rows.within(noise))
    found = int(page.chars[best].sum())
    if found < _TOO_LITTLE:
        lenient = _paragraphs(rows, kept)
        if int(page.chars[lenient].sum()) > 2 * found:
            return lenient
    return best


def _visible(rows: _Rows) -> np.ndarray:
    """The rows that are neither in elements without content nor hidden. Where most of the text is hidden, scripts are
    to show it."""
    page = rows.page
    alive = ~rows.within(_NEVER[page.tag])
    hidden = ~rows.text & ((page.flags & _HIDDEN) != 0) & ~_PROTECTED[page.tag]
    if hidden.any():
        seen = alive & ~rows.within(hidden)
        if rows.prose(seen).sum() * 4 >= rows.prose(alive).sum():
            return seen
    return alive


def _noise(rows: _Rows, alive: np.ndarray, inside: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Elements that are noise by what they are called, if they hold little: (a few lines at most, perhaps more)."""
    page, element = rows.page, ~rows.text & alive
    flags, tag = page.flags, page.tag
    body = element & ((flags & _BODY) != 0)
    content = ((tag == ID["main"]) | body) & (inside > total * _HOLDS) & alive
    around = rows.sums(content | (tag == ID["h1"]) & alive) > 0
    free = element & ~_PROTECTED[tag] & ~around & ~(body & (inside > total * _BODY_SHARE))
    return free & ((flags & _LIGHT) != 0), free & (((flags & _HEAVY) != 0) | _CHROME[tag])


def _root(rows: _Rows, clean: np.ndarray, prose: np.ndarray) -> slice:
    """The rows of the element that holds the main content, or all where there is no such element."""
    page, inside, total = rows.page, rows.sums(prose), int(prose.sum())
    flags, tag = page.flags, page.tag
    usable = clean & _ROOTS[tag]
    tiers = ((flags & _BODY) != 0, (tag == ID["article"]) | ((flags & _ARTICLE) != 0))
    for tier, share in zip(tiers, _SHARES, strict=True):
        marked = usable & tier & (inside > 0)
        found = np.flatnonzero(marked)
        if not len(found):
            continue
        most = int(inside[found].max())
        held = np.where(rows.within(marked), prose, 0)
        if most >= held.sum() * _ONE_OF_MANY:
            found = found[inside[found] >= most * _NEARLY_ALL]
        else:
            found = np.flatnonzero((usable | (tag == ID["body"])) & (rows.sums(held) >= held.sum() * _NEARLY_ALL))
        if len(found) and inside[found[-1]] >= max(_LEAST_PROSE, total * share):
            root = int(found[-1])
            better = usable[root : page.end[root]] & (inside[root : page.end[root]] >= inside[root] * _NEARLY_ALL)
            root += int(np.flatnonzero(better)[-1]) if better.any() else 0
            return slice(root, int(page.end[root]))
    found = np.flatnonzero(usable & (inside >= total * _MOST))
    return slice(int(found[-1]), int(page.end[found[-1]])) if len(found) else slice(0, rows.size)


def _standfirst(rows: _Rows, clean: np.ndarray, root: int) -> np.ndarray:
    """Rows of text between the title and the root that are more than a subtitle."""
    page = rows.page
    titles = np.flatnonzero((page.tag[:root] == ID["h1"]) & clean[:root])
    between = np.zeros(rows.size, bool)
    if len(titles):
        between[page.end[titles[-1]] : root] = True
    runs = rows.runs(between & clean)
    lead = (runs.linked * 4 <= runs.chars) & (runs.chars >= _LEAD) & (runs.marks > 0)
    return runs.of(lead if runs.chars[lead].sum() < _LEADS else np.zeros_like(lead))


def _paragraphs(rows: _Rows, kept: np.ndarray) -> np.ndarray:
    """`kept` without cards, teasers, paragraphs of links, labels and headings of nothing."""
    page = rows.page
    kept = kept & ~_teasers(rows, kept)
    chars = np.where(kept & rows.text, page.chars, 0)
    total, linked = rows.sums(chars), rows.sums(np.where(rows.linked, chars, 0))
    prose = rows.sums(rows.prose(kept))
    cards = _CARDS[page.tag] & (total > 0) & (linked >= total * _CARD_LINKS) & (prose <= _CARD_PROSE)
    runs = rows.runs(kept & ~rows.within(cards))
    if not len(runs.head):
        return np.zeros(rows.size, bool)
    good = runs.linked * 2 < runs.chars
    # A sentence of many links, as encyclopedias have them.
    plain, paragraph = runs.chars - runs.linked, rows.within(page.tag == ID["p"])[runs.head]
    good |= paragraph & (runs.marks > 1) & (plain >= _PLAIN) & (plain >= runs.chars * _PLAIN_SHARE)
    # A table of data stays whole.
    tables = (page.tag == ID["table"]) & (linked * 2 < total)
    good |= (rows.within(rows.cells) & rows.within(tables))[runs.head]
    heading = rows.within(_HEADING[page.tag])[runs.head]
    outside = ~rows.within(_PARAGRAPHS[page.tag])[runs.head]
    good &= ~(outside & (runs.chars < _LABEL) & (runs.marks == 0))
    # A heading of nothing: the next thing is a heading that is not below it, or the end.
    left = np.flatnonzero(good)
    level = np.where(heading[left], _level(rows, runs.head[left]), 7)
    good[left[(level < 7) & (np.append(level[1:], 0) <= level)]] = False
    result = np.zeros(rows.size, bool)
    result[runs.of(good)] = True
    return result


def _teasers(rows: _Rows, kept: np.ndarray) -> np.ndarray:
    """bool: rows of boxes that announce other pages (a link as the title, then a few lines), several of a kind in one
    element, and of excerpts: a link and text that breaks off. None where most of the page is such, and little is left.
    """
    runs, found = rows.runs(kept), np.zeros(rows.size, bool)
    title = (runs.linked == runs.chars) & (runs.chars >= _TEASER_TITLE)
    cut = (runs.linked >= _TEASER_TITLE) & ~title & (runs.chars <= _TEASER_PROSE)
    if title.sum() >= _TEASERS:
        found = rows.within(_teaser_boxes(rows, kept, runs, title))
    if cut.sum() >= _TEASERS:
        found[runs.of(_breaking_off(rows, runs, cut))] = True
    if not found.any():
        return found
    prose = rows.prose(kept)
    return found if prose[~found].sum() >= min(_TEXT, prose.sum() / 2) else np.zeros_like(found)


def _teaser_boxes(rows: _Rows, kept: np.ndarray, runs: _Runs, title: np.ndarray) -> np.ndarray:
    """bool: boxes whose first run is a `title`, with a little prose behind it, and with others like it beside them."""
    page, found = rows.page, np.zeros(rows.size, bool)
    boxes = np.flatnonzero(kept & _TEASER_BOXES[page.tag] & (page.parent >= 0))
    first, behind = np.searchsorted(runs.head, boxes), np.searchsorted(runs.head, page.end[boxes])
    titles = np.concatenate(([0], np.cumsum(title)))
    few = (first < behind) & (behind - first <= _TEASER_RUNS) & (titles[behind] - titles[first] <= 2)
    few &= np.append(title, False)[first]
    if few.sum() < _TEASERS:
        return found
    boxes, first = boxes[few], first[few]
    prose = rows.sums(rows.prose(kept))[boxes]
    links = np.flatnonzero((page.flags & _LINK != 0) & (page.tag == ID["a"]))
    away = [_leads_away(page, links, row) for row in runs.head[first].tolist()]
    boxes = boxes[(prose > 0) & (prose <= _TEASER_PROSE) & away]
    _, kind, count = np.unique(page.parent[boxes] * 256 + page.tag[boxes], return_inverse=True, return_counts=True)
    found[boxes[count[kind] >= _TEASERS]] = True
    return found


def _breaking_off(rows: _Rows, runs: _Runs, candidates: np.ndarray) -> np.ndarray:
    """bool: of the candidate runs those that begin with a link and break off, if there are several."""
    page, last = rows.page, runs.rows[np.cumsum(runs.length) - 1]
    found = candidates & rows.linked[runs.head] & ~rows.linked[last]
    for run in np.flatnonzero(found).tolist():
        found[run] = page.html[int(page.start[last[run]]) : int(page.stop[last[run]])].rstrip().endswith(_ELLIPSES)
    return found if found.sum() >= _TEASERS else np.zeros_like(found)


def _leads_away(page: Page, links: np.ndarray, row: int) -> bool:
    """Whether the innermost link that starts before `row` is one to another page."""
    link = int(links[np.searchsorted(links, row) - 1])
    start = int(page.start[link])
    stop = min(int(page.stop[link]), start + _TAG_BYTES)  # one enormous tag may enclose thousands of boxes
    return _NOWHERE.search(page.html, start, stop) is None


def _level(rows: _Rows, chosen: np.ndarray) -> np.ndarray:
    """1 to 6: the level of the last heading that starts before each of the chosen rows; 0 before the first."""
    tag = rows.page.tag
    headings = np.flatnonzero(_HEADING[tag])
    levels = np.concatenate(([0], tag[headings].astype(np.int64) - ID["h1"] + 1))
    return levels[np.searchsorted(headings, chosen)]


def _write(rows: _Rows, kept: np.ndarray) -> str:
    page, chosen = rows.page, np.flatnonzero(kept & rows.text)
    if not len(chosen):
        return ""
    tag, number = page.tag, np.cumsum(rows.text)[chosen]
    line = rows.edges(_LINE[tag] & ~rows.cells)[chosen]
    block = rows.edges(_BLOCK[tag] & ~_TIGHT[tag])[chosen]
    cell = rows.edges(rows.cells)[chosen]
    # What stands before each piece: nothing, a space, a tab, a line end, a blank line.
    joint = ((np.diff(number) > 1) | ((page.flags[chosen[1:]] & _LINK) != 0)).astype(np.int8)
    for kind, edges in enumerate((cell, line, block), 2):
        joint[np.diff(edges) > 0] = kind
    verbatim = rows.within(_PRE[tag])[chosen].tolist()
    parts, run = [], []
    places = zip(page.start[chosen].tolist(), page.stop[chosen].tolist(), [0, *joint.tolist()], verbatim, strict=True)
    for start, stop, before, as_it_is in places:
        piece = page.html[start:stop].decode("utf-8", "replace")
        if "&" in piece:
            piece = html_entities.unescape(_NUMBER_TOO_LONG.sub("\ufffd", piece))
        if before >= 2 or as_it_is:
            parts += " ".join("".join(run).split()), _JOINTS[before]
            run = []
        elif before:
            run.append(" ")
        (parts if as_it_is else run).append(piece)
    parts.append(" ".join("".join(run).split()))
    return "".join(parts)


def _article_body(page: Page) -> str:
    """The longest articleBody of the page's JSON-LD (schema.org), "" without one."""
    longest = b'""'
    for row in np.flatnonzero((page.flags & _DATA) != 0).tolist():
        for match in _ARTICLE_BODY.finditer(page.html, int(page.start[row]), int(page.stop[row])):
            longest = max(longest, match[1], key=len)
    try:
        return html_entities.unescape(_NUMBER_TOO_LONG.sub("\ufffd", json.loads(longest, strict=False)))
    except ValueError:  # not the JSON that it seemed
        return ""
