"""Pages out of WARC and WET files: one document per response (WET: conversion) record, or the reason why not.

Nothing is lost silently: every such record gives one pair (document, drop), and damage gives a pair of its own with
the offset. So give revisits (copies of an earlier response, without a body) and continuations of segmented records.
Resources are pages if they are HTML or text of a web address. Requests and metadata are no pages.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ingot.data.sources.http import BadResponse, decoded_body, parse_response
from ingot.data.sources.limits import Limits
from ingot.data.sources.records import Record, read_records
from ingot.data.sources.sniff import charset, media_type, page_type
from ingot.schema.document import Document, Drop, document_id

STAGE = "read"
_WITH_PAGE = (200, 203)  # 203: a proxy changed it on the way
_NO_BODY = frozenset({"revisit", "continuation"})


def read_warc(
    path: Path, source: str, limits: Limits | None = None, *, name: str = ""
) -> Iterator[tuple[Document, Drop | None]]:
    """Pairs (document, why it has to go or None) in the order of the file, which may be plain, gzip or zstd.

    name: of the file in ids of documents, where that is not its own.

    Rules: read.http_status, not_html, empty_body, too_large, bad_http, not_http, bad_encoding, unsupported_encoding,
    no_url, revisit, continuation, bad_record (damage; reading goes on behind it), truncated_file (damage, and nothing
    readable behind it),
    no_pages (a WARC file without responses, such as WAT).
    A page that the crawler itself cut short is kept, with notes["warc_truncated"].
    Raises DataError for what is no WARC file at all.
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


def _is_page(record: Record) -> bool:
    """A file that was stored without the HTTP around it; crawlers keep logs and screenshots in such records, too."""
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
    """Body and type of `record` into `document`. Raises BadResponse."""
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
    """(decoded body, media type, charset from the header). Raises BadResponse."""
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
