"""How token folders were laid out before each purge, so that steps trained then can still be traced.

    DIR/purges/FINGERPRINT/manifest.json     of the token stream as it was
    DIR/purges/FINGERPRINT/NAME.documents    of every shard that the purge changed: its index then, with zeros in place
                                             of the ids that were purged, then or since

An index tells where documents were, not what was in them. A shard that a purge left alone has its index in the layout
after it, or in the token folder.
"""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ingot.data.lineage.purge.journal import Staging
from ingot.data.lineage.records import domain_of, text_hash
from ingot.data.sources.url import canonical_url
from ingot.errors import DataError
from ingot.schema.document import Document, Drop
from ingot.schema.tokens import DOCUMENT_DTYPE, MANIFEST, Shard, TokenManifest, read_token_manifest
from ingot.storage import sha256_bytes

FOLDER = "purges"
PURGED = "0" * 32  # the id of a document that is gone


@dataclass(frozen=True)
class Layout:
    """A token stream that trains now, or that was there before a purge. folders: where indexes may lie, first to last.

    current: whether it is what the token folder holds.
    """

    manifest: TokenManifest
    folders: tuple[Path, ...]
    current: bool

    def index(self, shard: Shard) -> np.ndarray:
        """The document index (DOCUMENT_DTYPE) of a shard; purged documents have the id PURGED. Raises DataError."""
        path = next((p for folder in self.folders if (p := folder / f"{shard.name}.documents").exists()), None)
        if path is None:
            raise DataError(
                f"{self.folders[-1] / shard.name}.documents cannot be read",
                rule="every shard has a document index",
                fix=f"ingot data verify {self.folders[-1]}",
            )
        data = path.read_bytes()
        index = np.frombuffer(data, DOCUMENT_DTYPE) if len(data) == 28 * shard.documents else None
        saved = path.parent != self.folders[-1]
        if index is None or (not saved and sha256_bytes(data) != shard.documents_sha256):
            raise DataError(
                f"{path} does not have the hash in the manifest", fix=f"ingot data verify {self.folders[-1]}"
            )
        return index


def find_layout(tokens: Path, fingerprint: str) -> Layout | None:
    """The layout of the token folder DIR/tokens/SPLIT whose fingerprint begins so; None if it was never there."""
    now = read_token_manifest(tokens)
    saved = tokens.parent.parent / FOLDER
    folders: list[Path] = []
    current = now.fingerprint()
    if current.startswith(fingerprint):
        return Layout(now, (tokens,), True)
    follows = _successors(saved)
    start = next((name for name in sorted(follows) if name.startswith(fingerprint)), None)
    while start in follows and len(folders) <= len(follows):
        folders.append(saved / start)
        start = follows[start]
    if not folders or start != current:
        return None
    manifest = read_token_manifest(folders[0])
    return Layout(manifest, (*folders, tokens), False) if manifest.fingerprint() == folders[0].name else None


def _successors(saved: Path) -> dict[str, str]:
    """Fingerprint -> the fingerprint that a purge made of it."""
    return {path.parent.name: path.read_text(encoding="utf-8").strip() for path in saved.glob("*/next")}


def save_layout(
    data: Path, split: str, fingerprints: tuple[str, str], old: str, gone: Collection[bytes], staging: Staging
) -> None:
    """Stage the layout of a split before this purge. old: its manifest as text; fingerprints: before and after."""
    folder = f"{FOLDER}/{fingerprints[0]}"
    staging.write(f"{folder}/{MANIFEST}", old)
    staging.write(f"{folder}/next", fingerprints[1] + "\n")
    for path in sorted((data / "tokens" / split).glob("*.documents")):
        if (blanked := _without(path, gone)) is not None:
            staging.write(f"{folder}/{path.name}", blanked)


def blank_older(data: Path, gone: Collection[bytes], staging: Staging) -> None:
    """Stage the indexes of earlier layouts without these ids."""
    for path in sorted((data / FOLDER).glob("*/*.documents")):
        if (blanked := _without(path, gone)) is not None:
            staging.write(str(path.relative_to(data)), blanked)


def ids_in_layouts(data: Path, ids: Collection[str]) -> list[Path]:
    """The saved indexes in which one of these ids stands: after a purge there is none."""
    gone = [bytes.fromhex(one) for one in ids]
    return [path for path in sorted((data / FOLDER).glob("*/*.documents")) if _without(path, gone) is not None]


def _without(path: Path, gone: Collection[bytes]) -> bytes | None:
    """The index with zeros in place of these ids, None if it holds none of them."""
    index = np.fromfile(path, DOCUMENT_DTYPE)
    leaves = np.isin(index["id"].view("S16"), np.array(list(gone), "S16"))
    if not leaves.any():
        return None
    index["id"][leaves] = np.void(bytes(16))
    return index.tobytes()


# What was purged stays out: the list that a later build of the same folder reads, and its stage.
# DIR/purged.txt has a line `KIND HEX` for everything that may not come back, and says nothing about what that was:
#     document   the id
#     url        BLAKE2b-128 of the canonical URL
#     domain     BLAKE2b-128 of the host; it stands for its subdomains too
#     text       XXH3-128 of the text as it was extracted, so that the same text from another page stays out as well


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
