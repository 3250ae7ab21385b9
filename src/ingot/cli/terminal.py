"""The output of verbs: lines, tables, a progress bar (only on terminals), and one JSON object with --json.

Colors are used only on terminals, and never if NO_COLOR is set (https://no-color.org).
"""

import itertools
import os
import sys
from collections.abc import Sequence

from ingot.errors import IngotError

_TABLE_WIDTH, _NARROWEST = 80, 12  # characters of a table, and of a column whose text is broken
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}


def _colored(text: str, style: str) -> str:
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


class Terminal:
    """The output of one verb. json_mode: print the result only, as JSON; quiet: print errors only."""

    def __init__(self, *, json_mode: bool = False, quiet: bool = False):
        self.json_mode, self.quiet = json_mode, quiet
        self.interactive = sys.stdout.isatty() and not json_mode and not quiet
        self._plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self.color = self.interactive and not self._plain
        self._bar_shown = False

    def style(self, text: str, style: str) -> str:
        return _colored(text, style) if self.color else text

    def say(self, text: str = "") -> None:
        """Print one or more lines for people; print nothing with --json or -q."""
        if not self.json_mode and not self.quiet:
            self.end_progress()
            print(text, flush=True)

    def result(self, facts: dict) -> None:
        """Print the result as JSON if --json was given; it is then the only output on stdout."""
        if self.json_mode:
            import json

            print(json.dumps(facts, ensure_ascii=False, default=str), flush=True)

    def table(self, rows: Sequence[Sequence], header: Sequence[str] = (), *, right: Sequence[int] = ()) -> None:
        """Print aligned columns in at most 80 characters: texts that are too long continue below, in their column.
        Paths and addresses are not broken.

        right: indices (from 0) of right-aligned columns, which are not broken. A narrower terminal crops lines.
        """
        cells = [[str(c) for c in row] for row in ([header, *rows] if header else rows)]
        if not cells:
            return
        widths = _fitted([max(len(row[i]) for row in cells) for i in range(len(cells[0]))], right)
        for number, row in enumerate(cells):
            parts = [_broken(cell, width) for cell, width in zip(row, widths, strict=True)]
            for texts in itertools.zip_longest(*parts, fillvalue=""):
                columns = [
                    c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(texts, widths, strict=True))
                ]
                line = "  ".join(columns).rstrip()
                if self.interactive and len(line) > (width := _terminal_width()):
                    line = line[: width - 1] + "…"
                self.say(self.style(line, "bold") if header and number == 0 else line)

    def next(self, *commands: str) -> None:
        """Print the commands that a user usually runs next."""
        self.say(self.style("Next:", "bold") + "  " + "\n       ".join(commands))

    def progress(self, fraction: float, text: str = "") -> None:
        """Redraw a progress bar in place, if stdout is a terminal."""
        if not self.interactive:
            return
        width = _terminal_width()
        fraction = min(max(fraction, 0.0), 1.0)
        filled = round(fraction * 24)
        line = f"[{'=' * filled}{' ' * (24 - filled)}] {fraction:4.0%} {text}"[: width - 1]
        sys.stdout.write("\r\x1b[K" + line)
        sys.stdout.flush()
        self._bar_shown = True

    def end_progress(self) -> None:
        if self._bar_shown:
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()
            self._bar_shown = False

    def error(self, error: IngotError) -> None:
        """Print the error on stderr, and with --json also as a JSON object on stdout."""
        self.end_progress()
        if self.json_mode:
            parts = {
                "error": error.code,
                "kind": error.kind,
                "found": error.found,
                "rule": error.rule,
                "fix": error.fix,
                "facts": error.facts,
            }
            self.result({k: v for k, v in parts.items() if v} | {"exit_code": error.exit_code})
        head, _, rest = str(error).partition("\n")
        label = _colored(error.code, "red") if sys.stderr.isatty() and not self._plain else error.code
        more = f"  more: ingot explain {error.code}\n" if error.code != error.kind else ""
        sys.stderr.write(f"{label}  {head}\n" + (rest + "\n" if rest else "") + more)


def _fitted(widths: list[int], right: Sequence[int]) -> list[int]:
    """Return the widths of columns that together take at most 80 characters: the widest texts become narrower, as far
    as they stay readable."""
    fitted = list(widths)
    texts = [i for i in range(len(widths)) if i not in right]
    excess = sum(fitted) + 2 * (len(fitted) - 1) - _TABLE_WIDTH
    while excess > 0 and texts and fitted[widest := max(texts, key=fitted.__getitem__)] > _NARROWEST:
        others = [fitted[i] for i in texts if i != widest]
        cut = min(excess, max(fitted[widest] - max([_NARROWEST, *others]), 1))
        fitted[widest] -= cut
        excess -= cut
    return fitted


def _broken(text: str, width: int) -> list[str]:
    """Return the lines of a cell. Paths and addresses are not broken, so that they can be copied and searched. Names
    that are too long are broken after an underscore, if they have one."""
    import textwrap

    if len(text) <= width:
        return [text]
    if "/" not in text:
        text = " ".join(_split_name(word, width) for word in text.split(" "))
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words="/" not in text) or [""]


def _split_name(name: str, width: int) -> str:
    """Return a name with spaces after underscores, if it has more than `width` characters: the parts that fit."""
    at = name.rfind("_", 0, width) + 1
    return name if len(name) <= width or not at else f"{name[:at]} {_split_name(name[at:], width)}"


def _terminal_width() -> int:
    import shutil

    return shutil.get_terminal_size().columns
