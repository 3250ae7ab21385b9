"""A `Page` as one HTML file: inline style, inline SVG, no script, nothing loaded from anywhere.

Crawl text, model output and names from run files are hostile: every text is escaped, and a content security policy
forbids scripts and loading even if one slipped through.
"""

from html import escape

from ingot.report.render.page import Bars, Block, Chart, Charts, Code, Page, Pairs, Sample, Section, Table, Text, Tile
from ingot.report.render.style import CSS

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render_html(page: Page) -> str:
    """The whole file as text."""
    title = escape(page.title)
    links = "".join(f'<a href="#{escape(s.anchor)}">{escape(s.title)}</a>' for s in page.sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{title} · ingot report</title><style>{CSS}</style></head><body>\n"
        f'<header><p class="brand">ingot report</p><h1>{title}</h1><p class="subtitle">{escape(page.subtitle)}</p>'
        f'<dl class="tiles">{"".join(map(_tile, page.tiles))}</dl>'
        f'<div class="command"><p class="caption">The command that reproduces it</p>'
        f"<pre><code>{escape(page.command)}</code></pre></div>"
        f'<nav aria-label="Sections">{links}</nav></header>\n'
        f"<main>{''.join(map(_section, page.sections))}</main>\n"
        f"<footer>{escape(page.footer)}</footer>\n</body></html>\n"
    )


def _tile(tile: Tile) -> str:
    judged = {True: ' class="good"', False: ' class="bad"', None: ""}[tile.good]
    note = f'<dd class="note">{escape(tile.note)}</dd>' if tile.note else ""
    return f'<div class="tile"><dt>{escape(tile.label)}</dt><dd{judged}>{escape(tile.value)}</dd>{note}</div>'


def _section(section: Section) -> str:
    anchor = escape(section.anchor)
    blocks = "\n".join(map(_block, section.blocks))
    return (
        f'\n<section id="{anchor}" aria-labelledby="{anchor}-title">'
        f'<h2 id="{anchor}-title">{escape(section.title)}</h2>\n{blocks}</section>\n'
    )


def _block(block: Block) -> str:
    match block:
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Code(text):
            return f"<pre><code>{escape(text)}</code></pre>"
        case Pairs(rows):
            cells = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in rows)
            return f'<dl class="pairs">{cells}</dl>'
        case Table():
            return _folded_table(block) if block.folded else _table(block)
        case Bars():
            return _bars(block)
        case Chart():
            return _chart(block)
        case Charts(charts):
            return f'<div class="pair-of-charts">{"".join(map(_chart, charts))}</div>'
        case Sample(prompt, text):
            return f"<blockquote><b>{escape(prompt)}</b>{escape(text)}</blockquote>"


def _folded_table(table: Table) -> str:
    return f"<details><summary>{escape(table.caption)}</summary>{_table(table, captioned=False)}</details>"


def _table(table: Table, captioned: bool = True) -> str:
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption and captioned else ""
    rows = "".join(f"<tr>{''.join(_cell(table, i, text) for i, text in enumerate(row))}</tr>" for row in table.rows)
    compact = ' class="compact"' if len(table.right) == len(table.header) else ""
    head = _head(table.header, table.right)
    return f'<div class="scroll"><table{compact}>{caption}{head}<tbody>{rows}</tbody></table></div>'


def _head(header: tuple[str, ...], right: tuple[int, ...]) -> str:
    cells = "".join(
        f'<th scope="col"{" class=r" if i in right else ""}>{escape(text)}</th>' for i, text in enumerate(header)
    )
    return f"<thead><tr>{cells}</tr></thead>"


def _cell(table: Table, column: int, text: str) -> str:
    if column == 0 and column not in table.right and len(table.header) > 1:
        return f'<th scope="row">{escape(text)}</th>'
    kind = "r" if column in table.right else "hash" if table.header[column] == "SHA-256" else ""
    return f"<td{f' class={kind}' if kind else ''}>{escape(text)}</td>"


def _bars(bars: Bars) -> str:
    rows = []
    for bar in bars.rows:
        percent = f"{100 * min(max(bar.fraction, 0.0), 1.0):.2f}"
        note = f'<span class="ran">{escape(bar.note)}</span>' if bar.note else ""
        track = f'<span class="track" aria-hidden="true"><span class="fill" style="width:{percent}%"></span></span>'
        values = "".join(f'<td class="r">{escape(value)}</td>' for value in bar.values)
        rows.append(f'<tr><th scope="row">{escape(bar.label)}{track}{note}</th>{values}</tr>')
    head = _head(bars.header, tuple(range(1, len(bars.header))))
    return f'<div class="scroll"><table class="bars">{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _chart(chart: Chart) -> str:
    """Both sizes of the SVG are there; the style sheet shows one, so that text stays readable on a telephone."""
    legend = "".join(f'<li><i class="{escape(kind)}"></i>{escape(text)}</li>' for kind, text in chart.legend)
    return (
        f"<figure><h3>{escape(chart.title)}</h3>"
        f'<div class="wide">{chart.wide}</div><div class="narrow">{chart.narrow}</div>'
        + (f'<ul class="legend">{legend}</ul>' if legend else "")
        + "</figure>"
    )
