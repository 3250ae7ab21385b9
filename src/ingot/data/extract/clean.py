"""Text as it leaves an extractor, cleaned: the same for every extractor and for pages that are plain text."""

import re

# Control characters except tab and line feed; marks that steer bidirectional layout; soft hyphens and zero-width
# spaces, which break words that look whole; the byte order mark. Joiners stay: they spell words in Persian and Hindi.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufffe\uffff]"
)
_WIDE_LINE_ENDS = re.compile("[\u2028\u2029\x85]")
_BLANK_LINES = re.compile(r"\n{3,}")


def clean_text(text: str, *, blank_lines: bool = False) -> str:
    """Unix line ends, plain spaces, no invisible characters, at most one blank line between paragraphs.

    blank_lines: leave them, and indentation before the first word, as they are.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.isascii():
        text = _WIDE_LINE_ENDS.sub("\n", text).replace("\xa0", " ")
    text = _INVISIBLE.sub("", text)
    if " \n" in text or "\t\n" in text:
        text = "\n".join([line.rstrip(" \t") for line in text.split("\n")])
    if blank_lines:
        return text.strip("\n").rstrip()
    if "\n\n\n" in text:
        text = _BLANK_LINES.sub("\n\n", text)
    return text.strip()
