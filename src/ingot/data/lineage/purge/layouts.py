"""How token folders were laid out before each purge, so that steps trained then can still be traced.

    DIR/purges/FINGERPRINT/manifest.json     of the token stream as it was
    DIR/purges/FINGERPRINT/NAME.documents    of every shard that the purge changed: its index then, with zeros in place
                                             of the ids that were purged, then or since

An index tells where documents were, not what was in them. A shard that a purge left alone has its index in the layout
after it, or in the token folder.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.data.lineage.purge.journal import Staging
from ingot.errors import DataError
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
