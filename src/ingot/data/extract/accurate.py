"""The extraction of the main content of a page: select the rows of the article, and write their text.

Four steps work on the flat arrays of a page; each computes a few sums:

1. Remove elements that are never content, because of their tag (`nav`, `button`, ...) or because they are hidden.
   Remove elements whose class, id or role marks them as noise, if they hold little prose.
2. Find the root of the content: the element that is marked as content and holds a good share of the prose, or, without
   marks, the innermost element with most of the prose. Add a standfirst (an introduction between title and root).
3. Inside the root, remove noise again, then cards (boxes of links), paragraphs of links, labels, and headings without
   text after them.
4. Write the remaining rows, one line per paragraph.

Prose is text in paragraphs that are long, or have the punctuation of sentences, and are not mostly links. The method
follows the density of links (Kohlschütter et al. 2010, Boilerpipe), marked containers in a fixed order (Barbaresi 2021,
trafilatura), and the conditional cleaning of boxes (Arc90's Readability). The constants were set on one half of the
pages that docs/design/extraction.md names, and confirmed on the other half.
"""

import html as html_entities
import json
import re

import numpy as np

from ingot.data.extract.page import BLOCK, LINE, PageRows, ParsedPage, TextRuns, tag_set
from ingot.data.extract.tags import ID
from ingot.data.extract.vocabulary import ElementMark

# Noise: the largest share of the page's prose that an element can hold and still be removed.
_LIGHT_SHARE, _HEAVY_SHARE, _HEAVY_SHARE_INSIDE = 1 / 6, 2 / 3, 0.9
_BODY_SHARE = 1 / 8  # an element marked as body text that holds more than this share of the prose is never noise
_HOLDS = 1 / 3  # the ancestors of a content element that holds more than this share of the prose are never noise
# The root.
_LEAST_PROSE = 150  # characters
_SHARES = (1 / 8, 1 / 4)  # the least share of the page's prose that a root of each tier must hold
_ONE_OF_MANY = 0.6  # if no element has this share of its tier's prose, the root is a common ancestor of the tier
_NEARLY_ALL = 0.9  # an inner element with this share of the root's prose is the better root
_MOST = 0.75  # the least share of the page's prose that a root without marks must hold
# The standfirst: least characters of each of its paragraphs, and most characters of all of them together.
_LEAD, _LEADS = 120, 1000
# Inside the root.
_TOO_LITTLE = 250  # characters; with fewer, try again without the noise rules, and try the page's structured data
_CARD_LINKS, _CARD_PROSE = 0.5, 100  # a card has at least this share of its text in links, and at most this prose
_TEASERS = 3  # least number of siblings of one kind that are teasers (announcements of other pages)
_TEASER_TITLE, _TEASER_RUNS, _TEASER_PROSE = 15, 4, 500  # a teaser's least characters of link; most runs, most prose
_TAG_BYTES = 4096  # the part of a link's tag that is searched for its target
_TEXT = 500  # teasers are removed if this much prose or half of it remains; otherwise they are the page's content
_PLAIN, _PLAIN_SHARE = 20, 1 / 6  # least number and share of characters outside links in a sentence of many links
_LABEL = 25  # a text outside paragraphs with fewer characters and no punctuation is a label


def _bits(*marks: ElementMark) -> np.uint64:
    return np.uint64(sum(int(mark) for mark in marks))


_TIGHT = tag_set("li tr td th dt dd")  # blocks without a blank line around them
_NEVER = tag_set(
    "head title nav button select option datalist textarea template svg math dialog menu object applet audio video "
    "canvas map input iframe noscript script style noembed noframes xmp progress meter legend label search fieldset "
    "amp-ad"
)
_CHROME = tag_set("aside footer figcaption")
_PROTECTED = tag_set("html body main article")  # classes of these elements describe the whole page, not noise
_ROOTS = tag_set("div section article main td center form")
_HEADING = tag_set("h1 h2 h3 h4 h5 h6")
_TEASER_BOXES = tag_set("div li article section")
_CARDS = tag_set("div ul ol section table dl aside form figure li header footer center tr")
_PARAGRAPHS = tag_set("p h1 h2 h3 h4 h5 h6 li pre td th dd dt blockquote")
_PRE = tag_set("pre listing")
_LIGHT = _bits(
    ElementMark.NAVIGATION, ElementMark.SHARE, ElementMark.META, ElementMark.AD, ElementMark.CAPTION
)  # never long texts
_HEAVY = _bits(ElementMark.FOOTER, ElementMark.SIDE, ElementMark.RELATED, ElementMark.COMMENT, ElementMark.REQUEST)
_BODY, _ARTICLE = _bits(ElementMark.BODY), _bits(ElementMark.ARTICLE)
_HIDDEN, _LINK, _DATA = _bits(ElementMark.HIDDEN), _bits(ElementMark.LINK), _bits(ElementMark.DATA)

