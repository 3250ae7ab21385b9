"""Fallback layouts as text."""

from collections.abc import Iterator

from ingot.schema.fallbacks import Fallback, Fallbacks
from ingot.units import format_bytes

_MOST = 4  # numbers of nodes in a note


def fallback_notes(found: Fallbacks) -> Iterator[tuple[str, str]]:
    """Yield (subject, sentence) pairs about what the run would do with fewer nodes, and with less memory."""
    if found.fewer_nodes:
        possible = [entry for entry in found.fewer_nodes if not entry.problem]
        lines = [
            f"with {entry.nodes} of {found.own.nodes}: {change_text(entry, found.own)}" for entry in possible[:_MOST]
        ]
        more = f"; layouts for {len(possible) - _MOST} smaller numbers" if len(possible) > _MOST else ""
        without = [str(entry.nodes) for entry in found.fewer_nodes if entry.problem]
        none = (
            f"; no layout for {', '.join(without[:_MOST])}{' and others' if without[_MOST:] else ''}" if without else ""
        )
        yield "nodes", ("; ".join(lines) or "no layout") + more + none
    if found.less_memory:
        changes = "; then ".join(change_text(entry, found.own) for entry in found.less_memory)
        yield "memory", f"if a rank runs out of it: {changes}"


def change_text(entry: Fallback, own: Fallback) -> str:
    """Return a layout as its settings, with its memory, and its time as a multiple of that of the run's own layout."""
    times = f", step {entry.step_seconds / own.step_seconds:.2f} x as long" if own.step_seconds else ""
    return f"{' '.join(entry.overrides)} ({format_bytes(entry.memory_bytes)} a rank{times})"
