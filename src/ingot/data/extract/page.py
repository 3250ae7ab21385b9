"""A page as flat arrays, one row per element and per piece of text in document order, and sums over its parts.

The rows inside element `i` are `i + 1` up to, but not including, `end[i]`. So a sum over any element takes two look-ups
in a running sum.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from ingot.data.extract import page_reference
from ingot.data.extract.tags import ID, tag_rules
from ingot.data.extract.vocabulary import ElementMark, name_tables, word_tables
from ingot.data.native import compiled

FINE, TOO_DEEP, TOO_MANY = range(3)
COLUMNS = {
    "tag": np.uint8, "flags": np.uint64, "parent": np.int32, "end": np.int32, "depth": np.int32,
    "start": np.int32, "stop": np.int32, "chars": np.int32, "marks": np.int32,
}  # fmt: skip
# A paragraph is prose if it has at least _PARAGRAPH characters and one punctuation mark, or more than _SENTENCES marks,
# or at least _LONG characters.
_PARAGRAPH, _SENTENCES, _LONG = 50, 3, 200
_LITTLE = 300  # on a page with fewer characters of prose, all text outside links counts as prose
_CELL = 150  # largest number of characters in a cell of a data table
_LINK = np.uint64(ElementMark.LINK)


def tag_set(names: str) -> np.ndarray:
    """Return bool [256], indexed by tag id: True for the tags in the space-separated `names`."""
    table = np.zeros(256, bool)
    table[[ID[name] for name in names.split()]] = True
    return table


BLOCK = tag_set(
    "html body address article aside blockquote center details dialog dir div dl dd dt fieldset figcaption figure "
    "footer form header hgroup main menu nav ol p pre section summary ul li listing search h1 h2 h3 h4 h5 h6 hr table "
    "caption colgroup thead tbody tfoot tr td th"
)
LINE = BLOCK | tag_set("br")
CELLS = tag_set("td th")


@dataclass(frozen=True, slots=True)
class ParsedPage:
    """A parsed page. All arrays are [rows], one row per element and piece of text.

    html: UTF-8. status: FINE, or TOO_DEEP or TOO_MANY if the rows stop at a limit. tag: index into tags.NAMES, 0 for
    text. flags: vocabulary.ElementMark. parent: row of the enclosing element, or -1. end: the row after the last row
    inside the element. depth: number of enclosing elements. start, stop: byte range in `html` of the text, of a raw
    element's content, or of another element's attributes. chars: characters of a text without white space; an ideograph
    counts as two, a character reference as one. marks: punctuation marks (.,!?;: and their counterparts in other
    scripts) in a text.
    """

    html: bytes
    status: int
    tag: np.ndarray
    flags: np.ndarray
    parent: np.ndarray
    end: np.ndarray
    depth: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    chars: np.ndarray
    marks: np.ndarray


def parse_page(html: bytes, max_depth: int = 1000, max_nodes: int = 1_000_000) -> ParsedPage:
    """Parse `html` (UTF-8; invalid bytes count as characters) in linear time."""
    native = compiled("_page")
    if native is None:
        status, *columns = page_reference.parse(html, max_depth, max_nodes)
        arrays = [np.array(column, kind) for column, kind in zip(columns, COLUMNS.values(), strict=True)]
    else:
        status, *columns = native.parse(html, _tables(), max_depth, max_nodes)
        arrays = [np.frombuffer(column, kind) for column, kind in zip(columns, COLUMNS.values(), strict=True)]
    return ParsedPage(html, status, *arrays)


@cache
def _tables() -> object:
    """Return the tag and word tables in the form that the compiled parser reads."""
    native = compiled("_page")
    assert native is not None
    arrays = (*name_tables(), tag_rules(), *word_tables())
    return native.tables(*(np.ascontiguousarray(array).tobytes() for array in arrays))


@dataclass(frozen=True, slots=True)
class TextRuns:
    """Runs of text rows with no start or end of a block between them: the paragraphs, whatever elements hold them.

    rows: all text rows of the runs. The other arrays are [runs]. head: first row. length: number of rows. chars:
    characters. linked: characters in links. marks: punctuation marks.
    """

    rows: np.ndarray
    head: np.ndarray
    length: np.ndarray
    chars: np.ndarray
    linked: np.ndarray
    marks: np.ndarray

    def of(self, chosen: np.ndarray) -> np.ndarray:
        """Return the text rows of the chosen runs (bool [runs])."""
        return self.rows[np.repeat(chosen, self.length)]


class PageRows:
    """A page with the arrays and sums that every step of the extraction needs.

    text, linked, cells: bool [rows], True for text rows, rows inside a link, and cells of data tables. block: int
    [rows], a number that grows at every start or end of a block.
    """

    def __init__(self, page: ParsedPage):
        self.page, self.size = page, len(page.tag)
        self.text = page.tag == 0
        self.linked = self.within((page.tag == ID["a"]) & ((page.flags & _LINK) != 0))
        self.cells = self._data_cells()
        self.block = self.edges(BLOCK[page.tag] & ~self.cells)

    def _data_cells(self) -> np.ndarray:
        """Return bool [rows]: the cells of those table rows in which every cell is short and contains no blocks.

        Such a table row is written as one line of text.
        """
        page, is_cell = self.page, CELLS[self.page.tag]
        if not is_cell.any():
            return is_cell
        blocks, chars = self.sums(LINE[page.tag]), self.sums(page.chars)
        row = is_cell & (page.parent >= 0) & (page.tag[page.parent] == ID["tr"])
        large = row & ((blocks > 1) | (chars > _CELL))
        broken = np.zeros(self.size, bool)
        broken[page.parent[large]] = True
        return row & ~broken[page.parent]

    def edges(self, elements: np.ndarray) -> np.ndarray:
        """Return int [rows]: the number of starts and ends of `elements` (bool [rows]) up to each row."""
        rows = np.flatnonzero(elements)
        edges = np.bincount(self.page.end[rows], minlength=self.size + 1)
        edges[rows] += 1
        return np.cumsum(edges[: self.size])

    def within(self, elements: np.ndarray) -> np.ndarray:
        """Return bool [rows]: True for rows inside any of `elements` (bool [rows]), and for `elements` themselves."""
        rows = np.flatnonzero(elements)
        change = -np.bincount(self.page.end[rows], minlength=self.size + 1)
        change[rows] += 1
        return np.cumsum(change[: self.size]) > 0

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return int [rows]: the sum of `values` over each row and all rows inside it."""
        total = np.zeros(self.size + 1, np.int64)
        np.cumsum(values, out=total[1:])
        return total[self.page.end] - total[:-1]

    def runs(self, chosen: np.ndarray) -> "TextRuns":
        """Group the text rows that are True in `chosen` (bool [rows]) into paragraphs.

        A paragraph is a run of chosen text rows with no start or end of a block between them.
        """
        page, rows = self.page, np.flatnonzero(self.text & chosen)
        if not len(rows):
            none = np.zeros(0, np.int64)
            return TextRuns(rows, none, none, none, none, none)
        block = self.block[rows]
        first = np.flatnonzero(np.concatenate(([True], block[1:] != block[:-1])))
        chars = page.chars[rows]
        linked = np.where(self.linked[rows], chars, 0)
        chars, linked, marks = (np.add.reduceat(values, first) for values in (chars, linked, page.marks[rows]))
        return TextRuns(rows, rows[first], np.diff(np.append(first, len(rows))), chars, linked, marks)

    def prose(self, chosen: np.ndarray) -> np.ndarray:
        """Return int [rows]: at the first row of each paragraph its characters of prose, 0 elsewhere.

        chosen: bool [rows], the rows to look at.
        """
        runs = self.runs(chosen)
        plain, weight = runs.chars - runs.linked, np.zeros(self.size, np.int64)
        sentences = (runs.chars >= _PARAGRAPH) & (runs.marks > 0) | (runs.marks > _SENTENCES) | (runs.chars >= _LONG)
        weight[runs.head] = np.where(sentences & (runs.linked * 3 <= runs.chars), plain, 0)
        if weight.sum() < _LITTLE:
            weight[runs.head] = np.maximum(plain - 2 * runs.linked, 0)
        return weight
