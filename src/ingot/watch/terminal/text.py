"""The blocks of a report (report/render/page.py) as lines of a terminal, wrapped to its width."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest

from ingot.report.render.page import (
    Bars,
    Block,
    Folded,
    HeatMap,
    LabeledValues,
    Sample,
    TableBlock,
    Text,
)
from ingot.watch.terminal.canvas import Glyphs

StyledLine = list[tuple[str, str]]  # (text, style), one after the other
_NARROWEST = 8  # cells of a column whose text is wrapped
_MOST_LINES = 6  # of one cell
_BAR = 24
# The shade of a cell: its style, and a mark for terminals without colors.
_SHADES = {-3: ("blue", "---"), -2: ("blue", "--"), -1: ("blue", "-"), 0: ("", ""), 1: ("yellow", "+"),
           2: ("red", "++"), 3: ("red", "+++")}  # fmt: skip


def lines_of(blocks: Sequence[Block], width: int, glyphs: Glyphs) -> list[StyledLine]:
    """Return the blocks as lines of at most `width` cells, with an empty line between them."""
    found: list[StyledLine] = []
    for block in blocks:
        if found:
            found.append([])
        found += _lines(block, width, glyphs)
    return found


def _lines(block: Block, width: int, glyphs: Glyphs) -> Iterator[StyledLine]:
    if isinstance(block, Text):
        yield from ([(line, "")] for line in _wrapped(block.text, width))
    elif isinstance(block, LabeledValues):
        yield from _table((), [*block.rows], (), width)
    elif isinstance(block, TableBlock):
        if block.caption:
            yield from ([(line, "dim")] for line in _wrapped(block.caption, width))
        yield from _table(block.header, block.rows, block.right, width)
    elif isinstance(block, Bars):
        yield from _bars(block, width, glyphs)
    elif isinstance(block, HeatMap):
        yield from _heat(block, width)
    elif isinstance(block, Sample):
        yield from ([(line, "bold")] for line in _wrapped(block.prompt, width))
        yield from ([(line, "")] for line in _wrapped(block.text, width))
    elif isinstance(block, Folded):
        yield [(block.caption, "bold")]
        yield from lines_of(block.blocks, width, glyphs)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, _NARROWEST)) or [""]


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int], width: int
) -> Iterator[StyledLine]:
    cells = [*([header] if header else []), *rows]
    if not cells:
        return
    widths = _fitted([max(len(row[i]) if i < len(row) else 0 for row in cells) for i in range(len(cells[0]))], width)
    for number, row in enumerate(cells):
        parts = [textwrap.wrap(cell, own)[:_MOST_LINES] or [""] for cell, own in zip(row, widths, strict=False)]
        for texts in zip_longest(*parts, fillvalue=""):
            line = "  ".join(
                text.rjust(own) if i in right else text.ljust(own)
                for i, (text, own) in enumerate(zip(texts, widths, strict=False))
            )
            yield [(line[:width].rstrip(), "bold" if header and not number else "")]


def _fitted(widths: list[int], width: int) -> list[int]:
    """Return the widths of columns that together fit into `width`: the widest become narrower, down to _NARROWEST."""
    fitted = [max(own, 1) for own in widths]
    while sum(fitted) + 2 * (len(fitted) - 1) > width:
        widest = max(range(len(fitted)), key=fitted.__getitem__)
        if fitted[widest] <= _NARROWEST:
            break
        fitted[widest] -= 1
    return fitted


def _bars(block: Bars, width: int, glyphs: Glyphs) -> Iterator[StyledLine]:
    if not block.rows:
        return
    label = min(max(len(row.label) for row in block.rows), max(width // 3, _NARROWEST))
    size = max(min(_BAR, width - label - 24), 4)
    sizes = [max(len(value) for value in column) for column in zip(*(row.values for row in block.rows), strict=False)]
    for row in block.rows:
        filled = round(min(max(row.fraction, 0.0), 1.0) * size)
        values = "  ".join(value.rjust(own) for value, own in zip(row.values, sizes, strict=False))
        line: StyledLine = [(row.label[:label].ljust(label) + " ", ""), (glyphs.bar * filled, "cyan")]
        line += [(glyphs.shades[1] * (size - filled), "dim"), (f" {values}", "")]
        used = sum(len(text) for text, _ in line)
        yield line + ([(f"  {row.note}", "dim")] if row.note and used + 2 + len(row.note) <= width else [])


def _heat(block: HeatMap, width: int) -> Iterator[StyledLine]:
    """Yield a map; columns that do not fit beside the others follow below them."""
    label = max([len(block.header[0]), *(len(row.label) for row in block.rows)])
    columns = [_HeatColumn(block, at) for at in range(len(block.header) - 1)]
    while columns:
        fits = max(sum(total <= width for total in accumulate((c.width + 1 for c in columns), initial=label)) - 1, 1)
        yield from _heat_lines(block, columns[:fits], label, width)
        if columns := columns[fits:]:
            yield []


class _HeatColumn:
    """A column of a map. cells: texts of equal width, with their styles. title: its words. width: of all."""

    def __init__(self, block: HeatMap, at: int):
        self.title = block.header[at + 1].split(" ")
        found = [(row.values[at], *_SHADES[row.levels[at]]) for row in block.rows]
        marks = max([len(mark) for _, _, mark in found], default=0)
        self.cells = [(text + mark.ljust(marks), style) for text, style, mark in found]
        self.width = max([*map(len, self.title), *(len(text) for text, _ in self.cells)])


def _heat_lines(block: HeatMap, columns: Sequence[_HeatColumn], label: int, width: int) -> Iterator[StyledLine]:
    deepest = max(len(column.title) for column in columns)
    for at in range(deepest):  # titles of several words end at the same line
        words = [[""] * (deepest - len(column.title)) + column.title for column in columns]
        head = " ".join(own[at].rjust(column.width) for own, column in zip(words, columns, strict=True))
        yield [((block.header[0] if at == deepest - 1 else "").ljust(label) + " " + head, "bold")]
    used = label + sum(column.width + 1 for column in columns)
    for number, row in enumerate(block.rows):
        found: StyledLine = [(row.label.ljust(label), "red" if row.note else "")]
        for column in columns:
            text, style = column.cells[number]
            found += [(" ", ""), (text.rjust(column.width), style)]
        fits = row.note and used + 2 + len(row.note) <= width
        yield found + ([(f"  {row.note}", "red")] if fits else [])
