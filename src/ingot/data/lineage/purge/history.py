"""The history of purges in a data folder: earlier token layouts, and the list of documents that later builds leave out.

    DIR/purges/FINGERPRINT/manifest.json     the manifest of the token stream before a purge
    DIR/purges/FINGERPRINT/NAME.documents    for every shard that the purge changed, its index before the purge, with
                                             zeros in place of all purged ids
    DIR/purges/FINGERPRINT/next              the fingerprint after the purge
    DIR/purged.txt                           one line `KIND HEX` per entry that a later build has to leave out
    DIR/purges.jsonl                         a record of every purge, without text or URL

Earlier layouts make training steps from before a purge traceable: an index shows the positions of documents, not their
content. The index of a shard that a purge did not change is in the next layout, or in the token folder.

The kinds of entries in purged.txt, which reveal nothing about the content:

    document   the id
    url        BLAKE2b-128 of the canonical URL
    domain     BLAKE2b-128 of the host, which includes its subdomains
    text       XXH3-128 of the extracted text, so that the same text from another page is left out as well
"""

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ingot.data.lineage.purge.journal import Staging
from ingot.data.lineage.records import (
    domain_of,
    text_hash,
)
from ingot.data.sources.url import canonical_url
from ingot.errors import DataError
from ingot.schema.corpus import Document, Drop
from ingot.schema.tokens import DOCUMENT_DTYPE, MANIFEST, Shard, TokenManifest, read_token_manifest
from ingot.storage import sha256_bytes

FOLDER = "purges"
PURGED = "0" * 32  # the id that replaces the id of a purged document
PURGES = "purges.jsonl"
LIST = "purged.txt"
KINDS = ("document", "url", "domain", "text")
STAGE = "purged"
REMOVED = "purged.later"  # the rule of records that a purge took out of a finished folder


@dataclass(frozen=True)
class TokenLayout:
    """The layout of a token stream, now or before a purge.

    folders: the folders to search for an index, in order. current: this is the present layout of the token folder.
    """

    manifest: TokenManifest
    folders: tuple[Path, ...]
    current: bool

    def index(self, shard: Shard) -> np.ndarray:
        """Return the document index (DOCUMENT_DTYPE) of a shard. In an earlier layout, a purged document has the id
        PURGED.

        Raises DataError for a missing or damaged index.
        """
        path = next((p for folder in self.folders if (p := folder / f"{shard.name}.documents").exists()), None)
        if path is None:
            raise DataError(
                "E-SHARD-MISSING",
                f"{self.folders[-1] / shard.name}.documents is missing",
                rule="every shard has a document index",
                fix=f"ingot data verify {self.folders[-1]}",
                path=f"{self.folders[-1] / shard.name}.documents",
            )
        data = path.read_bytes()
        index = np.frombuffer(data, DOCUMENT_DTYPE) if len(data) == 28 * shard.documents else None
        saved = path.parent != self.folders[-1]
        if index is None or (not saved and sha256_bytes(data) != shard.documents_sha256):
            raise DataError(
                "E-SHARD-HASH",
                f"{path} does not have the hash in the manifest",
                rule="every file has the SHA-256 that the build recorded",
                fix=f"ingot data verify {self.folders[-1]}",
                path=str(path),
            )
        return index


def find_layout(tokens: Path, fingerprint: str) -> TokenLayout | None:
    """Return the present or an earlier layout whose fingerprint begins with `fingerprint`; None if there is none.

    tokens: the token folder DIR/tokens/SPLIT.
    """
    now = read_token_manifest(tokens)
    saved = tokens.parent.parent / FOLDER
    folders: list[Path] = []
    current = now.fingerprint()
    if current.startswith(fingerprint):
        return TokenLayout(now, (tokens,), True)
    follows = _successors(saved)
    start = next((name for name in sorted(follows) if name.startswith(fingerprint)), None)
    while start in follows and len(folders) <= len(follows):
        folders.append(saved / start)
        start = follows[start]
    if not folders or start != current:
        return None
    manifest = read_token_manifest(folders[0])
    return TokenLayout(manifest, (*folders, tokens), False) if manifest.fingerprint() == folders[0].name else None


def _successors(saved: Path) -> dict[str, str]:
    """Return, for the fingerprint before each purge, the fingerprint after it."""
    return {path.parent.name: path.read_text(encoding="utf-8").strip() for path in saved.glob("*/next")}


