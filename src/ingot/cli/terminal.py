"""What verbs print with: plain lines, tables, a progress bar on terminals only, one JSON object under --json.

Colour only on a terminal and never under NO_COLOR (https://no-color.org).
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence

from ingot.errors import IngotError

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}


def _coloured(text: str, style: str) -> str:
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


class Terminal:
    def __init__(self, *, json_mode: bool = False, quiet: bool = False):
        self.json_mode, self.quiet = json_mode, quiet
        self.interactive = sys.stdout.isatty() and not json_mode and not quiet
        self._plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self.colour = self.interactive and not self._plain
        self._bar_shown = False

    def style(self, text: str, style: str) -> str:
        return _coloured(text, style) if self.colour else text

    def say(self, text: str = "") -> None:
        """One or more lines for people; silent under --json and -q."""
        if not self.json_mode and not self.quiet:
            self.end_progress()
            print(text, flush=True)

    def result(self, facts: dict) -> None:
        """The result for scripts: under --json the only thing on stdout."""
        if self.json_mode:
            print(json.dumps(facts, ensure_ascii=False, default=str), flush=True)

    def table(self, rows: Sequence[Sequence], header: Sequence[str] = (), *, right: Sequence[int] = ()) -> None:
        """Aligned columns; those in `right` (0-based) are right-aligned, as numbers are. Cropped on a terminal."""
        cells = [[str(c) for c in row] for row in ([header, *rows] if header else rows)]
        if not cells:
            return
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        for number, row in enumerate(cells):
            columns = [
                c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
            ]
            line = "  ".join(columns).rstrip()
            if self.interactive and len(line) > (width := shutil.get_terminal_size().columns):
                line = line[: width - 1] + "…"
            self.say(self.style(line, "bold") if header and number == 0 else line)

    def next(self, *commands: str) -> None:
        """The commands that usually come next."""
        self.say(self.style("Next:", "bold") + "  " + "\n       ".join(commands))

    def progress(self, fraction: float, text: str = "") -> None:
        """A bar that is redrawn in place; nothing where stdout is not a terminal."""
        if not self.interactive:
            return
        width = shutil.get_terminal_size().columns
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
        """The message on stderr, under --json as an object on stdout as well."""
        self.end_progress()
        if self.json_mode:
            facts = {"error": error.code, "found": error.found, "rule": error.rule, "fix": error.fix}
            self.result({k: v for k, v in facts.items() if v} | {"exit_code": error.exit_code})
        head, _, rest = str(error).partition("\n")
        label = _coloured(error.code, "red") if sys.stderr.isatty() and not self._plain else error.code
        sys.stderr.write(f"{label}  {head}\n" + (rest + "\n" if rest else ""))
