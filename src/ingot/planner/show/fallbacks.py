"""Fallback layouts as text."""

from collections.abc import Iterator

from ingot.schema.fallbacks import Fallbacks

_MOST, _MOST_CHANGES = 4, 3  # numbers of nodes, and changes for memory, in a note


def fallback_notes(found: Fallbacks) -> Iterator[tuple[str, str]]:
    """Yield (subject, sentence) pairs about what the run would do with fewer nodes, and with less memory."""
    if found.fewer_nodes:
        possible = [entry for entry in found.fewer_nodes if not entry.problem]
        lines = [f"with {entry.nodes} of {found.own.nodes}: {entry.text(found.own)}" for entry in possible[:_MOST]]
        more = f"; layouts for {len(possible) - _MOST} smaller numbers" if len(possible) > _MOST else ""
        without = [str(entry.nodes) for entry in found.fewer_nodes if entry.problem]
        none = (
            f"; no layout for {', '.join(without[:_MOST])}{' and others' if without[_MOST:] else ''}" if without else ""
        )
        yield "nodes", ("; ".join(lines) or "no layout") + more + none
    if changes := found.ladder(found.own)[1:]:
        shown = "; then ".join(entry.text(found.own) for entry in changes[:_MOST_CHANGES])
        more = len(changes) - _MOST_CHANGES
        yield "memory", f"if a rank runs out of it: {shown}" + (f"; then {more} more changes" if more > 0 else "")
