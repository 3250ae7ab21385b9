"""A screen of text as data: cells with a style each, which curses draws or a file gets as lines."""

import unicodedata
from dataclasses import dataclass

from ingot.value_names import printable

STYLES: tuple[str, ...] = ("", "bold", "dim", "red", "yellow", "green", "blue", "cyan", "magenta", "reverse")


@dataclass(frozen=True)
class Glyphs:
    """The characters of a terminal. braille: it has Unicode, and lines are drawn with 2 x 4 dots per cell. shades: from
    nothing to full. bar: of a horizontal bar. mark: of an incident. rule: of a line between parts."""

    braille: bool
    shades: str
    bar: str
    mark: str
    rule: str
    dot: str

    @property
    def dots(self) -> tuple[int, int]:
        """The dots of a cell: (columns, rows)."""
        return (2, 4) if self.braille else (1, 1)


UNICODE = Glyphs(braille=True, shades=" ░▒▓█", bar="█", mark="▲", rule="─", dot="·")
ASCII = Glyphs(braille=False, shades=" .:*#", bar="#", mark="^", rule="-", dot=".")


def glyphs_for(encoding: str | None) -> Glyphs:
    """Return the characters that an encoding has."""
    try:
        (UNICODE.shades + UNICODE.mark + UNICODE.rule + UNICODE.dot + "⣿").encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


class Canvas:
    """`height` lines of `width` cells. Text outside is cut off. Control characters are replaced, so no text of a run
    can move the cursor; in ASCII, so are all other characters."""

    def __init__(self, width: int, height: int, glyphs: Glyphs = UNICODE):
        self.width, self.height, self.glyphs = width, height, glyphs
        self._texts = [[" "] * width for _ in range(height)]
        self._styles = [[""] * width for _ in range(height)]

    def put(self, x: int, y: int, text: str, style: str = "", width: int | None = None) -> int:
        """Write a text from cell (x, y) on, at most `width` cells of it. Return the first cell after it."""
        if not 0 <= y < self.height:
            return x
        end = self.width if width is None else min(x + width, self.width)
        for char in printable(text).replace("\n", " ").replace("\t", " "):
            if not self.glyphs.braille and not " " <= char <= "~":
                char = "?"
            wide = unicodedata.east_asian_width(char) in "WF"
            if unicodedata.combining(char) or unicodedata.category(char) == "Cf":
                continue  # takes no cell
            if x + wide >= end:
                break
            if x >= 0:
                self._texts[y][x], self._styles[y][x] = char, style
                if wide:
                    self._texts[y][x + 1], self._styles[y][x + 1] = "", style
            x += 1 + wide
        return x

    def right(self, y: int, text: str, style: str = "") -> None:
        """Write a text that ends at the right border."""
        self.put(max(self.width - len(text), 0), y, text, style)

    def rule(self, y: int, title: str = "") -> None:
        """Draw a line across, with a title."""
        self.put(0, y, self.glyphs.rule * self.width, "dim")
        if title:
            self.put(2, y, f" {title} ", "bold")

    def lines(self) -> list[str]:
        """Return the lines without styles, and without blanks at their ends."""
        return ["".join(row).rstrip() for row in self._texts]

    def runs(self, y: int) -> list[tuple[int, str, str]]:
        """Return line `y` as (first cell, text, style), without blanks that have no style."""
        found: list[tuple[int, str, str]] = []
        begin, row, styles = 0, self._texts[y], self._styles[y]
        for x in range(1, self.width + 1):
            if x == self.width or styles[x] != styles[begin]:
                text = "".join(row[begin:x])
                if styles[begin] or text.strip():
                    found.append((begin, text, styles[begin]))
                begin = x
        return found
