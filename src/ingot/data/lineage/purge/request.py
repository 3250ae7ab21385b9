"""The request of a purge, and the records that match it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ingot.data.build.corpus import load_corpus, read_jsonl
from ingot.data.lineage.purge.history import is_redacted, redacted_hash
from ingot.data.lineage.records import copies_of, domain_of, find, host_of, part_of, rows_of
from ingot.data.sources.url import canonical_url
from ingot.errors import UsageError
from ingot.storage import sha256_bytes

_KINDS = ("url", "domain", "doc", "pattern", "quarantine")


@dataclass(frozen=True, kw_only=True)
class PurgeRequest:
    """A request with exactly one of url, domain, doc, pattern and quarantine.

    url: any spelling of a URL. domain: a host, with its subdomains. doc: a document id. pattern: a regular expression
    for Python's `re.search`, applied to kept texts, the excerpts of dropped documents, URLs, and the values that rules
    recorded. quarantine: the documents (ids) of a quarantine list. copies: also purge the records that were dropped as
    copies of a purged document.
    """

    url: str = ""
    domain: str = ""
    doc: str = ""
    pattern: str = ""
    quarantine: frozenset[str] = frozenset()
    copies: bool = False

    def problems(self) -> Iterator[tuple[str, str]]:
        given = [name for name in _KINDS if getattr(self, name)]
        if len(given) != 1:
            yield (
                "request",
                f"exactly one of {', '.join(_KINDS)} is given, not {' and '.join(given) or 'none'}",
            )
        if self.doc and not re.fullmatch("[0-9a-f]{32}", self.doc):
            yield "doc", f"{self.doc!r} is not a whole document id of 32 hex digits (ingot data trace shows it)"
        if self.pattern:
            try:
                empty = re.compile(self.pattern).search("")
            except re.error as error:
                yield "pattern", f"is not a regular expression ({error})"
            else:
                if empty:
                    yield "pattern", "matches the empty text, and so every document"

    @property
    def kind(self) -> str:
        return next(name for name in _KINDS if getattr(self, name))

    @property
    def sha256(self) -> str:
        """The SHA-256 of the request, which is recorded instead of the request."""
        wanted = " ".join(sorted(self.quarantine)) or getattr(self, self.kind)
        return sha256_bytes(f"{self.kind} {wanted}".encode("utf-8", "surrogatepass"))

    def matcher(self) -> Callable[[dict], bool]:
        """Return a function that checks whether the request matches a row of a corpus part, kept or dropped."""
        if self.doc:
            return lambda row: row["id"] == self.doc
        if self.quarantine:
            return lambda row: row["id"] in self.quarantine
        if self.url:
            wanted = canonical_url(self.url)
            return lambda row: canonical_url(row["url"]) == wanted
        if self.domain:
            host = host_of(self.domain)

            def of_domain(row: dict) -> bool:
                found = domain_of(canonical_url(row["url"]))
                return found == host or found.endswith(f".{host}")

            return of_domain
        search = re.compile(self.pattern).search
        return lambda row: any(search(row.get(name, "")) for name in ("text", "url", "value"))


@dataclass(frozen=True)
class PurgeTarget:
    """A record to remove.

    file: the corpus file that contains the record. row: its line in the file, -1 if it was dropped. lineage: its
    lineage file. before, after: hashes of the extracted and of the kept text. text_bytes: UTF-8 bytes of the kept text.
    """

    id: str
    url: str
    source: str
    stage: str
    rule: str
    before: str
    after: str
    text_bytes: int
    file: str
    row: int
    lineage: str

    @property
    def kept(self) -> bool:
        return not self.rule


@dataclass(frozen=True)
class PurgeTargets:
    """The records to remove, and their copies: dropped records that remain, and that a rebuild could keep."""

    records: tuple[PurgeTarget, ...]
    copies: tuple[PurgeTarget, ...]

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(target.id for target in self.records)


def find_targets(data: Path, request: PurgeRequest, progress: Callable[[float, str], None]) -> PurgeTargets:
    """Return the records that match `request`, and their copies. Raises UsageError for an invalid request."""
    for name, message in request.problems():
        raise UsageError(
            "E-PURGE-REQUEST",
            f"--{name}: {message}" if name != "request" else message,
            rule="a purge has one of --url, --domain, --doc, --pattern and --quarantine",
            fix="correct the command: ingot data purge --help",
            option=name,
        )
    if request.pattern:
        rows = rows_of(data, {row["id"] for row in matching(data / "corpus", request.matcher(), progress)})
    elif request.quarantine:
        rows = rows_of(data, request.quarantine)
    else:
        rows = find(data, doc=request.doc, url=request.url, domain=request.domain)
    records = {row["id"]: _target(row) for row in rows if not is_redacted(row)}
    copies = _copies(data, records)
    while request.copies and copies:  # a copy can have copies of its own
        records |= copies
        copies = _copies(data, records)
    return PurgeTargets(tuple(records.values()), tuple(copies.values()))


def _copies(data: Path, records: dict[str, PurgeTarget]) -> dict[str, PurgeTarget]:
    if not records:
        return {}
    rows = copies_of(data, records.keys(), {row["url_hash"] for row in rows_of(data, records.keys())} - {0})
    return {row["id"]: _target(row) for row in rows}


def _target(row: dict) -> PurgeTarget:
    return PurgeTarget(
        id=row["id"],
        url=row["url"],
        source=row["source"],
        stage=row["stage"],
        rule=row["rule"],
        before=row["before"],
        after=row["after"],
        text_bytes=row["after_bytes"],
        file=part_of(row),
        row=row["row"],
        lineage=Path(row["filename"]).name,
    )


def matching(corpus: Path, matches: Callable[[dict], bool], progress: Callable[[float, str], None]) -> Iterator[dict]:
    """Yield the rows of all parts, kept and dropped, for which `matches` is true. Reads the whole corpus."""
    manifest = load_corpus(corpus)
    parts = (*manifest.parts, *manifest.dropped)
    for number, part in enumerate(parts):
        progress(number / len(parts), part.name)
        yield from (row for row in read_jsonl(corpus / part.name) if matches(row))


def list_entries(request: PurgeRequest, targets: PurgeTargets) -> list[tuple[str, str]]:
    """Return the entries of this purge for purged.txt, as (kind, hex digits)."""
    entries = []
    for target in targets.records:
        entries.append(("document", target.id))
        if canonical := canonical_url(target.url):
            entries.append(("url", redacted_hash(canonical)))
        # Error pages have the same text on many sites, so a purge of a domain lists only the texts of kept documents.
        if target.before and (target.kept or not request.domain):
            entries.append(("text", target.before))
    if request.domain:
        entries.append(("domain", redacted_hash(host_of(request.domain))))
    if request.url:
        entries.append(("url", redacted_hash(canonical_url(request.url))))
    return entries
