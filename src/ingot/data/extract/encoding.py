"""The character encoding of a page: decode its bytes to text."""

import codecs
import re

from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_META = re.compile(rb"<meta[^>]{1,300}?charset\s*=\s*[\"']?\s*([\w.:-]{2,40})", re.IGNORECASE)
_META_BYTES = 4096
# WHATWG name -> Python encoding that is a superset: pages declare the smaller encoding but use the larger one.
_SUPERSETS = {"gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "iso8859-11": "cp874"}
_TOLERATED_ERRORS = 0.01
_HEAD_BYTES = 1024


def decode_page(raw: bytes, header_charset: str) -> tuple[str, str]:
    """Return (text, name of the encoding used). Never raises; bytes that do not decode become U+FFFD.

    The order: byte order mark; UTF-16 if the pattern of zero bytes shows it; UTF-8 if all bytes are valid (text in
    another encoding is almost never valid UTF-8, and headers are often wrong); the HTTP header; the meta element;
    detection by uchardet. A declared encoding is used if at most 1% of the characters fail; otherwise the encoding with
    the fewest failures is used. Only WHATWG encodings are possible, so no page can choose a slow or unusual codec.
    """
    for bom, name in _BOMS:
        if raw.startswith(bom):
            return raw[len(bom) :].decode(name, "replace"), name
    if name := _unmarked_utf16(raw[:_HEAD_BYTES]):
        return raw.decode(name, "replace"), name
    declared = [name for name in (_known(header_charset), _known(_meta_charset(raw))) if name]
    if "iso2022_jp" not in declared:  # this encoding uses only ASCII bytes, so it would look like UTF-8
        try:
            return raw.decode("utf-8"), "utf-8"
        except UnicodeDecodeError:
            pass  # not UTF-8: try the encodings that the page declares
    best = ("", "", 2.0)
    for name in (*declared, None, "utf-8"):
        name = name or _known(detect_encoding(raw) or "") or "cp1252"
        text = raw.decode(name, "replace")
        errors = text.count("\ufffd") / max(len(text), 1)
        if errors < best[2]:
            best = (text, name, errors)
        if errors <= _TOLERATED_ERRORS:
            break
    return best[0], best[1]


def _unmarked_utf16(head: bytes) -> str:
    """Return "utf-16-le" or "utf-16-be" if every other byte of `head` is zero, as in UTF-16 markup, else "".

    Such bytes are also valid UTF-8, so this check comes before UTF-8.
    """
    zeros = [head[first::2].count(0) for first in (0, 1)]
    if sum(zeros) * 3 <= len(head) or min(zeros) * 10 > max(zeros):
        return ""
    return "utf-16-le" if zeros[1] > zeros[0] else "utf-16-be"


def _meta_charset(raw: bytes) -> str:
    match = _META.search(raw[:_META_BYTES])
    return match[1].decode("ascii", "ignore") if match else ""


def _known(charset: str) -> str:
    """Return Python's name of the WHATWG encoding with the label `charset`, or ""."""
    name = map_encoding_to_html5(charset, fallback_utf8=False) if charset else None
    return _SUPERSETS.get(name, name) if name else ""
