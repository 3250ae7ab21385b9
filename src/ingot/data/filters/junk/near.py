"""The neighbourhood of what a rule cannot do without, so that its patterns need not see the whole text."""

from collections.abc import Iterable


def near(data: bytes, needles: Iterable[bytes], before: int, after: int, most: int = 200) -> str:
    """The bytes around the first `most` places of each needle, none twice, as text with a line for each stretch."""
    places = []
    for needle in needles:
        place = data.find(needle)
        while place >= 0 and len(places) < most:
            places.append(place)
            place = data.find(needle, place + after)
    stretches, done = [], 0
    for place in sorted(places):
        start = max(place - before, done)
        done = max(place + after, done)
        stretches.append(data[start:done])
    return b"\n".join(stretches).decode("utf-8", "ignore")