_JOINTS = ("", " ", "\t", "\n", "\n\n")
_ELLIPSES = tuple(map(str.encode, ("...", "…", "&hellip;", "...]", "…]", "&hellip;]")))
_NOWHERE = re.compile(rb"""href\s*=\s*["']?\s*(?:#|javascript:)""", re.IGNORECASE)  # opens something on this page
_NUMBER_TOO_LONG = re.compile(r"&#(?:\d{8,}|[xX][0-9a-fA-F]{7,});?")
_ARTICLE_BODY = re.compile(rb'"articleBody"\s*:\s*("[^"\\]*+(?:\\.[^"\\]*+)*+")')


def main_text(page: ParsedPage) -> str:
    """Return the main content of `page` before cleaning, "" if there is none.

    A line is a paragraph; a blank line separates blocks.
    """
    rows = PageRows(page)
    kept = _select(rows)
    text = _write(rows, kept)
    if len(text) < _TOO_LITTLE:
        return max(text, _article_body(page), key=len)
    return text


def _select(rows: PageRows) -> np.ndarray:
    """Return bool [rows]: the rows of the main content."""
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


def _visible(rows: PageRows) -> np.ndarray:
    """Return bool [rows]: the rows that are neither hidden nor in elements that never hold content.

    If most of the text is hidden, scripts would show it in a browser, so hidden rows count as visible.
    """
    page = rows.page
    alive = ~rows.within(_NEVER[page.tag])
    hidden = ~rows.text & ((page.flags & _HIDDEN) != 0) & ~_PROTECTED[page.tag]
    if hidden.any():
        seen = alive & ~rows.within(hidden)
        if rows.prose(seen).sum() * 4 >= rows.prose(alive).sum():
            return seen
    return alive


