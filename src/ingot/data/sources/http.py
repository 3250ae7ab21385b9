"""A stored HTTP response taken apart: status, headers, and the body with its encodings undone, within a size limit.

Crawlers store responses as they came, so headers lie: a body announced as gzip may be plain (ClueWeb), one announced
as chunked may have been joined by the crawler. The bytes decide; a header is only a hint.
"""

import io
import re
import zlib
from dataclasses import dataclass

from fastwarc.stream_io import BrotliReader, ZstdReader

from ingot.data.sources.sniff import looks_like_html

_HEADER_END = re.compile(rb"\r?\n\r?\n")
_STATUS_LINE = re.compile(rb"HTTP/\d(?:\.\d)? +(\d{3})\b")
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,16})[ \t]*(?:;[^\r\n]*)?\r?\n")
_LISTS = frozenset({"content-encoding", "transfer-encoding"})
_PIECE_BYTES = 256 << 10
_BROTLI_LARGE_WINDOW = 0b0010001  # no legal window (RFC 7932, 9.1), but an extension that asks for a gigabyte
_MAX_ENCODINGS = 3  # nobody honest stacks more; a bomb does


class BadResponse(Exception):
    """The response cannot be used. rule: the part of the drop's name after "read."."""

    def __init__(self, rule: str, value: str = ""):
        super().__init__(rule, value)
        self.rule, self.value = rule, value


@dataclass(frozen=True, slots=True)
class Response:
    """status: HTTP code. headers: lower-case name -> value; of repeated ones the first, lists of encodings joined
    (RFC 9110, 5.2). body: still encoded."""

    status: int
    headers: dict[str, str]
    body: bytes


def parse_response(block: bytes, header_bytes: int) -> Response:
    """`block` is a whole response. Headers may end in bare LF. Raises BadResponse (bad_http, too_large)."""
    status = _STATUS_LINE.match(block)
    if not status:
        raise BadResponse("bad_http", "no status line")
    end = _HEADER_END.search(block, 0, header_bytes)
    if not end:
        if len(block) > header_bytes:
            raise BadResponse("too_large", f"headers over {header_bytes} bytes")
        raise BadResponse("bad_http", "headers do not end")
    headers: dict[str, str] = {}
    name = ""
    for line in block[status.end() : end.start()].decode("latin-1").split("\n")[1:]:
        if line[:1] in (" ", "\t") and name:  # folded (RFC 9112, 5.2)
            headers[name] += " " + line.strip()
            continue
        name, colon, value = line.partition(":")
        name = name.strip().lower() if colon else ""
        if name in _LISTS and name in headers:
            headers[name] += ", " + value.strip()
        elif name in headers:
            name = ""
        elif name:
            headers[name] = value.strip()
    return Response(int(status[1]), headers, block[end.end() :])


def decoded_body(response: Response, limit_bytes: int) -> bytes:
    """The body with transfer and content encodings undone.

    Raises BadResponse: too_large (over `limit_bytes` after decoding), bad_encoding (it does not decode),
    unsupported_encoding.
    """
    body = response.body
    transfer = _names(response.headers.get("transfer-encoding", ""))
    if "chunked" in transfer:
        body = _dechunked(body)
    names = _names(response.headers.get("content-encoding", "")) + [name for name in transfer if name != "chunked"]
    if len(names) > _MAX_ENCODINGS:
        raise BadResponse("unsupported_encoding", f"{len(names)} encodings on one body")
    for name in reversed(names):
        body = _decoded(body, name, limit_bytes)
    if len(body) > limit_bytes:
        raise BadResponse("too_large", f"body over {limit_bytes} bytes")
    return body


def _names(value: str) -> list[str]:
    names = (name.strip().lower() for name in value.split(","))
    return [name for name in names if name not in ("", "identity", "none")]


def _decoded(body: bytes, name: str, limit_bytes: int) -> bytes:
    if looks_like_html(body):
        return body  # the header lies: no compressed stream starts with a tag
    try:
        if name in ("gzip", "x-gzip"):
            # A crawler that decoded the body but kept the header leaves no gzip magic.
            data = _inflated(body, 31, limit_bytes) if body[:2] == b"\x1f\x8b" else body
        elif name == "deflate":
            # "deflate" means zlib by the standard and raw deflate by habit (RFC 9110, 8.4.1.2).
            zlib_wrapped = len(body) > 1 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0
            data = _inflated(body, 15 if zlib_wrapped else -15, limit_bytes)
        elif name == "br":
            if body and body[0] & 0x7F == _BROTLI_LARGE_WINDOW:
                raise BadResponse("bad_encoding", "br: a window of up to 1 GB")
            data = _all_of(BrotliReader(io.BytesIO(body)), limit_bytes) if body else b""
        elif name == "zstd":
            data = _all_of(ZstdReader(io.BytesIO(body)), limit_bytes) if body else b""
        else:
            raise BadResponse("unsupported_encoding", name[:40])
    except (zlib.error, OSError) as error:
        raise BadResponse("bad_encoding", f"{name}: {error}"[:80]) from None
    if len(data) > limit_bytes:
        raise BadResponse("too_large", f"{name} body over {limit_bytes} bytes after decoding")
    return data


def _all_of(reader: BrotliReader | ZstdReader, limit_bytes: int) -> bytes:
    """What `reader` gives, at most little more than `limit_bytes`. In pieces: it allocates all that is asked for."""
    parts, size = [], 0
    while size <= limit_bytes and (piece := reader.read(_PIECE_BYTES)):
        parts.append(piece)
        size += len(piece)
    return b"".join(parts)


def _inflated(data: bytes, window_bits: int, limit_bytes: int) -> bytes:
    """All members of a gzip body, or one deflate stream; at most limit_bytes + 1. What follows the end is ignored."""
    parts, size = [], 0
    while data:
        stream = zlib.decompressobj(window_bits)
        parts.append(stream.decompress(data, limit_bytes + 1 - size))
        size += len(parts[-1])
        if size > limit_bytes or window_bits != 31 or stream.unused_data[:2] != b"\x1f\x8b":
            break
        data = stream.unused_data
    return b"".join(parts)


def _dechunked(body: bytes) -> bytes:
    """RFC 9112, 7.1. A body that does not start with a chunk size was joined by the crawler and stays as it is."""
    parts, position = [], 0
    while match := _CHUNK_SIZE.match(body, position):
        size = int(match[1], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[match.end() : match.end() + size])
        position = match.end() + size
        position += len(b"\r\n") if body.startswith(b"\r\n", position) else body.startswith(b"\n", position)
    if not parts:
        return body
    if position < len(body):
        raise BadResponse("bad_encoding", f"chunked: no chunk size at byte {position} of the body")
    return b"".join(parts)  # cut off by the server: browsers show what came
