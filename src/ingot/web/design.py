"""The design that pages and reports share. Pages load the files of `STATIC` under /shared; reports have its colors."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"


def colors() -> str:
    """Return the rules of base.css that define its colors, for light and for dark mode."""
    style = (STATIC / "base.css").read_text(encoding="utf-8")
    return style[style.index(":root{") : style.index("*{box-sizing")]
