"""Fallback layouts as text."""

from collections.abc import Iterator, Sequence

from ingot.schema.fallbacks import Fallbacks

_MOST, _MOST_CHANGES = 4, 3  # numbers of nodes, and changes for memory, in a note


def fallback_notes(found: Fallbacks) -> Iterator[tuple[str, str]]:
    """Yield (subject, sentence) pairs about what the run would do with fewer nodes, and with less memory."""
    if found.fewer_nodes:
        yield "nodes", _fewer_nodes(found)
    if changes := found.ladder(found.own)[1:]:
        shown = "; then ".join(entry.text(found.own) for entry in changes[:_MOST_CHANGES])
        more = len(changes) - _MOST_CHANGES
        then = f"; then {more} more changes" if more > 0 else ""
        yield (
            "memory",
            f"if a rank runs out of it, these settings of the run change, one after the other: {shown}{then}",
        )


def _fewer_nodes(found: Fallbacks) -> str:
    possible = [entry for entry in found.fewer_nodes if not entry.problem]
    if not possible:
        return f"the run waits for lost nodes: there is no layout for fewer than {found.own.nodes}"
    each = [f"with {entry.nodes} of {found.own.nodes}, {entry.text(found.own)}" for entry in possible[:_MOST]]
    more = f"; and layouts for {len(possible) - _MOST} smaller numbers of nodes" if len(possible) > _MOST else ""
    without = [entry.nodes for entry in found.fewer_nodes if entry.problem]
    least = min(entry.nodes for entry in possible)
    fewer = _names("; with {}, it uses fewer of them", [nodes for nodes in without if nodes > least])
    waits = _names("; with {}, it waits", [nodes for nodes in without if nodes < least])
    return f"if nodes are lost, the run goes on with these settings: {'; '.join(each)}{more}{fewer}{waits}"


def _names(text: str, numbers: Sequence[int]) -> str:
    """Return the text with the numbers in it; "" without any."""
    shown = ", ".join(map(str, numbers[:_MOST])) + (" and others" if numbers[_MOST:] else "")
    return text.format(shown) if numbers else ""
