"""What was purged stays out: the list that a later build of the same folder reads, and its stage.

DIR/purged.txt has a line `KIND HEX` for everything that may not come back, and says nothing about what that was:

    document   the id
    url        BLAKE2b-128 of the canonical URL
    domain     BLAKE2b-128 of the host; it stands for its subdomains too
    text       XXH3-128 of the text as it was extracted, so that the same text from another page stays out as well
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ingot.data.lineage.table import domain_of, text_hash
from ingot.data.sources.url import canonical_url
from ingot.errors import DataError
from ingot.schema.document import Document, Drop
from ingot.storage import sha256_bytes

LIST = "purged.txt"
KINDS = ("document", "url", "domain", "text")
STAGE = "purged"
REMOVED = "purged.later"  # the rule of records that a purge took out of a finished folder


def secret(text: str) -> str:
    """The hash that stands for a URL or a domain in the list."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class PurgedList:
    """The entries of DIR/purged.txt: kind -> hex digits."""

    entries: dict[str, frozenset[str]] = field(default_factory=lambda: dict.fromkeys(KINDS, frozenset()))

    @classmethod
    def load(cls, data: Path) -> "PurgedList":
        """The list of a folder of `data build --out`; an empty one if nothing was purged. Raises DataError."""
        path = data / LIST
        if not path.exists():
            return cls()
        found: dict[str, set[str]] = {kind: set() for kind in KINDS}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            kind, _, digits = line.partition(" ")
            if kind not in found or len(digits) != 32 or not set(digits) <= set("0123456789abcdef"):
                raise DataError(
                    f"{path}, line {number}: {line[:60]!r} is no entry",
                    rule="a line is 'document', 'url', 'domain' or 'text' and 32 hex digits",
                    fix="restore the file: without it, what was purged could come back",
                )
            found[kind].add(digits)
        return cls({kind: frozenset(digits) for kind, digits in found.items()})

    def with_entries(self, new: Iterable[tuple[str, str]]) -> "PurgedList":
        entries = {kind: set(digits) for kind, digits in self.entries.items()}
        for kind, digits in new:
            entries[kind].add(digits)
        return PurgedList({kind: frozenset(digits) for kind, digits in entries.items()})

    @property
    def text(self) -> str:
        """The file, sorted: equal lists, equal bytes."""
        return "".join(f"{kind} {digits}\n" for kind in KINDS for digits in sorted(self.entries[kind]))

    @property
    def sha256(self) -> str:
        """Of the file; part of what decides a build."""
        return sha256_bytes(self.text.encode())

    def __len__(self) -> int:
        return sum(map(len, self.entries.values()))


def is_struck(row: dict) -> bool:
    """Whether a row of a corpus part or of lineage stands for a record that a build left out, and tells nothing of it
    but where it lies in the crawl."""
    return row.get("stage") == STAGE and not row["url"] and not row.get("text")


class Purged:
    """Drops what was purged from this folder before, and empties its text: an excerpt of it would be kept else.

    Runs after extraction, before anything changes the text.
    """

    name = STAGE

    def __init__(self, listed: PurgedList):
        self._listed = listed
        self.ran = f"{len(listed):,} entries of {LIST}"

    def __call__(self, document: Document) -> Drop | None:
        rule = self._rule(document)
        if not rule:
            return None
        document.text = ""
        return Drop(self.name, rule)

    def _rule(self, document: Document) -> str:
        entries = self._listed.entries
        if document.id in entries["document"]:
            return "purged.document"
        canonical = canonical_url(document.url)
        if canonical and secret(canonical) in entries["url"]:
            return "purged.url"
        if entries["domain"] and any(secret(host) in entries["domain"] for host in _hosts(domain_of(canonical))):
            return "purged.domain"
        if document.text and entries["text"] and text_hash(document.text) in entries["text"]:
            return "purged.text"
        return ""


def _hosts(host: str) -> list[str]:
    """`host` and the domains above it: a.b.example -> a.b.example, b.example, example."""
    labels = host.split(".")
    return [".".join(labels[i:]) for i in range(len(labels))] if host else []
