"""Read documents from WARC and WET files: one document or drop per response record (WET: conversion record).

No record is lost silently. Every such record gives one pair (document, drop or None), and so do revisits (references to
an earlier response, without a body) and continuations of segmented records. Damage gives a pair with its offset.
Resources are pages if they are HTML or text with a web address; requests and metadata are not pages.

Crawlers store HTTP responses as received, so headers can be wrong: a body announced as gzip may be plain (ClueWeb), and
the chunks of a body announced as chunked may have been joined by the crawler. The bytes decide; a header is only a
hint.
"""

import io
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastwarc.stream_io import BrotliReader, ZstdReader

from ingot.data.sources.bounded import Limits
from ingot.data.sources.records import Record, read_records
from ingot.data.sources.sniff import charset, looks_like_html, media_type, page_type
from ingot.data.sources.text import STAGE
from ingot.schema.corpus import Document, Drop, document_id

_WITH_PAGE = (200, 203)  # status codes of pages; 203: a proxy changed the page
_NO_BODY = frozenset({"revisit", "continuation"})


def read_warc(
    path: Path, source: str, limits: Limits | None = None, *, name: str = ""
) -> Iterator[tuple[Document, Drop | None]]:
    """Yield pairs (document, drop or None) in the order of the file, which may be plain, gzip or zstd.

    name: the file name to use in the ids of documents, if it differs from the name of `path`.

    Drop rules: read.http_status, not_html, empty_body, too_large, bad_http, not_http, bad_encoding,
    unsupported_encoding, no_url, revisit, continuation, bad_record (damage; reading continues after it), truncated_file
    (damage with nothing readable after it), no_pages (a WARC file without responses, such as WAT).
    A page that the crawler truncated is kept, with notes["warc_truncated"].
    Raises DataError for a file that is not a WARC file.
    """
    limits, name = limits or Limits(), name or path.name
    pages, others = 0, Counter()
    for record in read_records(path, limits):
        if record.problem:
            rule = "truncated_file" if record.cut else "bad_record"
            value = f"offset {record.offset}: {record.problem}"
            yield _document(name, source, record), Drop(STAGE, f"{STAGE}.{rule}", value)
        elif record.kind in _NO_BODY:
            pages += 1
            yield _document(name, source, record), Drop(STAGE, f"{STAGE}.{record.kind}", record.content_type[:40])
        elif record.kind in ("response", "conversion") or _is_page(record):
            pages += 1
            document = _document(name, source, record)
            try:
                _fill(document, record, limits)
            except BadResponse as bad:
                yield document, Drop(STAGE, f"{STAGE}.{bad.rule}", bad.value)
            else:
                yield document, None
        else:
            others[record.kind] += 1
    if not pages:
        value = ", ".join(f"{count} {kind}" for kind, count in others.most_common(3))
        yield _document(name, source, Record(offset=0)), Drop(STAGE, f"{STAGE}.no_pages", value)


def read_crawl(
    path: Path, name: str, source: str, limits: Limits, settings: None = None
) -> Iterator[tuple[Document, Drop | None]]:
    """Read a file by the contract of a format (plugins/source.py); see `read_warc`."""
    return read_warc(path, source, limits, name=name)


def _is_page(record: Record) -> bool:
    """Return True if a resource record holds a page. Crawlers also store logs and screenshots in such records."""
    return (
        record.kind == "resource"
        and record.url.lower().startswith(("http://", "https://", "ftp://"))
        and bool(page_type(record.block[:4096], media_type(record.content_type), "")[0])
    )


def _document(name: str, source: str, record: Record) -> Document:
    record_id = record.record_id or f"offset-{record.offset}"
    return Document(
        id=document_id(name, record_id, record.url),
        url=record.url,
        source=source,
        file=name,
        record_id=record_id,
    )


