"""Corpus text to token shards (layout: schema/tokens.py), shuffled, split into training and held-out documents.

Two passes over tokens, never all of them in memory: documents are encoded in corpus order into one spool file per
source, then shards are gathered from the spools in shuffled order. Split and order are pure functions of a document's
id, so they do not depend on the number of workers, and a document stays in its split when the corpus grows (unless
its source is so small that only the one with the lowest hash is held out).
"""

import contextlib
import hashlib
import shutil
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import numpy as np

from ingot.config import to_dict
from ingot.data.corpus import MANIFEST as CORPUS_MANIFEST
from ingot.data.corpus import load_corpus, read_documents
from ingot.data.tokenizer.encoder import Encoder
from ingot.data.tokenizer.parallel import encode_documents
from ingot.data.verify import block_digests
from ingot.errors import ConfigError, DataError
from ingot.rng import derive
from ingot.schema.tokens import DOCUMENT_DTYPE, MANIFEST, Shard, TokenManifest, read_token_manifest
from ingot.storage import (
    atomic_file,
    exclusive,
    fsync_dir,
    require_free,
    sha256_bytes,
    sha256_file,
    write_atomic,
    write_json,
)

Progress = Callable[[float, str], None]

SPLITS = ("train", "heldout")
_GATHER_DOCUMENTS = 1024  # copied to a shard at once


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What, with corpus and tokenizer, decides every byte of the result."""

    dtype: str
    seed: int
    heldout_fraction: float
    shard_bytes: int
    block_bytes: int


def build_shards(
    corpus: Path,
    encoder: Encoder,
    out: Path,
    *,
    tokenizer: Path,
    seed: int = 1234,
    heldout_fraction: float = 0.02,
    shard_bytes: int = 10**9,
    block_bytes: int = 1 << 20,
    dtype: str = "auto",
    workers: int = 1,
    progress: Progress | None = None,
) -> tuple[TokenManifest, TokenManifest]:
    """Write out/train, out/heldout and out/tokenizer.json; returns both manifests (train, heldout).

    A document is held out by its id alone; every source gives at least one. dtype: "auto" takes uint16 up to 65,536
    tokens, else uint32. Finished folders made from the same corpus, tokenizer and options are kept as they are.
    Raises ConfigError, DataError when a source has fewer than two documents, ResourceError when the disk is too small.
    """
    options = _Options(
        dtype=_dtype(dtype, encoder.vocab_size),
        seed=seed,
        heldout_fraction=heldout_fraction,
        shard_bytes=shard_bytes,
        block_bytes=block_bytes,
    )
    _check(options)
    report = progress or (lambda fraction, text: None)
    text_bytes = sum(part.text_bytes for part in load_corpus(corpus).parts)
    origin = {
        "corpus_sha256": sha256_file(corpus / CORPUS_MANIFEST),
        "vocab_size": encoder.vocab_size,
        "tokenizer_sha256": encoder.sha256,
        "eot_id": encoder.eot_id,
    }
    if existing := _finished(out, origin, options):
        return existing
    if sha256_file(tokenizer) != encoder.sha256:
        raise DataError(f"{tokenizer} is not the tokenizer that was loaded", fix="load it again, then build")
    # Spool and shards stand side by side for a while. English takes a token per 4 bytes, so per 2 bytes is ample.
    require_free(out, text_bytes * np.dtype(options.dtype).itemsize, "tokenising the corpus")
    out.mkdir(parents=True, exist_ok=True)
    with _building(out) as work:
        write_atomic(out / "tokenizer.json", tokenizer.read_bytes())
        spools = _spool(corpus, encoder, work, options, workers, text_bytes, report)
        train, heldout = (_write_split(spools, split, work / split, origin, options) for split in SPLITS)
        for split in SPLITS:
            shutil.rmtree(out / split, ignore_errors=True)  # without a manifest: never finished
            (work / split).rename(out / split)
    report(1.0, "token shards written")
    return train, heldout


def _dtype(dtype: str, vocab_size: int) -> str:
    needed = "uint16" if vocab_size <= 1 << 16 else "uint32"
    if dtype not in ("auto", "uint16", "uint32"):
        raise ConfigError(f"dtype = {dtype!r}", rule="tokens are stored as 'uint16' or 'uint32'; 'auto' chooses")
    if dtype == "uint16" and needed == "uint32":
        raise ConfigError(
            f"dtype = 'uint16' with a vocabulary of {vocab_size:,} tokens",
            rule="uint16 holds ids up to 65,535",
            fix="use dtype 'uint32' or 'auto', or a smaller vocabulary",
        )
    return needed if dtype == "auto" else dtype


def _check(options: _Options) -> None:
    if not 0 < options.heldout_fraction < 1:
        raise ConfigError(
            f"heldout_fraction = {options.heldout_fraction}", rule="a share of the documents, between 0 and 1"
        )
    if options.block_bytes < 4096 or options.block_bytes % 4096:
        raise ConfigError(f"block_bytes = {options.block_bytes}", rule="a multiple of 4096, like 1 MiB")
    if options.shard_bytes < options.block_bytes:
        raise ConfigError(
            f"shard_bytes = {options.shard_bytes}", rule=f"at least one block ({options.block_bytes} bytes)"
        )


def _finished(out: Path, origin: dict, options: _Options) -> tuple[TokenManifest, TokenManifest] | None:
    """The manifests in `out` when both splits are there. Raises ConfigError when something else made them."""
    found = [read_token_manifest(out / split) for split in SPLITS if (out / split / MANIFEST).exists()]
    for manifest in found:
        for name, value in (origin | vars(options)).items():
            if getattr(manifest, name) != value:
                raise ConfigError(
                    f"{out} holds finished tokens with {name} = {getattr(manifest, name)}, not {value}",
                    rule="finished tokens are not overwritten: a run may be training on them",
                    fix=f"choose another --out, or remove {out} first",
                )
    return (found[0], found[1]) if len(found) == len(SPLITS) else None


@contextlib.contextmanager
def _building(out: Path) -> Iterator[Path]:
    """A work folder inside `out`, gone afterwards whatever happens. Raises RunBusyError when another build has it."""
    folder = out / ".building"
    with contextlib.ExitStack() as stack:
        stack.enter_context(exclusive(out, f"building tokens in {out}"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)  # of a build that was killed: its lock died with it
        folder.mkdir()
        yield folder
        fsync_dir(out)


@dataclass
class _Spool:
    """All documents of one source as they came: tokens with EOT in `path`; length, bytes and id in memory."""

    source: str
    path: Path
    file: BinaryIO
    tokens: array = field(default_factory=lambda: array("I"))
    text_bytes: array = field(default_factory=lambda: array("Q"))
    ids: bytearray = field(default_factory=bytearray)


def _spool(
    corpus: Path, encoder: Encoder, work: Path, options: _Options, workers: int, text_bytes: int, report: Progress
) -> list[_Spool]:
    """Encode every document of the corpus, in order, into one spool file per source (sorted by source)."""
    dtype = np.dtype(options.dtype).newbyteorder("<")
    spools: dict[str, _Spool] = {}
    eot = np.array([encoder.eot_id], dtype).tobytes()
    done = 0
    with contextlib.ExitStack() as files:
        for source, identity, ids, size in encode_documents(read_documents(corpus), encoder, workers):
            if source not in spools:
                path = work / f"{quote(source, safe='')}.spool"
                spools[source] = _Spool(source, path, files.enter_context(path.open("wb")))
            spool = spools[source]
            spool.file.write(ids.astype(dtype).tobytes() + eot)
            spool.tokens.append(len(ids) + 1)
            spool.text_bytes.append(size)
            spool.ids += bytes.fromhex(identity)
            done += size
            report(0.9 * done / max(text_bytes, 1), f"encoding {source}")
    if not spools:
        raise DataError(f"{corpus} holds no documents", fix="look at what was dropped: ingot data inspect")
    return [spools[source] for source in sorted(spools)]


def _hashes(ids: np.ndarray, purpose: str) -> np.ndarray:
    """A uint64 per document id ([n, 16] uint8), uniform and independent for every purpose."""
    key = purpose.encode()
    digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=8, key=key).digest() for row in ids)
    return np.frombuffer(digests, "<u8")


def _chosen(spool: _Spool, split: str, options: _Options) -> np.ndarray:
    """Numbers of the source's documents in `split`, in shuffled order.

    Held out are the ids whose hash lies in the lowest `heldout_fraction`, and always the lowest one.
    """
    ids = np.frombuffer(bytes(spool.ids), np.uint8).reshape(-1, 16)
    if len(ids) < 2:
        raise DataError(
            f"source {spool.source!r} has only {len(ids)} document",
            rule="every source gives at least one document to training and one to the held-out split",
            fix="give more files for it, relax the rules that dropped the rest (ingot data inspect), or leave it out",
        )
    place = _hashes(ids, "heldout")
    heldout = place < np.uint64(min(int(options.heldout_fraction * 2**64), 2**64 - 1))
    heldout[np.argmin(place)] = True
    if heldout.all():
        heldout[np.argmax(place)] = False
    numbers = np.flatnonzero(heldout if split == "heldout" else ~heldout)
    order = _hashes(ids[numbers], f"shuffle {derive(options.seed, 'shuffle', split)}")
    return numbers[np.argsort(order, kind="stable")]


def _write_split(spools: list[_Spool], split: str, folder: Path, origin: dict, options: _Options) -> TokenManifest:
    """Write the token folder of one split; its manifest comes last."""
    folder.mkdir()
    shards = tuple(shard for spool in spools for shard in _write_source(spool, split, folder, options))
    manifest = TokenManifest(**origin, **vars(options), split=split, shards=shards)
    write_json(folder / MANIFEST, to_dict(manifest))
    return manifest


def _write_source(spool: _Spool, split: str, folder: Path, options: _Options) -> Iterator[Shard]:
    """Write the shards of one source and split. A document never spans shards, so a giant one makes a giant shard."""
    dtype = np.dtype(options.dtype).newbyteorder("<")
    lengths, sizes = np.array(spool.tokens, np.int64), np.array(spool.text_bytes, np.int64)
    starts = np.cumsum(lengths) - lengths
    chosen = _chosen(spool, split, options)
    stream = np.memmap(spool.path, dtype, "r")
    limit = options.shard_bytes // dtype.itemsize
    ends = np.cumsum(lengths[chosen])
    first = number = 0
    while first < len(chosen):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + limit, side="right")), first + 1)
        rows = chosen[first:last]
        name = f"{quote(spool.source, safe='')}-{number:05d}"
        with atomic_file(folder / f"{name}.tokens") as file:
            for at in range(0, len(rows), _GATHER_DOCUMENTS):
                batch = rows[at : at + _GATHER_DOCUMENTS]
                file.write(np.concatenate([stream[starts[r] : starts[r] + lengths[r]] for r in batch]).tobytes())
        index = np.zeros(len(rows), DOCUMENT_DTYPE)
        index["tokens"] = lengths[rows]
        index["start"] = np.cumsum(lengths[rows]) - lengths[rows]
        index["id"] = np.frombuffer(bytes(spool.ids), "V16")[rows]
        blocks = block_digests(folder / f"{name}.tokens", options.block_bytes)
        write_atomic(folder / f"{name}.documents", index.tobytes())
        write_atomic(folder / f"{name}.blocks", blocks)
        yield Shard(
            name=name,
            source=spool.source,
            tokens=int(lengths[rows].sum()),
            documents=len(rows),
            text_bytes=int(sizes[rows].sum()),
            blocks_sha256=sha256_bytes(blocks),
            documents_sha256=sha256_bytes(index.tobytes()),
        )
        first, number = last, number + 1
