"""Is every byte of a token folder what was built? Hashes, ids, document ends, index."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.errors import DataError
from ingot.schema.tokens import DOCUMENT_DTYPE, MANIFEST, Shard, TokenManifest, read_token_manifest
from ingot.storage import sha256_bytes

_FIX = "copy the folder again from its origin, or remove it and build it again (ingot data build)"


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was read and found right."""

    shards: int
    blocks: int
    documents: int
    tokens: int
    bytes: int


def block_digests(path: Path, block_bytes: int) -> bytes:
    """SHA-256 of every `block_bytes` of a file, back to back."""
    with path.open("rb") as file:
        return b"".join(hashlib.sha256(block).digest() for block in iter(lambda: file.read(block_bytes), b""))


def verify_tokens(folder: Path, progress: Callable[[float, str], None] | None = None) -> Verified:
    """Read a whole token folder. Raises one DataError with every damaged file and block: shard, block, byte offset."""
    manifest = read_token_manifest(folder)
    blocks = size = 0
    damage: list[DataError] = []
    for number, shard in enumerate(manifest.shards):
        if progress:
            progress(number / len(manifest.shards), shard.name)
        damage += _shard_damage(folder, shard, manifest)
        shard_bytes = shard.tokens * np.dtype(manifest.dtype).itemsize
        blocks += -(-shard_bytes // manifest.block_bytes)
        size += shard_bytes
    raise_all(damage)
    return Verified(
        shards=len(manifest.shards),
        blocks=blocks,
        documents=sum(s.documents for s in manifest.shards),
        tokens=manifest.tokens,
        bytes=size,
    )


def _shard_damage(folder: Path, shard: Shard, manifest: TokenManifest) -> Iterator[DataError]:
    """All that is wrong with the files of a shard; what one of them hides is not guessed."""
    index = digests = None
    try:
        index = _index(folder, shard)
    except DataError as error:
        yield error
    try:
        digests = _read(folder, f"{shard.name}.blocks", shard.blocks_sha256)
    except DataError as error:
        yield error
    if shard.lineage_sha256:
        try:
            _read(folder, f"{shard.name}.lineage.parquet", shard.lineage_sha256)
        except DataError as error:
            yield error
    yield from _block_damage(folder, shard, manifest, index, digests)


def _read(folder: Path, name: str, sha256: str) -> bytes:
    try:
        data = (folder / name).read_bytes()
    except FileNotFoundError:
        raise _missing(folder / name) from None
    except OSError as error:
        raise DataError(f"{folder / name} cannot be read ({error.strerror})", fix=_FIX) from None
    if sha256_bytes(data) != sha256:
        raise DataError(f"{folder / name} does not have the hash in the manifest", fix=_FIX)
    return data


def _missing(path: Path) -> DataError:
    return DataError(f"{path} is missing", rule=f"every shard named in {MANIFEST} has its files", fix=_FIX)


def _index(folder: Path, shard: Shard) -> np.ndarray:
    """The document index, checked: documents lie back to back and fill the shard."""
    data = _read(folder, f"{shard.name}.documents", shard.documents_sha256)
    dtype = np.dtype(DOCUMENT_DTYPE)
    index = np.frombuffer(data, dtype) if len(data) == shard.documents * dtype.itemsize else np.empty(0, dtype)
    ends = np.cumsum(index["tokens"].astype(np.int64))
    if not len(index) or ends[-1] != shard.tokens or (index["start"] != ends - index["tokens"]).any():
        raise DataError(
            f"{folder / shard.name}.documents does not fit its shard",
            rule=f"{shard.documents} documents lie back to back over {shard.tokens} tokens",
            fix=_FIX,
        )
    return index


def _block_damage(
    folder: Path, shard: Shard, manifest: TokenManifest, index: np.ndarray | None, digests: bytes | None
) -> Iterator[DataError]:
    """An error for every damaged block. Without `digests` or `index` (damaged themselves) their checks are left out."""
    path, dtype = folder / f"{shard.name}.tokens", np.dtype(manifest.dtype).newbyteorder("<")
    if not path.exists():
        yield _missing(path)
        return
    expected = shard.tokens * dtype.itemsize
    if (size := path.stat().st_size) != expected:
        yield DataError(
            f"{path} has {size:,} bytes, not {expected:,}",
            rule=f"the manifest says {shard.tokens:,} tokens of {manifest.dtype}",
            fix=_FIX,
        )
        return
    document_ends = None if index is None else (index["start"] + index["tokens"] - 1).astype(np.int64)
    at = number = 0  # byte offset, block
    with path.open("rb") as file:
        while block := file.read(manifest.block_bytes):
            place = f"{path}, block {number} (bytes {at:,} to {at + len(block):,})"
            if digests is not None and hashlib.sha256(block).digest() != digests[32 * number : 32 * number + 32]:
                yield DataError(f"{place}: SHA-256 differs from the one written at build", fix=_FIX)
            elif error := _wrong_ids(place, np.frombuffer(block, dtype), at, manifest, document_ends):
                yield error
            at, number = at + len(block), number + 1


def _wrong_ids(
    place: str, tokens: np.ndarray, at: int, manifest: TokenManifest, document_ends: np.ndarray | None
) -> DataError | None:
    """What no build writes into a block that begins at byte `at`."""
    if (high := int(tokens.max())) >= manifest.vocab_size:
        offset = at + int(np.argmax(tokens)) * tokens.itemsize
        rule = f"ids are below vocab_size = {manifest.vocab_size}"
        return DataError(f"{place}: token {high} at byte {offset:,}", rule=rule, fix=_FIX)
    if document_ends is None:
        return None
    first = at // tokens.itemsize
    low, stop = np.searchsorted(document_ends, (first, first + len(tokens)))
    if np.array_equal(np.flatnonzero(tokens == manifest.eot_id) + first, document_ends[low:stop]):
        return None
    return DataError(
        f"{place}: end-of-text tokens are not where documents end",
        rule=f"token {manifest.eot_id} ends every document and stands nowhere else",
        fix=_FIX,
    )


# Many damaged places, told in one error.


LISTED = 20  # places that are named one by one


class Damaged(DataError):
    """Several `places` at once."""

    places: tuple[DataError, ...] = ()


def raise_all(damage: Iterable[DataError]) -> None:
    """Raise one DataError that lists every place in `damage` (the first 20, and a count); nothing when there is none.

    A single one is raised as it is. Of several, each rule and each way out is told once.
    """
    places = [place for one in damage for place in (one.places if isinstance(one, Damaged) else (one,))]
    found = list({place.found: place for place in places}.values())  # two checks may meet the same damage
    if len(found) == 1:
        raise found[0]
    if not found:
        return
    listed = [f"  {one.found}" for one in found[:LISTED]]
    if len(found) > LISTED:
        listed.append(f"  and {len(found) - LISTED:,} more")
    error = Damaged(
        "\n".join([f"{len(found):,} places are damaged:", *listed]),
        rule="; ".join(dict.fromkeys(one.rule for one in found[:LISTED] if one.rule)),
        fix="; ".join(dict.fromkeys(one.fix for one in found[:LISTED] if one.fix)),
    )
    error.places = tuple(found)
    raise error
