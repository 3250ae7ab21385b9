"""Write the table of docs/resume.md from the classes in schema/changes.py: `python tools/settings_table.py`."""

from collections import defaultdict
from pathlib import Path

from ingot.schema.changes import CLASSES, ChangeClass

DOCUMENT = Path(__file__).parents[1] / "docs" / "resume.md"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"
MEANINGS = {
    ChangeClass.SAME_BITS: "no loss and no weight depends on it",
    ChangeClass.SAME_MATHEMATICS: "the same sums, in another order or by other kernels: differences are rounding",
    ChangeClass.OTHER_NUMBERS: "another experiment from this step on; exit code 11 without `--accept-change KEY`",
    ChangeClass.REFUSED: "the checkpoints are of another model; exit code 3",
}


def table() -> str:
    """Return the table in Markdown, one row per class and section."""
    rows = ["| class | a new value means | section | settings |", "| --- | --- | --- | --- |"]
    for kind in ChangeClass:
        sections = defaultdict(list)
        for key, own in CLASSES:
            if own is kind:
                section, _, name = key.rpartition(".")
                sections[section].append(f"`{name}`")
        for number, (section, names) in enumerate(sections.items()):
            first = (f"**{kind}**", MEANINGS[kind]) if number == 0 else ("", "")
            rows.append(f"| {first[0]} | {first[1]} | {f'`[{section}]`' if section else ''} | {', '.join(names)} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """Return the document `text` with the current table between its two marks."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text("utf-8")), "utf-8")
