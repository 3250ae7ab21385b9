"""Find e-mail addresses and public IP addresses in a text.

E-mail: lengths by RFC 5321, letters of any script (RFC 6531), tags with +. IP: addresses of the public internet only;
private, reserved, multicast and documentation ranges identify nobody.
"""

import ipaddress
import re

from ingot.data.pii.span import EMAIL, IP, Span

_LOCAL_MAX = 64
# The part before the @; the first character is a letter, digit or "_", so that quotes and dots stay outside.
_LOCAL = re.compile(r"(?<![\w.%+\-])\w[\w.%+\-'&~!$*]{0,63}\Z")
# Scripts without spaces between words (Thai, Japanese, Chinese, Korean): their letters may directly precede an address.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_AFTER_UNSPACED = re.compile(rf"(?<=[{_UNSPACED}])[A-Za-z0-9_][A-Za-z0-9_.%+\-]*\Z")
_DOMAIN = re.compile(
    r"(?:[^\W_](?:[\w\-]{0,61}[^\W_])?\.){1,8}"
    rf"(?:[A-Za-z]{{2,24}}(?=[{_UNSPACED}])|(?:xn--[A-Za-z0-9\-]{{2,59}}|[^\W\d_]{{2,24}})(?!\w))"
)
# name@2x.png is an image for high-resolution screens, not an address.
_FILE_ENDINGS = frozenset(
    ("png", "jpg", "jpeg", "gif", "svg", "webp", "avif", "ico", "css", "js", "json", "html", "php")
)
_OBFUSCATED = re.compile(
    r"(?<![\w.%+\-])(\w[\w.%+\-]{0,63}) ?[\[({<] ?at ?[\])}>] ?"
    r"((?:[^\W_][\w\-]{0,62}(?: ?[\[({<] ?(?:dot|punkt|point) ?[\])}>] ?| dot |\.)){1,5}[^\W\d_]{2,24})(?!\w)",
    re.IGNORECASE,
)


def find_emails(text: str, obfuscated: bool = False) -> list[Span]:
    """Return the spans of e-mail addresses.

    obfuscated: also find "name [at] host [dot] com" (the brackets around "at" are required).
    """
    spans, done = [], 0
    at = text.find("@")
    while at >= 0:
        domain = _domain(text, at + 1)
        if domain:
            # One character more than the longest name, so that the lookbehind rejects a run too long for a name.
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
    """Return the end of the domain name that begins at `start`, 0 if there is none."""
    match = _DOMAIN.match(text, start, start + 320)
    if not match:
        return 0
    name = match[0]
    return 0 if name.rpartition(".")[2].lower() in _FILE_ENDINGS else match.end()


_IPV4 = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?!\.?\w|-[A-Za-z])", re.ASCII)
# "version 8.8.8.8", "version number is 8.8.8.8", "Chrome/120.0.0.0", "section 4.3.2.1"
_VERSION_BEFORE = re.compile(
    r"(?:(?<!\w)(?:versions?|releases?|builds?|ver\.?|v\.?|rev\.?|revision|firmware|driver|update|patch|sdk|api|protocol|"
    r"package|library|plug-?in|app|software|program|tool|windows|android|ios|macos|kernel|chrome|chromium|firefox|safari|"
    r"opera|edge|java|python|php|sections?|sec\.|chapter|clause|table|figure|fig\.|appendix|article|step|rule|oid)"
    r"(?: (?:numbers?|no\.?|nr\.?|is|was)){0,2}[ :=#(\-]*"
    r"|(?<!\w)(?:up|down)(?:grade|date)[sd]? to |§ ?|(?<![:/])\w/)$",
    re.IGNORECASE,
)
# "the 8.8.8.8 release"
_VERSION_AFTER = re.compile(r" (?:version|release|update|build|beta|patch)", re.IGNORECASE)
# Two colons with at most four hex digits between them. Times match too, so _IPV6 then checks the whole address.
_COLONS = re.compile(r":[0-9A-Fa-f]{0,4}:")
# Global unicast addresses only: 2000::/3.
_IPV6 = re.compile(r"(?<![\w:.])[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:){1,6}[0-9A-Fa-f]{0,4}(?![\w:])", re.ASCII)


def find_ipv4(window: str, start: int, end: int) -> list[tuple[int, int]]:
    """Return the spans of public IPv4 addresses that begin in window[start:end].

    The text around an address may show that it is a version or a heading's number; such numbers are skipped.
    """
    spans = []
    for match in _IPV4.finditer(window, start):
        if match.start() >= end:
            break
        if is_public_ipv4(match[0]) and not _is_number_of_something(window, match):
            spans.append(match.span())
    return spans


def _is_number_of_something(window: str, match: re.Match) -> bool:
    if _VERSION_BEFORE.search(window, max(match.start() - 32, 0), match.start()):
        return True
    if _VERSION_AFTER.match(window, match.end()):
        return True
    # "1.2.3.4 Title" at the start of a line or quotation: the number of a heading.
    begins = match.start() == 0 or window[match.start() - 1] in "\n\"'\u201c"
    heading = begins and window[match.end() : match.end() + 1] == " " and window[match.end() + 1 :][:1].isupper()
    return heading and all(int(octet) < 60 for octet in match[0].split("."))


def find_ipv6(text: str) -> list[Span]:
    spans, done = [], 0
    if ":" not in text:
        return spans
    for colons in _COLONS.finditer(text):
        if colons.start() < done:
            continue
        low = max(colons.start() - 4, 0)
        match = _IPV6.match(text, low)
        if match:
            done = match.end()
            if is_public_ipv6(match[0]):
                spans.append(Span(*match.span(), IP))
    return spans


def is_public_ipv4(text: str) -> bool:
    """Check whether `text` is a dotted IPv4 address of the public internet."""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return address.is_global and not address.is_multicast


def is_public_ipv6(text: str) -> bool:
    """Check whether `text` is a public IPv6 address with at least three groups; with fewer (2002::) it is a network."""
    try:
        return ipaddress.IPv6Address(text).is_global and sum(map(bool, text.split(":"))) >= 3
    except ValueError:
        return False
