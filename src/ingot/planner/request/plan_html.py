"""A planning as HTML, for notebooks: the ranked layouts, each with a bar of its memory against the device's."""

from html import escape
from typing import TYPE_CHECKING

from ingot.planner.predict.memory.peak_memory import rank_memory_bytes
from ingot.planner.request.plan_text import RANKING, columns_in_use, plan_lines, ranking_rows
from ingot.planner.run.plan import Planned
from ingot.units import format_bytes, format_count

if TYPE_CHECKING:
    from ingot.planner.request.answer import Planning

# Kinds of memory, in the order of the bar; colours that stay apart for the colour-blind (Okabe & Ito 2008).
_COLOURS = {
    "weights": "#0072B2", "gradients": "#56B4E9", "optimizer": "#009E73", "gathered": "#F0E442",
    "activations": "#E69F00", "logits": "#D55E00", "fragmentation": "#CC79A7", "runtime": "#999999",
}  # fmt: skip
_OTHER = "#666666"
_CELL = "padding:2px 8px;text-align:right;white-space:nowrap"


def as_html(planning: "Planning") -> str:
    """Self-contained, every text escaped; legible on light and dark pages, because it sets no colour of text."""
    best = planning.best
    head = f"{format_count(best.plan.parameters)} parameters on {best.plan.cluster.name}"
    rows = ranking_rows(planning)
    used = columns_in_use(rows)
    names = [*(RANKING[i] for i in used), "memory of the device"]
    titles = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in names)
    body = "".join(_row([row[i] for i in used], planned) for row, planned in zip(rows, planning.plans, strict=True))
    details = escape("\n".join(plan_lines(best)))
    said = (planning.fix, planning.texts, planning.why_not_executed)
    besides = "".join(f"<p>{escape(text)}</p>" for text in said if text)
    return (
        f'<div><p><b>{escape(best.run.name)}</b>: {escape(head)}</p><div style="overflow-x:auto">'
        f'<table style="border-collapse:collapse;font-size:90%"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody>'
        f"</table></div><p>{_legend(planning)}</p>{besides}"
        f"<details><summary>the best in full</summary><pre>{details}</pre></details></div>"
    )


def _row(cells: list[str], planned: Planned) -> str:
    shown = "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in cells)
    return f'<tr>{shown}<td style="padding:2px 8px">{_bar(planned)}</td></tr>'


def _bar(planned: Planned) -> str:
    plan = planned.plan
    there = rank_memory_bytes(plan.cluster, planned.run.parallel.world_size)
    scale = 100 / max(there, plan.total_memory_bytes)
    parts = "".join(
        f'<span title="{escape(kind)} {format_bytes(size)}" style="display:inline-block;height:12px;'
        f'width:{size * scale:.2f}%;background:{_COLOURS.get(kind, _OTHER)}"></span>'
        for kind, size in _ordered(plan.memory_bytes)
        if size
    )
    label = f"{format_bytes(plan.total_memory_bytes)} of {format_bytes(there)}"
    border = "#D55E00" if plan.total_memory_bytes > there else "currentColor"
    return (
        f'<span role="img" aria-label="{label}" title="{label}" style="display:inline-block;width:220px;height:12px;'
        f'line-height:0;font-size:0;border:1px solid {border};white-space:nowrap">{parts}</span>'
    )


def _legend(planning: "Planning") -> str:
    kinds = [kind for kind, size in _ordered(planning.best.plan.memory_bytes) if size]
    return " ".join(
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:10px;height:10px;'
        f'background:{_COLOURS.get(kind, _OTHER)}"></span> {escape(kind)}</span>'
        for kind in kinds
    )


def _ordered(memory: dict[str, int]) -> list[tuple[str, int]]:
    order = [*_COLOURS, *(kind for kind in memory if kind not in _COLOURS)]
    return sorted(memory.items(), key=lambda item: order.index(item[0]))
