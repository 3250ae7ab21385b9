"""Spans of personal data in a text."""

from typing import NamedTuple

EMAIL, PHONE, CARD, IP = "<EMAIL>", "<PHONE>", "<CARD>", "<IP>"


class Span(NamedTuple):
    """A span of personal data: text[start:end] becomes `placeholder`."""

    start: int
    end: int
    placeholder: str


def without_overlaps(spans: list[Span]) -> list[Span]:
    """Return `spans` in the order of the text, without overlaps; of two overlapping spans the earlier in `spans`
    stays."""
    if len(spans) < 2:
        return spans
    chosen: list[tuple[int, Span]] = []
    for rank, span in sorted(enumerate(spans), key=lambda pair: (pair[1].start, pair[0])):
        if chosen and span.start < chosen[-1][1].end:
            if rank < chosen[-1][0]:
                chosen[-1] = rank, span
        else:
            chosen.append((rank, span))
    return [span for _, span in chosen]
