"""Leave out the documents of quarantine lists (schema/quarantine.py): by their id, their URL or their text.

The URL finds the same page in another crawl, the text the same text on another page. A list decides by these and by its
reasons: who found a document, and when, changes nothing in a corpus.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

from ingot.data.lineage.records import text_hash
from ingot.data.sources.url import canonical_url
from ingot.schema.corpus import Document, Drop
from ingot.schema.quarantine import read_quarantine
from ingot.storage import canonical_json, sha256_bytes


@dataclass(frozen=True, kw_only=True)
class QuarantineRules:
    """Settings of the stage. files: quarantine lists; none: the stage does not run."""

    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuarantinedNames:
    """The reasons of what is left out, by id, by canonical URL, and by the hash of the text as it was extracted."""

    documents: dict[str, str]
    urls: dict[str, str]
    texts: dict[str, str]

    @property
    def sha256(self) -> str:
        """The hash of all that decides, in an order of its own."""
        return sha256_bytes(canonical_json([self.documents, self.urls, self.texts]).encode())


@functools.lru_cache(maxsize=4)
def _read(files: tuple[str, ...], stamps: tuple[int, ...]) -> QuarantinedNames:
    names = QuarantinedNames({}, {}, {})
    for entry in (entry for file in files for entry in read_quarantine(Path(file))):
        names.documents.setdefault(entry.document, entry.reason)
        if url := canonical_url(entry.url):
            names.urls.setdefault(url, entry.reason)
        if entry.text:
            names.texts.setdefault(entry.text, entry.reason)
    return names


def quarantined_names(rules: QuarantineRules) -> QuarantinedNames:
    """Read the lists. Raises DataMissing without one, DataError for a damaged one."""
    stamps = tuple(path.stat().st_mtime_ns if (path := Path(file)).exists() else 0 for file in rules.files)
    return _read(rules.files, stamps)


class QuarantineStage:
    """Stage with a rule for each reason of the lists: quarantine.mojibake, quarantine.repeated_text, and so on."""

    name = "quarantine"

    def __init__(self, rules: QuarantineRules):
        self._names = quarantined_names(rules)
        lists = f"{len(rules.files)} list" + ("s" if len(rules.files) > 1 else "")
        self.ran = f"{len(self._names.documents):,} documents of {lists}"

    def __call__(self, document: Document) -> Drop | None:
        by = (
            ("document", self._names.documents, document.id),
            ("URL", self._names.urls, canonical_url(document.url)),
            ("text", self._names.texts, text_hash(document.text)),
        )
        for what, reasons, key in by:
            if reason := reasons.get(key):
                return Drop(self.name, f"{self.name}.{reason}", f"its {what} is on a list")
        return None
