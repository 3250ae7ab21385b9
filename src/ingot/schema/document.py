"""One document of a crawl, and the record of a dropped document."""

import hashlib
from dataclasses import dataclass, field


@dataclass(slots=True)
class Document:
    """The record that data stages pass on. Stages replace `text` and `language` and add to `notes`; all other fields
    describe where the document comes from.

    id: 32 hex digits, computed from file, record and URL (`document_id`), so the same crawl always gives the same ids.
    source: the name that mixing weights and evaluation use ("guide", "web", ...).
    raw: the undecoded body, which the extractor turns into `text`; empty after that.
    content_type: media type of `raw`, lower case, without parameters ("text/html", "text/plain").
    charset: character encoding given by the HTTP header, lower case, or "".
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
    """The reason why a document was dropped. rule: a stable, dotted name ("gopher.word_count"). value: the measured
    value that broke the rule.
    """

    stage: str
    rule: str
    value: str = ""


def document_id(file: str, record_id: str, url: str) -> str:
    """Return the id of the record `record_id` of crawl file `file` (base name)."""
    return hashlib.blake2b(f"{file}\0{record_id}\0{url}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
