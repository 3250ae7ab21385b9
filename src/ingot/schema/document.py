"""One document of a crawl, and the record of a dropped document."""

import hashlib
from dataclasses import dataclass, field


@dataclass(slots=True)
class Document:
    """The record that data stages pass on. Stages replace `text` and `language` and add to `notes`; all other fields
    are origin.

    id: 32 hex digits, a pure function of origin (`document_id`), so the same crawl always gives the same ids.
    source: the name that mixing weights and evaluation use ("guide", "web", ...).
    raw: the undecoded body until the extractor has made `text` of it; empty afterwards.
    content_type: media type of `raw`, lower case, without parameters ("text/html", "text/plain").
    charset: from the HTTP header, lower case, or "".
    """

    id: str
    url: str
    source: str
    file: str
    record_id: str
    text: str = ""
    raw: bytes = b""
    content_type: str = ""
    charset: str = ""
    language: str = ""
    notes: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drop:
    """The reason for which a document left the pipeline. `rule` is stable and dotted ("gopher.word_count"); `value`
    is the measure.
    """

    stage: str
    rule: str
    value: str = ""


def document_id(file: str, record_id: str, url: str) -> str:
    """Return the id of the record `record_id` of crawl file `file` (base name)."""
    return hashlib.blake2b(f"{file}\0{record_id}\0{url}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
