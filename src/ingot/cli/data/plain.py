"""Crawled text on a terminal: what a page says may not move the cursor, change colours or turn the line around."""

import re

_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """`text` with U+FFFD for controls, but tab and line feed, for direction marks, and for what no encoding has."""
    return _ACTING.sub("\ufffd", text)
