"""The layout of a run in words."""

from collections.abc import Mapping


def layout_text(layout: Mapping[str, object]) -> str:
    """{"pp": 2, "dp_shard": 4} -> "pp=2 dp_shard=4": outermost axis first, as the event has them."""
    return " ".join(f"{axis}={size}" for axis, size in layout.items())
