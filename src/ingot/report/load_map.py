"""How evenly experts are used, as a picture: one row a layer, its experts from the busiest to the idlest.

Experts have no order of their own; sorted, a row is a few rectangles, however many experts there are.
"""

from bisect import bisect
from collections.abc import Sequence
from html import escape
from itertools import groupby

# Loads where one colour ends and the next begins: the same ratios below the mean, which is 1, as above it.
EDGES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
NAMES = (
    "under 0.25x", "0.25x to 0.5x", "0.5x to 0.8x", "0.8x to 1.25x", "1.25x to 2x", "2x to 4x", "4x and more",
)  # fmt: skip
_EVEN = NAMES.index("0.8x to 1.25x")


def kind(level: int) -> str:
    """The class of the colour of NAMES[level]: how far it lies below or above the mean."""
    if level == _EVEN:
        return "even"
    return f"below-{_EVEN - level}" if level < _EVEN else f"above-{level - _EVEN}"


def counted(loads: Sequence[float]) -> list[int]:
    """How many of `loads` have each of NAMES."""
    levels = [bisect(EDGES, load) for load in loads]
    return [levels.count(level) for level in range(len(NAMES))]


def load_map(layers: Sequence[int], loads: Sequence[Sequence[float]], *, width: int, label: str) -> str:
    """An <svg> of `width` user units. loads: of each expert of each layer, 1 is the mean. label: for screen readers."""
    row = min(max(360 / len(layers), 7.0), 22.0)
    left, top = 10 + 7 * max(len(str(layer)) for layer in layers), 6
    across, every = width - left - 14, -(-14 // int(row))  # a number needs 14 units
    bottom = top + row * len(layers)
    height = round(bottom + 24)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label)}" class="chart"><title>{escape(label)}</title>'
    ]
    for i, (layer, of_experts) in enumerate(zip(layers, loads, strict=True)):
        y = top + i * row
        if i % every == 0:
            parts.append(
                f'<text class="tick" x="{left - 6}" y="{y + row / 2 + 4:.1f}" text-anchor="end">{layer}</text>'
            )
        parts += _row(of_experts, left, y, across, row - 1)
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
