"""The report section on experts: how evenly the router loads them, over the run and by layer.

The load map is a picture with one row per layer, in which experts are sorted from the busiest to the idlest. The order
of experts has no meaning, and a sorted row needs only a few rectangles, for any number of experts.
"""

from bisect import bisect
from collections.abc import Sequence
from html import escape
from itertools import groupby
from statistics import fmean

from ingot.report.facts import RunData
from ingot.report.readable import is_finite
from ingot.report.render.charts import expert_charts, spread
from ingot.report.render.page import Block, Chart, HeatMap, HeatRow, Section, TableBlock, Text

_WIDE, _NARROW = 900, 350
_COLUMNS = 12  # of the map of cells


def experts_section(data: RunData) -> Section | None:
    """Return the section on experts, None for a run without experts."""
    if not data.experts:
        return None
    last = data.experts[max(data.experts)]
    blocks: list[Block] = [Text(_in_words(last))]
    blocks += [charts] if (charts := expert_charts(data)) else []
    mapped = [e for step in sorted(data.experts) if has_loads(e := data.experts[step])]
    if mapped:
        blocks.append(_load_chart(mapped[-1]))
    blocks.append(_table(last))
    return Section("experts", "Experts", blocks)


def _in_words(event: dict) -> str:
    busiest = event["max_load"]
    worst = max(range(len(busiest)), key=busiest.__getitem__)
    text = (
        f"A load of 1 means that an expert gets the mean number of tokens of its layer. In the {event['steps']:,} "
        f"steps up to {event['step']:,}, the busiest expert had {busiest[worst]:.1f}x its share "
        f"(layer {event['layers'][worst]}), and loads deviated by {fmean(event['load_cv']):.2f} (mean over layers)."
    )
    for name, became in (("dropped", "dropped"), ("fallback", "taken by the fallback expert")):
        if event[name] is not None:
            text += (
                f" {fmean(event[name]):.2%} of the assignments were beyond the capacity of their expert, and {became}."
            )
    return text


def _table(event: dict) -> TableBlock:
    columns = [
        ("Layer", event["layers"], ","),
        ("Deviation", event["load_cv"], ".3f"),
        ("Busiest", event["max_load"], ".2f"),
        ("Idlest", event["min_load"], ".2f"),
        ("Entropy (nats)", event["entropy"], ".3f"),
    ]
    for name, title in (("dropped", "Dropped"), ("fallback", "To fallback")):
        if event[name] is not None:
            columns.append((title, event[name], ".2%"))
    rows = [tuple(format(values[i], spec) for _, values, spec in columns) for i in range(len(event["layers"]))]
    caption = f"Loads by layer, steps up to {event['step']:,}"
    header = tuple(name for name, _, _ in columns)
    return TableBlock(header, rows, right=tuple(range(len(header))), caption=caption, folded=len(rows) > 12)


def has_loads(event: dict) -> bool:
    """Check whether an `experts` event has the loads of all experts, with the same number of experts in each layer."""
    loads = event.get("loads")
    if not isinstance(loads, list) or len(loads) != len(event["layers"]) or not all(isinstance(r, list) for r in loads):
        return False
    return len({len(row) for row in loads}) == 1 and bool(loads[0]) and all(is_finite(v) for row in loads for v in row)


def _load_chart(event: dict) -> Chart:
    layers, loads = event["layers"], event["loads"]
    title = f"Loads of the {len(loads[0]):,} experts of each layer, steps up to {event['step']:,}"
    rows = [(f"{layers[i]}", *map(str, counted(loads[i]))) for i in spread(list(range(len(layers))), 12)]
    header = ("Layer", *NAMES)
    return Chart(
        title=title,
        wide=load_map(layers, loads, width=_WIDE, label=title),
        narrow=load_map(layers, loads, width=_NARROW, label=title),
        legend=tuple((kind(level), name) for level, name in enumerate(NAMES)),
        table=TableBlock(header, rows, right=tuple(range(len(header))), caption=title),
        heat=load_cells(layers, loads),
    )


def load_cells(layers: Sequence[int], loads: Sequence[Sequence[float]]) -> HeatMap:
    """Return the load map as cells with figures, for a page or a terminal: of up to 40 layers, all experts from the
    busiest to the idlest, or of many experts 12 of them, evenly spread. The arguments are those of `load_map`."""
    experts = len(loads[0])
    columns = spread(list(range(experts)), _COLUMNS)
    inner = [f"{at + 1}" if experts <= _COLUMNS else f"{at / (experts - 1):.0%}" for at in columns[1:-1]]
    rows = []
    for i in spread(list(range(len(layers))), 40):
        chosen = [sorted(loads[i], reverse=True)[at] for at in columns]
        levels = tuple(bisect(EDGES, load) - _EVEN for load in chosen)
        rows.append(HeatRow(f"{layers[i]}", tuple(f"{load:.2f}" for load in chosen), levels))
    return HeatMap(("Layer", *["busiest", *inner, "idlest"][: len(columns)]), rows)


# The loads between two colors. The mean load is 1, and the edges below 1 are the reciprocals of those above.
EDGES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
NAMES = (
    "under 0.25x", "0.25x to 0.5x", "0.5x to 0.8x", "0.8x to 1.25x", "1.25x to 2x", "2x to 4x", "4x and more",
)  # fmt: skip
_EVEN = NAMES.index("0.8x to 1.25x")


def kind(level: int) -> str:
    """Return the CSS class of the color for NAMES[level]; the class says how far a load is below or above the mean."""
    if level == _EVEN:
        return "even"
    return f"below-{_EVEN - level}" if level < _EVEN else f"above-{level - _EVEN}"


def counted(loads: Sequence[float]) -> list[int]:
    """Return the number of `loads` in each range of NAMES."""
    levels = [bisect(EDGES, load) for load in loads]
    return [levels.count(level) for level in range(len(NAMES))]


def load_map(layers: Sequence[int], loads: Sequence[Sequence[float]], *, width: int, label: str) -> str:
    """Return the load map as an <svg>, `width` user units wide.

    loads: one row per layer with one load per expert; 1 is the mean. label: a description for screen readers.
    """
    row = min(max(360 / len(layers), 7.0), 22.0)
    left, top = 10 + 7 * max(len(str(layer)) for layer in layers), 6
    across, every = width - left - 14, -(-14 // int(row))  # a number needs 14 units
    bottom = top + row * len(layers)
    height = round(bottom + 24)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label)}" class="chart"><title>{escape(label)}</title>'
    ]
    for i, (layer, row_loads) in enumerate(zip(layers, loads, strict=True)):
        y = top + i * row
        if i % every == 0:
            parts.append(
                f'<text class="tick" x="{left - 6}" y="{y + row / 2 + 4:.1f}" text-anchor="end">{layer}</text>'
            )
        parts += _row(row_loads, left, y, across, row - 1)
    ends = ((left, "start", "busiest expert of a layer"), (left + across, "end", "idlest"))
    for x, anchor, text in ends:
        parts.append(f'<text class="tick" x="{x}" y="{bottom + 16:.1f}" text-anchor="{anchor}">{text}</text>')
    return "".join(parts) + "</svg>"


def _row(loads: Sequence[float], left: float, y: float, across: float, height: float) -> list[str]:
    rects, done = [], 0
    for level, group in groupby(bisect(EDGES, load) for load in sorted(loads, reverse=True)):
        count = len(list(group))
        x, width = left + across * done / len(loads), across * count / len(loads)
        rects.append(f'<rect class="{kind(level)}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>')
        done += count
    return rects
