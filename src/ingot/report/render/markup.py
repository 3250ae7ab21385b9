"""Render a `ReportPage` as an HTML file (inline style, inline SVG, no scripts, no loading) and as Markdown.

Texts of a crawl, model output and names from run files may be hostile: every text is escaped, and the HTML has a
content security policy that forbids scripts and loading.
"""

import re
from dataclasses import replace
from html import escape

from ingot.report.render.page import (
    Bars,
    Block,
    Chart,
    Charts,
    Folded,
    HeadlineFigure,
    HeatMap,
    LabeledValues,
    ReportPage,
    Sample,
    Section,
    TableBlock,
    Text,
)
from ingot.web.design import colors

CSS = (
    colors()
    + """:root{--raw:#e3b690;--plum:#8a3b84;--teal:#1b7f86}
@media (prefers-color-scheme:dark){:root{--raw:#7b4f2c;--plum:#d58fd0;--teal:#5cc4cb}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main,header,footer{max-width:980px;margin:0 auto;padding:0 24px}
header{padding-top:44px}
.brand{font-size:13px;letter-spacing:.14em;text-transform:uppercase;color:var(--metal);font-weight:600;margin:0}
h1{font-size:34px;line-height:1.15;letter-spacing:-.015em;margin:6px 0 4px;overflow-wrap:anywhere}
.subtitle{color:var(--soft);margin:0 0 26px}
h2{font-size:21px;letter-spacing:-.01em;margin:0 0 14px}
h3{font-size:15px;margin:0 0 8px;font-weight:600}
section{border-top:1px solid var(--rule);padding:30px 0 26px}
p{margin:0 0 14px;max-width:70ch}
a{color:var(--metal)}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:14px;margin:22px 0 30px}
nav a{color:var(--soft);text-decoration:none}
nav a:hover,nav a:focus{color:var(--metal);text-decoration:underline}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(168px,1fr));gap:1px;background:var(--rule);
border:1px solid var(--rule);border-radius:10px;overflow:hidden;margin:0}
.tile{background:var(--card);padding:16px 18px 15px;display:flex;flex-direction:column}
.tile dt{font-size:13px;color:var(--soft)}
.tile dd{margin:0;font-size:24px;white-space:nowrap;line-height:1.25;font-weight:650;letter-spacing:-.02em;
font-variant-numeric:tabular-nums}
.tile dd.note{white-space:normal;font-size:13px;line-height:1.4;font-weight:400;letter-spacing:0;color:var(--soft);
margin-top:3px}
.good{color:var(--good)}.bad{color:var(--bad)}
pre{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:11px 14px;margin:0;overflow-x:auto;
font:13.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.command{margin-top:14px}
.command .caption{font-size:13px;color:var(--soft);margin:0 0 5px}
.scroll{overflow-x:auto;margin:0 0 16px}
table{border-collapse:collapse;width:100%;font-size:14.5px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:7px 16px 7px 0;border-bottom:1px solid var(--rule);vertical-align:top;
overflow-wrap:break-word}
th{font-size:13px;font-weight:600;color:var(--soft);white-space:nowrap}
tbody th{font-size:inherit;color:inherit;font-weight:500;white-space:normal}
td.r,th.r{text-align:right;white-space:nowrap}
th:last-child,td:last-child{padding-right:0}
table.compact{width:auto}table.compact th,table.compact td{padding-left:0;padding-right:44px}
caption{text-align:left;font-size:13px;color:var(--soft);padding:0 0 6px}
td.hash{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.pairs{display:grid;grid-template-columns:minmax(130px,15em) 1fr;gap:0;margin:0 0 18px;font-size:14.5px}
.pairs dt{color:var(--soft);padding:6px 0;border-bottom:1px solid var(--rule)}
.pairs dd{margin:0;padding:6px 0 6px 14px;border-bottom:1px solid var(--rule);font-variant-numeric:tabular-nums;
overflow-wrap:anywhere}
.bars td,.bars th{padding-top:9px;padding-bottom:9px}
.bars tbody th{width:62%}
.track{display:block;height:7px;border-radius:4px;background:var(--grid);margin:5px 0 4px;overflow:hidden}
.fill{display:block;height:7px;border-radius:4px;background:var(--metal)}
.ran{display:block;font-size:13px;line-height:1.4;color:var(--soft);font-weight:400}
details{margin:0 0 8px}
summary{cursor:pointer;font-size:14.5px;color:var(--soft);margin-bottom:6px}
summary:hover{color:var(--metal)}
figure{margin:0 0 22px}
.pair-of-charts{display:grid;grid-template-columns:1fr 1fr;gap:6px 34px}
svg.chart{display:block;width:100%;height:auto}
.narrow{display:none}
.chart text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:var(--soft)}
.chart .tick{font-variant-numeric:tabular-nums}
.chart .mark-text{fill:var(--bad);font-weight:600}
.chart line.grid{stroke:var(--grid);stroke-width:1}
.chart line.mark{stroke:var(--bad);stroke-width:1;stroke-dasharray:3 3}
.chart polyline{fill:none;stroke-linejoin:round;stroke-linecap:round;stroke-width:2;stroke:var(--metal)}
.chart polyline.raw{stroke:var(--raw);stroke-width:1}
.chart polyline.baseline{stroke:var(--cool);stroke-width:1.5;stroke-dasharray:7 5}
.chart circle.dots{fill:var(--cool);stroke:var(--page);stroke-width:1.5}
.chart polyline.zero{stroke:var(--soft);stroke-width:1}
.run-1{--run:var(--metal)}.run-2{--run:var(--cool)}.run-3{--run:var(--good)}.run-4{--run:var(--plum)}
.run-5{--run:var(--teal)}.run-6{--run:var(--soft)}
.chart polyline[class^=run]{stroke:var(--run);stroke-width:1.75}.chart circle[class*=run]{fill:var(--run)}
.chart polyline.run-3{stroke-dasharray:9 3}.chart polyline.run-4{stroke-dasharray:9 3 2 3}
.chart polyline.run-5{stroke-dasharray:2 3}.chart polyline.run-6{stroke-dasharray:14 4}
.even{--load:var(--rule)}.below-3{--load:var(--cool)}.above-3{--load:var(--metal)}
.below-1{--load:color-mix(in srgb,var(--cool) 35%,var(--page))}
.below-2{--load:color-mix(in srgb,var(--cool) 68%,var(--page))}
.above-1{--load:color-mix(in srgb,var(--metal) 35%,var(--page))}
.above-2{--load:color-mix(in srgb,var(--metal) 68%,var(--page))}
.chart rect{fill:var(--load)}
.heat td{background:color-mix(in srgb,var(--load) 45%,var(--page));padding:5px 9px;border:1px solid var(--page)}
.heat td.even{background:var(--grid)}.heat th{padding:5px 9px 5px 0}
.heat thead th{white-space:normal;vertical-align:bottom;max-width:6.5em;padding:5px 9px}
.heat thead th:first-child{padding-left:0}
.legend{display:flex;flex-wrap:wrap;gap:2px 20px;list-style:none;margin:6px 0 0;padding:0;font-size:13px;
color:var(--soft)}
.legend i{display:inline-block;width:20px;height:0;border-top:3px solid var(--metal);vertical-align:middle;
margin-right:7px}
.legend i.raw{border-top-color:var(--raw);border-top-width:1.5px}
.legend i.baseline{border-top:2px dashed var(--cool)}
.legend i[class^=run]{border-top-color:var(--run)}.legend i.run-3,.legend i.run-4,.legend i.run-6{
border-top-style:dashed}.legend i.run-5{border-top-style:dotted}
.legend i.dots{width:9px;height:9px;border:0;border-radius:50%;background:var(--cool)}
.legend i.even,.legend i[class^=below],.legend i[class^=above]{width:14px;height:10px;border:0;background:var(--load)}
blockquote{margin:0 0 12px;padding:11px 16px;background:var(--card);border:1px solid var(--rule);
border-left:3px solid var(--metal);border-radius:0 8px 8px 0;white-space:pre-wrap;overflow-wrap:anywhere;font-size:15px}
blockquote b{font-weight:650}
blockquote span{color:var(--soft)}
footer{border-top:1px solid var(--rule);padding-top:16px;padding-bottom:50px;color:var(--soft);font-size:13px}
@media (max-width:640px){
main,header,footer{padding-left:16px;padding-right:16px}
header{padding-top:26px}h1{font-size:27px}
.tiles{grid-template-columns:1fr 1fr}.tile:last-child:nth-child(odd){grid-column:1/-1}
.tile{padding:12px 13px}.tile dd{font-size:20px}
.pairs{grid-template-columns:minmax(100px,38%) 1fr}
.pair-of-charts{grid-template-columns:1fr}
.wide{display:none}.narrow{display:block}
th,td{padding-right:11px}th,th.r{white-space:normal;vertical-align:bottom}tbody th{vertical-align:top}
.bars tbody th{width:50%}
}
@media print{
:root{--page:#fff;--card:#fff;--ink:#000;--soft:#444;--rule:#ccc;--grid:#ddd;--metal:#9a4408;--raw:#dcb48f;
--cool:#24547a;--good:#1f5c31;--bad:#9c1c15;--plum:#6d2a68;--teal:#12636a}
body{font-size:12px}nav{display:none}section{padding:16px 0 8px}
figure,.tiles,blockquote,tr{break-inside:avoid}h2,h3{break-after:avoid}
rect,.legend i,.track,.fill{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""
)


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render_html(page: ReportPage) -> str:
    """Return the page as the text of an HTML file."""
    title = escape(page.title)
    links = "".join(f'<a href="#{escape(s.anchor)}">{escape(s.title)}</a>' for s in page.sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{title} · {escape(page.brand)}</title><style>{CSS}</style></head><body>\n"
        f'<header><p class="brand">{escape(page.brand)}</p><h1>{title}</h1>'
        f'<p class="subtitle">{escape(page.subtitle)}</p>'
        f'<dl class="tiles">{"".join(map(_html_tile, page.headline))}</dl>'
        f'<div class="command"><p class="caption">{escape(page.about_command)}</p>'
        f"<pre><code>{escape(page.command)}</code></pre></div>"
        f'<nav aria-label="Sections">{links}</nav></header>\n'
        f"<main>{''.join(map(_html_section, page.sections))}</main>\n"
        f"<footer>{escape(page.footer)}</footer>\n</body></html>\n"
    )


def _html_tile(tile: HeadlineFigure) -> str:
    judged = {True: ' class="good"', False: ' class="bad"', None: ""}[tile.good]
    note = f'<dd class="note">{escape(tile.note)}</dd>' if tile.note else ""
    return f'<div class="tile"><dt>{escape(tile.label)}</dt><dd{judged}>{escape(tile.value)}</dd>{note}</div>'


def _html_section(section: Section) -> str:
    anchor = escape(section.anchor)
    blocks = "\n".join(map(_html_block, section.blocks))
    return (
        f'\n<section id="{anchor}" aria-labelledby="{anchor}-title">'
        f'<h2 id="{anchor}-title">{escape(section.title)}</h2>\n{blocks}</section>\n'
    )


def _html_block(block: Block) -> str:
    match block:
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case LabeledValues(rows):
            cells = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in rows)
            return f'<dl class="pairs">{cells}</dl>'
        case TableBlock():
            return _html_folded_table(block) if block.folded else _html_table(block)
        case Bars():
            return _html_bars(block)
        case HeatMap():
            return _html_heat(block)
        case Chart():
            return _html_chart(block)
        case Charts(charts):
            return f'<div class="pair-of-charts">{"".join(map(_html_chart, charts))}</div>'
        case Sample(prompt, text):
            return f"<blockquote><b>{escape(prompt)}</b>{escape(text)}</blockquote>"
        case Folded(caption, blocks):
            return f"<details><summary>{escape(caption)}</summary>{''.join(map(_html_block, blocks))}</details>"


def _html_folded_table(table: TableBlock) -> str:
    return f"<details><summary>{escape(table.caption)}</summary>{_html_table(table, captioned=False)}</details>"


def _html_table(table: TableBlock, captioned: bool = True) -> str:
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption and captioned else ""
    rows = "".join(
        f"<tr>{''.join(_html_cell(table, i, text) for i, text in enumerate(row))}</tr>" for row in table.rows
    )
    compact = ' class="compact"' if len(table.right) == len(table.header) else ""
    head = _html_head(table.header, table.right)
    return f'<div class="scroll"><table{compact}>{caption}{head}<tbody>{rows}</tbody></table></div>'


def _html_head(header: tuple[str, ...], right: tuple[int, ...]) -> str:
    cells = "".join(
        f'<th scope="col"{" class=r" if i in right else ""}>{escape(text)}</th>' for i, text in enumerate(header)
    )
    return f"<thead><tr>{cells}</tr></thead>"


def _html_cell(table: TableBlock, column: int, text: str) -> str:
    if column == 0 and column not in table.right and len(table.header) > 1:
        return f'<th scope="row">{escape(text)}</th>'
    kind = "r" if column in table.right else "hash" if table.header[column] == "SHA-256" else ""
    return f"<td{f' class={kind}' if kind else ''}>{escape(text)}</td>"


def _html_bars(bars: Bars) -> str:
    rows = []
    for bar in bars.rows:
        percent = f"{100 * min(max(bar.fraction, 0.0), 1.0):.2f}"
        note = f'<span class="ran">{escape(bar.note)}</span>' if bar.note else ""
        track = f'<span class="track" aria-hidden="true"><span class="fill" style="width:{percent}%"></span></span>'
        values = "".join(f'<td class="r">{escape(value)}</td>' for value in bar.values)
        rows.append(f'<tr><th scope="row">{escape(bar.label)}{track}{note}</th>{values}</tr>')
    head = _html_head(bars.header, tuple(range(1, len(bars.header))))
    return f'<div class="scroll"><table class="bars">{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _html_heat(heat: HeatMap) -> str:
    rows = []
    for row in heat.rows:
        cells = "".join(
            f'<td class="r {level_class(level)}">{escape(value)}</td>'
            for value, level in zip(row.values, row.levels, strict=True)
        )
        note = f'<span class="ran">{escape(row.note)}</span>' if row.note else ""
        rows.append(f'<tr><th scope="row">{escape(row.label)}{note}</th>{cells}</tr>')
    head = _html_head(heat.header, tuple(range(1, len(heat.header))))
    return f'<div class="scroll"><table class="heat">{head}<tbody>{"".join(rows)}</tbody></table></div>'


def level_class(level: int) -> str:
    """Return the CSS class of a shade: level is -3 (far below the usual) to 3 (far above it)."""
    return "even" if level == 0 else f"above-{level}" if level > 0 else f"below-{-level}"


def _html_chart(chart: Chart) -> str:
    """Return a figure with both sizes of the SVG; the style sheet shows the size that fits the screen."""
    legend = "".join(f'<li><i class="{escape(kind)}"></i>{escape(text)}</li>' for kind, text in chart.legend)
    return (
        f"<figure><h3>{escape(chart.title)}</h3>"
        f'<div class="wide">{chart.wide}</div><div class="narrow">{chart.narrow}</div>'
        + (f'<ul class="legend">{legend}</ul>' if legend else "")
        + "</figure>"
    )


def render_markdown(page: ReportPage) -> str:
    """Return the page as Markdown. Hostile text (samples, names) is escaped or fenced, so none of it acts as markup."""
    headline = TableBlock(("", "", ""), [(t.label, t.value, t.note) for t in page.headline])
    parts = [f"# {_markdown_escape(page.title)}", _markdown_escape(page.subtitle)]
    parts += [_markdown_table(headline)] if page.headline else []
    parts += [f"{page.about_command}:", _markdown_fence(page.command)]
    parts += [_markdown_section(section) for section in page.sections]
    return "\n\n".join([*parts, "---", _markdown_escape(page.footer)]) + "\n"


def _markdown_section(section: Section) -> str:
    return "\n\n".join([f"## {_markdown_escape(section.title)}", *map(_markdown_block, section.blocks)])


def _markdown_block(block: Block) -> str:
    match block:
        case Text(text):
            return _markdown_escape(text)
        case LabeledValues(rows):
            return _markdown_table(TableBlock(("", ""), rows))
        case TableBlock():
            return _markdown_table(block)
        case Bars():
            rows = [(bar.label, *bar.values, bar.note) for bar in block.rows]
            return _markdown_table(TableBlock((*block.header, ""), rows, right=tuple(range(1, len(block.header)))))
        case HeatMap():
            heat = [(f"{row.label} ({row.note})" if row.note else row.label, *row.values) for row in block.rows]
            return _markdown_table(TableBlock(block.header, heat, right=tuple(range(1, len(block.header)))))
        case Chart(title=title, table=table):
            return f"**{_markdown_escape(title)}**\n\n{_markdown_table(replace(table, caption=''))}"
        case Charts(charts):
            return "\n\n".join(map(_markdown_block, charts))
        case Sample(prompt, text):
            return _markdown_fence(prompt + text)
        case Folded(caption, blocks):
            return "\n\n".join([_markdown_escape(caption), *map(_markdown_block, blocks)])


def _markdown_table(table: TableBlock) -> str:
    lines = [f"| {' | '.join(map(_markdown_escape, table.header))} |"]
    lines.append("|" + "|".join("---:" if i in table.right else "---" for i in range(len(table.header))) + "|")
    lines += [f"| {' | '.join(map(_markdown_escape, row))} |" for row in table.rows]
    caption = f"{_markdown_escape(table.caption)}\n\n" if table.caption else ""
    return caption + "\n".join(lines)


def _markdown_escape(text: str) -> str:
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", flat)


def _markdown_fence(text: str) -> str:
    """Return `text` as a code block, with a fence longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
