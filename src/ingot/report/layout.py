"""The layout of a run in words."""

from collections.abc import Mapping


def layout_text(layout: Mapping[str, object]) -> str:
    """{"dp_shard": 4, "cp": 2, "ep": 2, "context": "ring"} -> "dp_shard 4 x cp 2 (ring), ep 2": ep is no axis,
    its ranks lie across the others.

    Axes of size 1 divide nothing; {"dp_shard": 1} is one process for each copy, and said.
    """
    axes = {axis: size for axis, size in layout.items() if axis not in ("ep", "context")}
    form = {"cp": f" ({layout['context']})"} if "context" in layout else {}
    divided = [f"{axis} {size}{form.get(axis, '')}" for axis, size in axes.items() if size != 1 or len(axes) == 1]
    return " x ".join(divided) + (f", ep {layout['ep']}" if "ep" in layout else "")
