"""What is to be purged: the request, and the records that it means."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ingot.data.build.corpus import load_corpus, read_jsonl
from ingot.data.lineage.purge.history import is_struck, secret
from ingot.data.lineage.records import copies_of, domain_of, find, host_of, part_of, rows_of
from ingot.data.sources.url import canonical_url
from ingot.errors import UsageError
from ingot.storage import sha256_bytes


@dataclass(frozen=True, kw_only=True)
class Request:
    """Exactly one of: url (any spelling of it), domain (with subdomains), doc (id), pattern (a regular expression, as
    Python's `re.search`, on kept texts, on the excerpts of dropped ones, on URLs, and on what rules found).

    copies: also what was dropped as a copy of what is purged.
    """

    url: str = ""
    domain: str = ""
    doc: str = ""
    pattern: str = ""
    copies: bool = False

    def problems(self) -> Iterator[tuple[str, str]]:
        given = [name for name in ("url", "domain", "doc", "pattern") if getattr(self, name)]
        if len(given) != 1:
            yield (
                "request",
                f"exactly one of url, domain, doc and pattern is given, not {' and '.join(given) or 'none'}",
            )
        if self.doc and not re.fullmatch("[0-9a-f]{32}", self.doc):
            yield "doc", f"{self.doc!r} is not a whole document id of 32 hex digits (ingot data trace shows it)"
        if self.pattern:
            try:
                empty = re.compile(self.pattern).search("")
            except re.error as error:
                yield "pattern", f"is no regular expression ({error})"
            else:
                if empty:
                    yield "pattern", "matches the empty text, so every document"

    @property
    def kind(self) -> str:
        return next(name for name in ("url", "domain", "doc", "pattern") if getattr(self, name))

    @property
    def sha256(self) -> str:
        """Of what was asked for, which is not written down itself."""
        return sha256_bytes(f"{self.kind} {getattr(self, self.kind)}".encode("utf-8", "surrogatepass"))

    def matcher(self) -> Callable[[dict], bool]:
        """row of a corpus or dropped part -> whether the request means it."""
        if self.doc:
            return lambda row: row["id"] == self.doc
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
class Target:
    """A record to remove. file: of the corpus, that holds it; row: its line if it was kept; lineage: its lineage file.

    before, after: hashes of the text as extracted and as kept; text_bytes: UTF-8 bytes of the kept text.
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
class Targets:
    """records: to remove. copies: what was dropped in favour of them and stays: a rebuild could bring it back."""

    records: tuple[Target, ...]
    copies: tuple[Target, ...]

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(target.id for target in self.records)


def find_targets(data: Path, request: Request, progress: Callable[[float, str], None]) -> Targets:
    """The records that `request` means. Raises UsageError for a request that breaks a rule."""
    for name, message in request.problems():
        raise UsageError(f"--{name}: {message}" if name != "request" else message)
    if request.pattern:
        rows = rows_of(data, {row["id"] for row in matching(data / "corpus", request.matcher(), progress)})
    else:
        rows = find(data, doc=request.doc, url=request.url, domain=request.domain)
    records = {row["id"]: _target(row) for row in rows if not is_struck(row)}
    copies = _copies(data, records)
    while request.copies and copies:  # a copy can have copies of its own
        records |= copies
        copies = _copies(data, records)
    return Targets(tuple(records.values()), tuple(copies.values()))


def _copies(data: Path, records: dict[str, Target]) -> dict[str, Target]:
    if not records:
        return {}
    rows = copies_of(data, records.keys(), {row["url_hash"] for row in rows_of(data, records.keys())} - {0})
    return {row["id"]: _target(row) for row in rows}


def _target(row: dict) -> Target:
    return Target(
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
    """The rows of all kept and dropped parts that match. Reads the whole corpus."""
    manifest = load_corpus(corpus)
    parts = (*manifest.parts, *manifest.dropped)
    for number, part in enumerate(parts):
        progress(number / len(parts), part.name)
        yield from (row for row in read_jsonl(corpus / part.name) if matches(row))


def list_entries(request: Request, targets: Targets) -> list[tuple[str, str]]:
    """What purged.txt has to say after this purge, as (kind, hex digits)."""
    entries = []
    for target in targets.records:
        entries.append(("document", target.id))
        if canonical := canonical_url(target.url):
            entries.append(("url", secret(canonical)))
        # A site's error pages have the text of everybody's: a domain takes only what was kept along.
        if target.before and (target.kept or not request.domain):
            entries.append(("text", target.before))
    if request.domain:
        entries.append(("domain", secret(host_of(request.domain))))
    if request.url:
        entries.append(("url", secret(canonical_url(request.url))))
    return entries
