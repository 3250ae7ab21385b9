"""A `Page` as Markdown: the same facts as text and tables, readable in a terminal and on a code host."""

import re
from dataclasses import replace

from ingot.report.render.page import Bars, Block, Chart, Charts, Code, Page, Pairs, Sample, Section, Table, Text


def render_markdown(page: Page) -> str:
    """The whole file as text. Hostile text (samples, names) cannot become markup: it is escaped or fenced."""
    headline = Table(("", "", ""), [(t.label, t.value, t.note) for t in page.tiles])
    parts = [f"# {_escape(page.title)}", _escape(page.subtitle)]
    parts += [_table(headline)] if page.tiles else []
    parts += ["The command that reproduces it:", _fence(page.command)]
    parts += [_section(section) for section in page.sections]
    return "\n\n".join([*parts, "---", _escape(page.footer)]) + "\n"


def _section(section: Section) -> str:
    return "\n\n".join([f"## {_escape(section.title)}", *map(_block, section.blocks)])


def _block(block: Block) -> str:
    match block:
        case Text(text):
            return _escape(text)
        case Code(text):
            return _fence(text)
        case Pairs(rows):
            return _table(Table(("", ""), rows))
        case Table():
            return _table(block)
        case Bars():
            rows = [(bar.label, *bar.values, bar.note) for bar in block.rows]
            return _table(Table((*block.header, ""), rows, right=tuple(range(1, len(block.header)))))
        case Chart(title=title, table=table):
            return f"**{_escape(title)}**\n\n{_table(replace(table, caption=''))}"
        case Charts(charts):
            return "\n\n".join(map(_block, charts))
        case Sample(prompt, text):
            return _fence(prompt + text)


def _table(table: Table) -> str:
    lines = [f"| {' | '.join(map(_escape, table.header))} |"]
    lines.append("|" + "|".join("---:" if i in table.right else "---" for i in range(len(table.header))) + "|")
    lines += [f"| {' | '.join(map(_escape, row))} |" for row in table.rows]
    caption = f"{_escape(table.caption)}\n\n" if table.caption else ""
    return caption + "\n".join(lines)


def _escape(text: str) -> str:
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", flat)


def _fence(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
