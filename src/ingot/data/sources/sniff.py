"""What a body is, from its first bytes and from what the headers claim.

After the WHATWG MIME Sniffing standard (section 7.1), which browsers follow: a tag that only HTML has settles the
matter, and bytes that no text has settle it the other way. Only in between do the headers decide.
"""

import re

HTML_TYPES = frozenset({"text/html", "application/xhtml+xml"})
_HEAD_BYTES = 1024
_HTML = re.compile(
    rb"<(?:!doctype\s+html|html|head|body|title|script|iframe|h1|div|font|table|style|meta|link|center|br|p|a|b)[\s>/]",
    re.IGNORECASE,
)
_BEFORE_HTML = ((b"<!--", b"-->"), (b"<?xml", b"?>"))
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_MAGIC = (
    (b"%PDF-", "application/pdf"),
    (b"\x89PNG", "image/png"),
    (b"GIF8", "image/gif"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"PK\x03\x04", "application/zip"),
    (b"\x1f\x8b", "application/gzip"),
)
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")


def media_type(content_type: str) -> str:
    """'Text/HTML; charset=UTF-8' -> 'text/html'."""
    return content_type.partition(";")[0].strip().lower()


def charset(content_type: str) -> str:
    """'text/html; charset="UTF-8"' -> 'utf-8'; '' when none is given."""
    match = re.search(r"charset\s*=\s*[\"']?([\w.:-]+)", content_type, re.IGNORECASE)
    return match[1].lower() if match else ""


def looks_like_html(body: bytes) -> bool:
    """Whether `body` starts as HTML, in any ASCII-compatible encoding or in UTF-16 with a byte order mark."""
    head = body[:_HEAD_BYTES].removeprefix(b"\xef\xbb\xbf")
    if head[:2] in _WIDE_BOMS:
        head = head.decode("utf-16", "ignore").encode("latin-1", "ignore")
    elif head[:4].count(0) == 2:  # UTF-16 without a mark: a letter, a zero, a letter, a zero
        head = head.replace(b"\0", b"")
    return _HTML.match(_without_comments(head)) is not None


def _without_comments(head: bytes) -> bytes:
    """`head` behind leading space, comments and XML declaration. A loop, not a pattern: that one could backtrack."""
    head = head.lstrip()
    while opened := next((pair for pair in _BEFORE_HTML if head.startswith(pair[0])), None):
        end = head.find(opened[1], len(opened[0]))
        head = head[end + len(opened[1]) :].lstrip() if end >= 0 else b""
    return head


def page_type(body: bytes, claimed: str, identified: str) -> tuple[str, str]:
    """(media type to treat `body` as, "") or ("", what it is instead).

    claimed: from the Content-Type header; identified: the crawler's own finding (WARC-Identified-Payload-Type).
    Both are media types in lower case, or "".
    """
    if looks_like_html(body):
        return "text/html", ""
    head = body[:_HEAD_BYTES]
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return "", kind
    # A few stray control characters occur in text; a tenth of the head being such bytes does not.
    if head[:2] not in _WIDE_BOMS and len(_BINARY.findall(head)) > max(len(head) // 10, 3):
        return "", f"binary, claims {claimed or 'nothing'}"
    claims = {claimed, identified}
    if claims & HTML_TYPES:
        return "text/html", ""
    if "text/plain" in claims:
        return "text/plain", ""
    return "", identified or claimed or "unknown"