def _noise(rows: PageRows, alive: np.ndarray, inside: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (light, heavy), each bool [rows]: the elements whose class, id, role or tag marks them as noise.

    Light noise is removed only if it holds very little of the prose, heavy noise even if it holds more. alive: bool
    [rows], the visible rows. inside: int [rows], the prose inside each element. total: the prose of the page.
    """
    page, element = rows.page, ~rows.text & alive
    flags, tag = page.flags, page.tag
    body = element & ((flags & _BODY) != 0)
    content = ((tag == ID["main"]) | body) & (inside > total * _HOLDS) & alive
    around = rows.sums(content | (tag == ID["h1"]) & alive) > 0
    free = element & ~_PROTECTED[tag] & ~around & ~(body & (inside > total * _BODY_SHARE))
    return free & ((flags & _LIGHT) != 0), free & (((flags & _HEAVY) != 0) | _CHROME[tag])


def _root(rows: PageRows, clean: np.ndarray, prose: np.ndarray) -> slice:
    """Return the range of rows of the element that holds the main content, or all rows if there is none.

    clean: bool [rows], the rows without noise. prose: int [rows], see PageRows.prose.
    """
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


def _standfirst(rows: PageRows, clean: np.ndarray, root: int) -> np.ndarray:
    """Return the text rows of the standfirst: paragraphs between title and row `root`, longer than a subtitle."""
    page = rows.page
    titles = np.flatnonzero((page.tag[:root] == ID["h1"]) & clean[:root])
    between = np.zeros(rows.size, bool)
    if len(titles):
        between[page.end[titles[-1]] : root] = True
    runs = rows.runs(between & clean)
    lead = (runs.linked * 4 <= runs.chars) & (runs.chars >= _LEAD) & (runs.marks > 0)
    return runs.of(lead if runs.chars[lead].sum() < _LEADS else np.zeros_like(lead))


def _paragraphs(rows: PageRows, kept: np.ndarray) -> np.ndarray:
    """Return bool [rows]: `kept` without cards, teasers, paragraphs of links, labels, and headings without text."""
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
    # Keep a sentence with many links, as in encyclopedias.
    plain, paragraph = runs.chars - runs.linked, rows.within(page.tag == ID["p"])[runs.head]
    good |= paragraph & (runs.marks > 1) & (plain >= _PLAIN) & (plain >= runs.chars * _PLAIN_SHARE)
    # Keep all rows of a data table.
    tables = (page.tag == ID["table"]) & (linked * 2 < total)
    good |= (rows.within(rows.cells) & rows.within(tables))[runs.head]
    heading = rows.within(_HEADING[page.tag])[runs.head]
    outside = ~rows.within(_PARAGRAPHS[page.tag])[runs.head]
    good &= ~(outside & (runs.chars < _LABEL) & (runs.marks == 0))
    # Remove a heading without text: the next run is a heading of the same or a higher level, or there is no next run.
    left = np.flatnonzero(good)
    level = np.where(heading[left], _level(rows, runs.head[left]), 7)
    good[left[(level < 7) & (np.append(level[1:], 0) <= level)]] = False
    result = np.zeros(rows.size, bool)
    result[runs.of(good)] = True
    return result


def _teasers(rows: PageRows, kept: np.ndarray) -> np.ndarray:
    """Return bool [rows]: the rows of teasers of other pages.

    A teaser is one of several similar boxes in an element, each with a link as its title and a few lines, or one of
    several excerpts, each with a link and text that ends in an ellipsis. All False if little text would be left.
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


def _teaser_boxes(rows: PageRows, kept: np.ndarray, runs: TextRuns, title: np.ndarray) -> np.ndarray:
    """Return bool [rows]: similar boxes in one element that each begin with a title and have a little prose.

    title: bool [runs], the runs that can be titles of teasers.
    """
    page, found = rows.page, np.zeros(rows.size, bool)
    boxes = np.flatnonzero(kept & _TEASER_BOXES[page.tag] & (page.parent >= 0))
    first, after = np.searchsorted(runs.head, boxes), np.searchsorted(runs.head, page.end[boxes])
    titles = np.concatenate(([0], np.cumsum(title)))
    few = (first < after) & (after - first <= _TEASER_RUNS) & (titles[after] - titles[first] <= 2)
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


def _breaking_off(rows: PageRows, runs: TextRuns, candidates: np.ndarray) -> np.ndarray:
    """Return bool [runs]: the `candidates` (bool [runs]) that begin with a link and end in an ellipsis.

    All False if there are too few of them.
    """
    page, last = rows.page, runs.rows[np.cumsum(runs.length) - 1]
    found = candidates & rows.linked[runs.head] & ~rows.linked[last]
    for run in np.flatnonzero(found).tolist():
        found[run] = page.html[int(page.start[last[run]]) : int(page.stop[last[run]])].rstrip().endswith(_ELLIPSES)
    return found if found.sum() >= _TEASERS else np.zeros_like(found)


def _leads_away(page: ParsedPage, links: np.ndarray, row: int) -> bool:
    """Return True if the last link that starts before `row` leads to another page. links: the rows of all links."""
    link = int(links[np.searchsorted(links, row) - 1])
    start = int(page.start[link])
    stop = min(int(page.stop[link]), start + _TAG_BYTES)  # one enormous tag may enclose thousands of boxes
    return _NOWHERE.search(page.html, start, stop) is None


def _level(rows: PageRows, chosen: np.ndarray) -> np.ndarray:
    """Return, for each chosen row, the level (1 to 6) of the last heading that starts before it, or 0."""
    tag = rows.page.tag
    headings = np.flatnonzero(_HEADING[tag])
    levels = np.concatenate(([0], tag[headings].astype(np.int64) - ID["h1"] + 1))
    return levels[np.searchsorted(headings, chosen)]


def _write(rows: PageRows, kept: np.ndarray) -> str:
    page, chosen = rows.page, np.flatnonzero(kept & rows.text)
    if not len(chosen):
        return ""
    tag, number = page.tag, np.cumsum(rows.text)[chosen]
    line = rows.edges(LINE[tag] & ~rows.cells)[chosen]
    block = rows.edges(BLOCK[tag] & ~_TIGHT[tag])[chosen]
    cell = rows.edges(rows.cells)[chosen]
    # The separator before each piece, an index into _JOINTS.
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


def _article_body(page: ParsedPage) -> str:
    """Return the longest articleBody of the page's JSON-LD (schema.org), "" if there is none."""
    longest = b'""'
    for row in np.flatnonzero((page.flags & _DATA) != 0).tolist():
        for match in _ARTICLE_BODY.finditer(page.html, int(page.start[row]), int(page.stop[row])):
            longest = max(longest, match[1], key=len)
    try:
        return html_entities.unescape(_NUMBER_TOO_LONG.sub("\ufffd", json.loads(longest, strict=False)))
    except ValueError:  # the match is not JSON
        return ""
