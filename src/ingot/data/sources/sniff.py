"""Detect the type of a body and the format of a file, from the first bytes, the headers and the file name.

Types of bodies follow section 7.1 of the WHATWG MIME Sniffing standard, as in browsers: a tag that exists only in HTML
means HTML, bytes that do not occur in text mean binary data, and the headers decide the remaining cases.
"""

import re
from pathlib import Path

from ingot.data.sources.bounded import Limits
from ingot.data.sources.unpack import BadStream, Unpacked
from ingot.errors import DataError
from ingot.plugins.source import FORMATS

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
WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")  # byte order marks of UTF-16


def media_type(content_type: str) -> str:
    """Return the media type of a Content-Type value: 'Text/HTML; charset=UTF-8' -> 'text/html'."""
    return content_type.partition(";")[0].strip().lower()


def charset(content_type: str) -> str:
    """Return the charset of a Content-Type value: 'text/html; charset="UTF-8"' -> 'utf-8'; "" if there is none."""
    match = re.search(r"charset\s*=\s*[\"']?([\w.:-]+)", content_type, re.IGNORECASE)
    return match[1].lower() if match else ""


def looks_like_html(body: bytes) -> bool:
    """Return True if `body` starts like HTML, in any ASCII-compatible encoding or in UTF-16."""
    head = body[:_HEAD_BYTES].removeprefix(b"\xef\xbb\xbf")
    if head[:2] in WIDE_BOMS:
        head = head.decode("utf-16", "ignore").encode("latin-1", "ignore")
    elif head[:4].count(0) == 2:  # UTF-16 without a mark: a letter, a zero, a letter, a zero
        head = head.replace(b"\0", b"")
    return _HTML.match(_without_comments(head)) is not None


def _without_comments(head: bytes) -> bytes:
    """Return `head` without leading space, comments and XML declaration, in linear time (a regex could backtrack)."""
    head = head.lstrip()
    while opened := next((pair for pair in _BEFORE_HTML if head.startswith(pair[0])), None):
        end = head.find(opened[1], len(opened[0]))
        head = head[end + len(opened[1]) :].lstrip() if end >= 0 else b""
    return head


def page_type(body: bytes, claimed: str, identified: str) -> tuple[str, str]:
    """Return (media type of `body`, ""), or ("", the type found) for a body that is neither HTML nor plain text.

    claimed: the type in the Content-Type header; identified: the type that the crawler detected
    (WARC-Identified-Payload-Type). Both are media types in lower case, or "".
    """
    if looks_like_html(body):
        return "text/html", ""
    head = body[:_HEAD_BYTES]
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return "", kind
    # A few control characters occur in text, but they are never a tenth of the first bytes.
    if head[:2] not in WIDE_BOMS and len(_BINARY.findall(head)) > max(len(head) // 10, 3):
        return "", f"binary, claims {claimed or 'nothing'}"
    claims = {claimed, identified}
    if claims & HTML_TYPES:
        return "text/html", ""
    if "text/plain" in claims:
        return "text/plain", ""
    return "", identified or claimed or "unknown"


_FOREIGN = {
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"Rar!": "rar",
    b"7z\xbc\xaf": "7z",
    b"%PDF-": "PDF",
    b"SQLite": "SQLite",
    b"filedesc:": "ARC",
    b"WARC/0.9 ": "WARC 0.9",
}


def foreign(head: bytes) -> str:
    """Return the format, such as " (zip)", if `head` is the start of a format that ingot does not unpack, else ""."""
    return next((f" ({kind})" for magic, kind in _FOREIGN.items() if head.startswith(magic)), "")


_PACKED = frozenset({"gz", "zst"})
_FILE_HEAD_BYTES = 4096


def format_of(path: Path, name: str, limits: Limits) -> str:
    """Return the format of the local file or folder `path`, by the ending of `name`, or else by its first bytes.

    Raises DataError for a file in no registered format (plugins/source.py).
    """
    if path.is_dir():
        return "folder"
    if by_name := format_by_name(name):
        return by_name
    with path.open("rb") as file:
        start = file.read(16)
    try:
        with Unpacked(path, limits) as stream:
            head = stream.exactly(_FILE_HEAD_BYTES)
    except BadStream:
        head = b""
    if head.lstrip().startswith(b"WARC/"):
        return "warc"
    if head.startswith(b"PAR1"):
        return "parquet"
    if head[257:262] == b"ustar":
        return "tar"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return "jsonl"
    raise DataError(
        "E-INPUT-FORMAT",
        f"the format of {name} is not known: it starts with {start!r}{foreign(start)}",
        rule=f"the formats are {', '.join(FORMATS.names())}; warc, wet, text, jsonl and tar also as .gz and .zst",
        fix="unpack zip, bzip2, xz and lz4 first; name the format if the file name does not show it",
        name=name,
        archive=foreign(start).strip(" ()"),
    )


def format_by_name(name: str) -> str:
    """Return the format that belongs to the ending of a file name, "" for an unknown ending."""
    name = name.lower()
    stem, _, last = name.rpartition(".")
    unpacked = stem if last in _PACKED and "." in stem else ""
    for entry in FORMATS.entries():
        endings = tuple(f".{ending}" for ending in entry.part.endings)
        if name.endswith(endings) or (entry.part.packed and unpacked.endswith(endings)):
            return entry.part.name
    return ""