def _fill(document: Document, record: Record, limits: Limits) -> None:
    """Set `raw`, `content_type` and `charset` of `document` from `record`. Raises BadResponse."""
    if len(record.block) > limits.block_bytes:
        raise BadResponse("too_large", f"record over {limits.block_bytes} bytes")
    if not record.url:
        raise BadResponse("no_url")
    if record.kind == "conversion":
        kind = media_type(record.content_type)
        if kind != "text/plain":
            raise BadResponse("not_html", kind)
        body, document.charset = record.block, charset(record.content_type) or "utf-8"
    else:
        body, kind, document.charset = _resource(record) if record.kind == "resource" else _response(record, limits)
    if not body.strip():
        raise BadResponse("empty_body")
    document.raw, document.content_type = body, kind
    if record.truncated:
        document.notes["warc_truncated"] = record.truncated


def _resource(record: Record) -> tuple[bytes, str, str]:
    kind, _ = page_type(record.block, media_type(record.content_type), "")
    return record.block, kind, charset(record.content_type)


def _response(record: Record, limits: Limits) -> tuple[bytes, str, str]:
    """Return (decoded body, media type, charset from the header). Raises BadResponse."""
    if not record.block.startswith(b"HTTP/") and media_type(record.content_type) != "application/http":
        raise BadResponse("not_http", record.content_type[:40])
    response = parse_response(record.block, limits.header_bytes)
    if response.status not in _WITH_PAGE:
        raise BadResponse("http_status", str(response.status))
    body = decoded_body(response, limits.body_bytes)
    if not body.strip():
        return body, "", ""
    claimed = response.headers.get("content-type", "")
    kind, instead = page_type(body, media_type(claimed), media_type(record.identified_type))
    if not kind:
        raise BadResponse("not_html", instead)
    return body, kind, charset(claimed)


# Stored HTTP responses

_HEADER_END = re.compile(rb"\r?\n\r?\n")
_STATUS_LINE = re.compile(rb"HTTP/\d(?:\.\d)? +(\d{3})\b")
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,16})[ \t]*(?:;[^\r\n]*)?\r?\n")
_LISTS = frozenset({"content-encoding", "transfer-encoding"})
_PIECE_BYTES = 256 << 10
_BROTLI_LARGE_WINDOW = 0b0010001  # not a valid window (RFC 7932, 9.1), but an extension that requests a gigabyte
_MAX_ENCODINGS = 3  # servers never use more; decompression bombs do


class BadResponse(Exception):
    """The response cannot be used. rule: the drop rule without its prefix "read."; value: what was found."""

    def __init__(self, rule: str, value: str = ""):
        super().__init__(rule, value)
        self.rule, self.value = rule, value


@dataclass(frozen=True, slots=True)
class Response:
    """A stored HTTP response.

    status: the HTTP status code. headers: lower-case name -> value; a repeated header has its first value, except that
    lists of encodings are joined (RFC 9110, 5.2). body: the body, still encoded.
    """

    status: int
    headers: dict[str, str]
    body: bytes


def parse_response(block: bytes, header_bytes: int) -> Response:
    """Parse a complete response. Header lines may end in LF alone. Raises BadResponse (bad_http, too_large)."""
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
    """Return the body after undoing its transfer and content encodings.

    Raises BadResponse: too_large (over `limit_bytes` after decoding), bad_encoding (the body cannot be decoded),
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
        return body  # the header is wrong: no compressed stream starts with a tag
    try:
        if name in ("gzip", "x-gzip"):
            # A crawler that decoded the body but kept the header leaves no gzip magic.
            data = _inflated(body, 31, limit_bytes) if body[:2] == b"\x1f\x8b" else body
        elif name == "deflate":
            # "deflate" means zlib in the standard, but raw deflate on some servers (RFC 9110, 8.4.1.2).
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
    """Return the output of `reader`, at most a little more than `limit_bytes`.

    The output is read in pieces, because the reader allocates as many bytes as are requested.
    """
    parts, size = [], 0
    while size <= limit_bytes and (piece := reader.read(_PIECE_BYTES)):
        parts.append(piece)
        size += len(piece)
    return b"".join(parts)


def _inflated(data: bytes, window_bits: int, limit_bytes: int) -> bytes:
    """Return at most limit_bytes + 1 bytes inflated from all members of a gzip body, or from one deflate stream."""
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
    """Join the chunks of a body (RFC 9112, 7.1). Return a body unchanged if it does not start with a chunk size."""
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
    return b"".join(parts)  # truncated by the server: browsers show the part that was received
