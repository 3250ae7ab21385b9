"""The verification of a token folder: hashes, token ids, document ends, index. One error lists all damage."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.errors import DataError
from ingot.schema.tokens import DOCUMENT_DTYPE, MANIFEST, Shard, TokenManifest, read_token_manifest
from ingot.storage import sha256_bytes

_FIX = "copy the folder again from its origin, or remove it and build it again (ingot data build)"
_SAME_HASH = "every file has the SHA-256 that the build recorded"
LISTED = 20  # maximum number of damaged places that one error lists


class Damaged(DataError):
    """An error for several damaged places. places: one error per place."""

    places: tuple[DataError, ...] = ()


def raise_all(damage: Iterable[DataError]) -> None:
    """Raise one DataError that lists the first 20 errors in `damage` and counts the others; return if there are none.

    A single error is raised unchanged. The error for several places gives each rule and each fix once.
    """
    places = [place for one in damage for place in (one.places if isinstance(one, Damaged) else (one,))]
    found = list({place.found: place for place in places}.values())  # two checks may find the same damage
    if len(found) == 1:
        raise found[0]
    if not found:
        return
    listed = [f"  {one.found}" for one in found[:LISTED]]
    if len(found) > LISTED:
        listed.append(f"  and {len(found) - LISTED:,} more")
    error = Damaged(
        "E-DATA-DAMAGED",
        "\n".join([f"{len(found):,} places are damaged:", *listed]),
        rule="; ".join(dict.fromkeys(one.rule for one in found[:LISTED] if one.rule)),
        fix="; ".join(dict.fromkeys(one.fix for one in found[:LISTED] if one.fix)),
        places=len(found),
        codes=sorted({one.code for one in found}),
        damage=[{"code": one.code} | one.facts for one in found[:LISTED]],
    )
    error.places = tuple(found)
    raise error


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The counts of a token folder that was read and is correct."""

    shards: int
    blocks: int
    documents: int
    tokens: int
    bytes: int


def block_digests(path: Path, block_bytes: int) -> bytes:
    """Return the concatenated SHA-256 digests of the blocks of a file; every block but the last has `block_bytes`."""
    with path.open("rb") as file:
        return b"".join(hashlib.sha256(block).digest() for block in iter(lambda: file.read(block_bytes), b""))


def verify_tokens(folder: Path, progress: Callable[[float, str], None] | None = None) -> Verified:
    """Read a whole token folder. Raises one DataError that lists every damaged file and block."""
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
    """Yield an error for every damaged file and block of a shard. Checks that need a damaged file are skipped."""
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
        raise DataError(
            "E-SHARD-UNREADABLE",
            f"{folder / name} cannot be read ({error.strerror})",
            rule=f"every shard named in {MANIFEST} has readable files",
            fix=_FIX,
            path=str(folder / name),
        ) from None
    if sha256_bytes(data) != sha256:
        raise DataError(
            "E-SHARD-HASH",
            f"{folder / name} does not have the hash in the manifest",
            rule=_SAME_HASH,
            fix=_FIX,
            path=str(folder / name),
        )
    return data


def _missing(path: Path) -> DataError:
    return DataError(
        "E-SHARD-MISSING",
        f"{path} is missing",
        rule=f"every shard named in {MANIFEST} has its files",
        fix=_FIX,
        path=str(path),
    )


def _index(folder: Path, shard: Shard) -> np.ndarray:
    """Return the document index of a shard. Raises DataError unless its documents fill the shard without gaps."""
    data = _read(folder, f"{shard.name}.documents", shard.documents_sha256)
    dtype = np.dtype(DOCUMENT_DTYPE)
    index = np.frombuffer(data, dtype) if len(data) == shard.documents * dtype.itemsize else np.empty(0, dtype)
    ends = np.cumsum(index["tokens"].astype(np.int64))
    if not len(index) or ends[-1] != shard.tokens or (index["start"] != ends - index["tokens"]).any():
        raise DataError(
            "E-SHARD-INDEX",
            f"{folder / shard.name}.documents does not match its shard",
            rule=f"{shard.documents} documents follow each other without gaps over {shard.tokens} tokens",
            fix=_FIX,
            path=f"{folder / shard.name}.documents",
        )
    return index


def _block_damage(
    folder: Path, shard: Shard, manifest: TokenManifest, index: np.ndarray | None, digests: bytes | None
) -> Iterator[DataError]:
    """Yield an error for every damaged block. Checks that need `digests` or `index` are skipped if it is None."""
    path, dtype = folder / f"{shard.name}.tokens", np.dtype(manifest.dtype).newbyteorder("<")
    if not path.exists():
        yield _missing(path)
        return
    expected = shard.tokens * dtype.itemsize
    if (size := path.stat().st_size) != expected:
        yield DataError(
            "E-SHARD-SIZE",
            f"{path} has {size:,} bytes, not {expected:,}",
            rule=f"the manifest lists {shard.tokens:,} tokens of {manifest.dtype}",
            fix=_FIX,
            path=str(path),
            bytes=size,
            expected_bytes=expected,
        )
        return
    document_ends = None if index is None else (index["start"] + index["tokens"] - 1).astype(np.int64)
    at = number = 0  # byte offset, block
    with path.open("rb") as file:
        while block := file.read(manifest.block_bytes):
            place = f"{path}, block {number} (bytes {at:,} to {at + len(block):,})"
            if digests is not None and hashlib.sha256(block).digest() != digests[32 * number : 32 * number + 32]:
                yield DataError(
                    "E-SHARD-HASH",
                    f"{place}: the SHA-256 differs from that of the build",
                    rule=_SAME_HASH,
                    fix=_FIX,
                    path=str(path),
                    block=number,
                )
            elif error := _wrong_ids(path, place, np.frombuffer(block, dtype), at, manifest, document_ends):
                yield error
            at, number = at + len(block), number + 1


def _wrong_ids(
    path: Path, place: str, tokens: np.ndarray, at: int, manifest: TokenManifest, document_ends: np.ndarray | None
) -> DataError | None:
    """Return the error if token ids or document ends are wrong in the block at byte `at`, None if it is correct."""
    if (high := int(tokens.max())) >= manifest.vocab_size:
        offset = at + int(np.argmax(tokens)) * tokens.itemsize
        return DataError(
            "E-SHARD-TOKEN-ID",
            f"{place}: token id {high} at byte {offset:,}",
            rule=f"token ids are below vocab_size = {manifest.vocab_size}",
            fix=_FIX,
            path=str(path),
            block=at // manifest.block_bytes,
            token=high,
            byte=offset,
        )
    if document_ends is None:
        return None
    first = at // tokens.itemsize
    low, stop = np.searchsorted(document_ends, (first, first + len(tokens)))
    if np.array_equal(np.flatnonzero(tokens == manifest.eot_id) + first, document_ends[low:stop]):
        return None
    return DataError(
        "E-SHARD-DOCUMENT-END",
        f"{place}: end-of-text tokens are not where documents end",
        rule=f"token {manifest.eot_id} ends every document and occurs nowhere else",
        fix=_FIX,
        path=str(path),
        block=at // manifest.block_bytes,
    )
