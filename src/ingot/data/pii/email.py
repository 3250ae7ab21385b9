"""E-mail addresses: RFC 5321 lengths, RFC 6531 (letters of any script), tags with +."""

import re

from ingot.data.pii.span import EMAIL, Span

_LOCAL_MAX = 64
# What may stand before the @; the first character is a letter, digit or "_", so that quotes and dots stay outside.
_LOCAL = re.compile(r"(?<![\w.%+\-])\w[\w.%+\-'&~!$*]{0,63}\Z")
# Scripts without spaces, whose words stand right before and behind an address.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_AFTER_UNSPACED = re.compile(rf"(?<=[{_UNSPACED}])[A-Za-z0-9_][A-Za-z0-9_.%+\-]*\Z")
_DOMAIN = re.compile(
    r"(?:[^\W_](?:[\w\-]{0,61}[^\W_])?\.){1,8}"
    rf"(?:[A-Za-z]{{2,24}}(?=[{_UNSPACED}])|(?:xn--[A-Za-z0-9\-]{{2,59}}|[^\W\d_]{{2,24}})(?!\w))"
)
# name@2x.png is an image for dense screens, no address.
_FILE_ENDINGS = frozenset(
    ("png", "jpg", "jpeg", "gif", "svg", "webp", "avif", "ico", "css", "js", "json", "html", "php")
)
_OBFUSCATED = re.compile(
    r"(?<![\w.%+\-])(\w[\w.%+\-]{0,63}) ?[\[({<] ?at ?[\])}>] ?"
    r"((?:[^\W_][\w\-]{0,62}(?: ?[\[({<] ?(?:dot|punkt|point) ?[\])}>] ?| dot |\.)){1,5}[^\W\d_]{2,24})(?!\w)",
    re.IGNORECASE,
)


def find_emails(text: str, obfuscated: bool = False) -> list[Span]:
    """Spans of addresses; with `obfuscated` also of "name [at] host [dot] com" (brackets around "at" are needed)."""
    spans, done = [], 0
    at = text.find("@")
    while at >= 0:
        domain = _domain(text, at + 1)
        if domain:
            # One character more than the longest name, for the look-behind: a longer run is no name.
            low = max(at - _LOCAL_MAX - 1, done)
            before = text[low:at]
            local = _LOCAL.search(before)
            if local and not local[0].isascii():
                local = _AFTER_UNSPACED.search(before) or local
            if local:
                spans.append(Span(low + local.start(), domain, EMAIL))
                done = domain
        at = text.find("@", at + 1)
    if obfuscated and "at" in text.lower():
        spans += [Span(*match.span(), EMAIL) for match in _OBFUSCATED.finditer(text)]
    return spans


def _domain(text: str, start: int) -> int:
    """Where the domain name that begins at `start` ends, 0 if there is none."""
    match = _DOMAIN.match(text, start, start + 320)
    if not match:
        return 0
    name = match[0]
    return 0 if name.rpartition(".")[2].lower() in _FILE_ENDINGS else match.end()