def save_layout(
    data: Path, split: str, fingerprints: tuple[str, str], old: str, gone: Collection[bytes], staging: Staging
) -> None:
    """Stage the layout that a split has before this purge.

    fingerprints: the fingerprints before and after the purge. old: the manifest before the purge, as text. gone: the
    ids of purged documents, as bytes.
    """
    folder = f"{FOLDER}/{fingerprints[0]}"
    staging.write(f"{folder}/{MANIFEST}", old)
    staging.write(f"{folder}/next", fingerprints[1] + "\n")
    for path in sorted((data / "tokens" / split).glob("*.documents")):
        if (blanked := _without(path, gone)) is not None:
            staging.write(f"{folder}/{path.name}", blanked)


def blank_older(data: Path, gone: Collection[bytes], staging: Staging) -> None:
    """Stage the indexes of earlier layouts with zeros in place of the ids `gone`."""
    for path in sorted((data / FOLDER).glob("*/*.documents")):
        if (blanked := _without(path, gone)) is not None:
            staging.write(str(path.relative_to(data)), blanked)


def ids_in_layouts(data: Path, ids: Collection[str]) -> list[Path]:
    """Return the paths of the saved indexes that contain one of `ids`; after a purge there are none."""
    gone = [bytes.fromhex(one) for one in ids]
    return [path for path in sorted((data / FOLDER).glob("*/*.documents")) if _without(path, gone) is not None]


def _without(path: Path, gone: Collection[bytes]) -> bytes | None:
    """Return the content of the index `path` with zeros in place of the ids `gone`; None if it contains none."""
    index = np.fromfile(path, DOCUMENT_DTYPE)
    leaves = np.isin(index["id"].view("S16"), np.array(list(gone), "S16"))
    if not leaves.any():
        return None
    index["id"][leaves] = np.void(bytes(16))
    return index.tobytes()


def read_purges(data: Path) -> list[dict[str, Any]]:
    """Return the records of DIR/purges.jsonl, oldest first."""
    path = data / PURGES
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def redacted_hash(text: str) -> str:
    """Return the hash that purged.txt stores in place of `text`, a URL or a domain."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class PurgedList:
    """The entries of DIR/purged.txt. entries: kind -> hex digits of each entry."""

    entries: dict[str, frozenset[str]] = field(default_factory=lambda: dict.fromkeys(KINDS, frozenset()))

    @classmethod
    def load(cls, data: Path) -> "PurgedList":
        """Read the list of an output folder of `data build`; the list is empty if nothing was purged.

        Raises DataError for a line that is not an entry.
        """
        path = data / LIST
        if not path.exists():
            return cls()
        found: dict[str, set[str]] = {kind: set() for kind in KINDS}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            kind, _, digits = line.partition(" ")
            if kind not in found or len(digits) != 32 or not set(digits) <= set("0123456789abcdef"):
                raise DataError(
                    "E-PURGE-LIST",
                    f"{path}, line {number}: {line[:60]!r} is not an entry",
                    rule="a line is 'document', 'url', 'domain' or 'text' and 32 hex digits",
                    fix="restore the file; without it, purged documents could come back",
                    path=str(path),
                    line=number,
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
        """The content of the file, sorted, so that equal lists give equal bytes."""
        return "".join(f"{kind} {digits}\n" for kind in KINDS for digits in sorted(self.entries[kind]))

    @property
    def sha256(self) -> str:
        """The SHA-256 of the file, which is part of the fingerprint of a build."""
        return sha256_bytes(self.text.encode())

    def __len__(self) -> int:
        return sum(map(len, self.entries.values()))


def is_redacted(row: dict) -> bool:
    """Check whether a row of a corpus part or of the lineage is a purged record without URL and text."""
    return row.get("stage") == STAGE and not row["url"] and not row.get("text")


class Purged:
    """The stage that drops documents on the list of earlier purges, and clears their text, so that no excerpt is kept.

    The stage runs after extraction, before any other stage changes the text.
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
        if canonical and redacted_hash(canonical) in entries["url"]:
            return "purged.url"
        if entries["domain"] and any(redacted_hash(host) in entries["domain"] for host in _hosts(domain_of(canonical))):
            return "purged.domain"
        if document.text and entries["text"] and text_hash(document.text) in entries["text"]:
            return "purged.text"
        return ""


def _hosts(host: str) -> list[str]:
    """Return `host` and all domains that contain it: for a.b.example, these are a.b.example, b.example, example."""
    labels = host.split(".")
    return [".".join(labels[i:]) for i in range(len(labels))] if host else []
