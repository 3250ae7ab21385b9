"""The documents of a crawl, kept or dropped, and the manifest of a corpus: its files and its funnel."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

# -- manifest --


@dataclass(frozen=True, kw_only=True)
class FunnelStage:
    """One stage of the pipeline: how many documents came in and went out, and how many each rule dropped.

    ran: the parts that really ran ("lid.176.ftz, threshold 0.65", "word list, 42 words; no classifier"), so that the
      funnel shows which parts were switched off.
    seconds: CPU seconds, summed over workers.
    """

    name: str
    ran: str
    documents_in: int
    documents_out: int
    dropped: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CorpusPart:
    """A gzip JSONL file of kept documents: id, url, source, file, record_id, language, text and lineage fields."""

    name: str
    source: str
    documents: int
    text_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class LineagePart:
    """A Parquet file with the decision on every record of one input."""

    name: str
    records: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CorpusManifest:
    """The `corpus.json` of a corpus folder.

    inputs: input name -> sha256, or another identity if the input is remote. sources: input name -> source.
    config_sha256: hash of the applied data recipe and of the files that it names. recipe: the values of the recipe.
    dropped: the files of dropped documents; their `text_bytes` count the excerpts that the files contain.
    """

    version: int = 1
    inputs: dict[str, str]
    sources: dict[str, str] = field(default_factory=dict)
    config_sha256: str
    parts: tuple[CorpusPart, ...]
    funnel: tuple[FunnelStage, ...]
    dropped: tuple[CorpusPart, ...] = ()
    lineage: tuple[LineagePart, ...] = ()
    recipe: dict[str, Any] = field(default_factory=dict)

    def problems(self):
        if self.version != 1:
            yield "version", f"is {self.version}, this ingot reads version 1"


# -- documents --


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
    """The reason why a document was dropped. stage: the name of the stage. rule: a stable, dotted name that begins with
    it ("gopher.word_count"). value: a text for people, the measured value that broke the rule ("4 < 50").
    """

    stage: str
    rule: str
    value: str = ""


def document_id(file: str, record_id: str, url: str) -> str:
    """Return the id of the record `record_id` of crawl file `file` (base name)."""
    return hashlib.blake2b(f"{file}\0{record_id}\0{url}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
