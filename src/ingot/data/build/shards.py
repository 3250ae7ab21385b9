"""Corpus text to token shards (layout: schema/tokens.py), shuffled, split into training and held-out documents.

Parts of the corpus are tokenised one by one (tokenise.py), then every shard is merged from what the parts have in its
range of hashes. Both are tasks: any worker does any of them, in memory that does not grow with the corpus. Split and
order are pure functions of a document's id, so they do not depend on the number of workers, and a document stays in
its split when the corpus grows (unless its source is so small that only the one with the lowest hash is held out).
"""

import json
import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np

from ingot.config import from_dict, to_dict
from ingot.data.build.corpus import MANIFEST as CORPUS_MANIFEST
from ingot.data.build.corpus import load_corpus
from ingot.data.build.tokenise import BUCKET_BITS, BUCKETS, PartWriter, TokenisedPart, heldout
from ingot.data.lineage.table import write_shard_lineage
from ingot.data.lineage.verify import block_digests
from ingot.data.tasks.run import Inline, Runner, Status, describe, run_all
from ingot.data.tasks.task import Context, Store, Task
from ingot.errors import ConfigError, DataError
from ingot.schema.corpus import CorpusManifest
from ingot.schema.tokens import DOCUMENT_DTYPE, MANIFEST, Shard, TokenManifest, read_token_manifest
from ingot.storage import exclusive, fsync_dir, require_free, sha256_bytes, sha256_file, write_atomic, write_json
from ingot.tokenizer.encoder import Encoder

Progress = Callable[[float, str], None]

SPLITS = ("train", "heldout")
SHARD_BYTES = 10**9
_TOKENISE_SHARE = 0.85  # of the time, for the progress bar


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
    shard_bytes: int = SHARD_BYTES,
    block_bytes: int = 1 << 20,
    dtype: str = "auto",
    runner: Runner | None = None,
    progress: Progress | None = None,
) -> tuple[TokenManifest, TokenManifest]:
    """Write out/train, out/heldout and out/tokenizer.json; returns both manifests (train, heldout).

    A document is held out by its id alone; every source gives at least one. dtype: "auto" takes uint16 up to 65,536
    tokens, else uint32. shard_bytes: most that a shard holds, unless one document is larger (or, of sources above
    65,536 shards' worth, one hash bucket is). Finished folders made from the same corpus, tokenizer and options are
    kept as they are; what an interrupted call had done is used by the next.
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
    manifest = load_corpus(corpus)
    text_bytes = sum(part.text_bytes for part in manifest.parts)
    origin = {
        "corpus_sha256": sha256_file(corpus / CORPUS_MANIFEST),
        "vocab_size": encoder.vocab_size,
        "tokenizer_sha256": encoder.sha256,
        "eot_id": encoder.eot_id,
    }
    work, removed = out / ".building", out / ".removed"
    if existing := _finished(out, origin, options):
        for left in (removed, work):  # of a build that stopped behind its last shard
            shutil.rmtree(left, ignore_errors=True)
        return existing
    if sha256_file(tokenizer) != encoder.sha256:
        raise DataError(f"{tokenizer} is not the tokenizer that was loaded", fix="load it again, then build")
    if not manifest.parts:
        raise DataError(f"{corpus} holds no documents", fix="look at what was dropped: ingot data inspect")
    # Tokenised parts and shards stand side by side for a while. English takes a token per 4 bytes, so 2 are ample.
    require_free(out, text_bytes * np.dtype(options.dtype).itemsize, "tokenising the corpus")
    out.mkdir(parents=True, exist_ok=True)
    with exclusive(out, f"building tokens in {out}"):
        shutil.rmtree(removed, ignore_errors=True)
        write_atomic(out / "tokenizer.json", tokenizer.read_bytes())
        store, runner = Store(work / "store"), runner or Inline()
        train, heldout = _build(manifest, corpus, encoder, out, store, runner, origin, options, report)
        for split in SPLITS:
            shutil.rmtree(out / split, ignore_errors=True)  # without a manifest: never finished
            (work / split).rename(out / split)
        work.rename(removed)  # who stops here must not leave half of a store where it counts
        fsync_dir(out)
        shutil.rmtree(removed)
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


def _build(
    manifest: CorpusManifest,
    corpus: Path,
    encoder: Encoder,
    out: Path,
    store: Store,
    runner: Runner,
    origin: dict,
    options: _Options,
    report: Progress,
) -> tuple[TokenManifest, TokenManifest]:
    """Both token folders beside the store, their manifests last."""
    by_source: dict[str, list[Task]] = {}
    for part in sorted(manifest.parts, key=lambda part: (part.source, part.name)):
        arguments = {
            "part": {"name": part.name, "sha256": part.sha256},
            "tokenizer": encoder.sha256,
            "eot": encoder.eot,
            "notice": encoder.notice,
            "dtype": options.dtype,
            "seed": options.seed,
            "heldout_fraction": options.heldout_fraction,
        }
        places = {"part": str(corpus / part.name), "tokenizer": str(out / "tokenizer.json")}
        task = Task(function="ingot.data.build.tokenise:tokenise", arguments=arguments, places=places, label=part.name)
        by_source.setdefault(part.source, []).append(task)
    tasks = [task for tasks in by_source.values() for task in tasks]

    def watch(share: float, doing: str) -> Callable[[Status], None]:
        first = 0.0 if doing == "encoding" else _TOKENISE_SHARE
        return lambda status: report(first + share * status.done / max(status.total, 1), f"{doing}: {describe(status)}")

    run_all(tasks, store, runner, watch(_TOKENISE_SHARE, "encoding"))
    splits: dict[str, list[Task]] = {split: [] for split in SPLITS}
    for source, parts in by_source.items():
        for split, shards in _shard_tasks(source, parts, store, options).items():
            splits[split] += shards
    run_all(
        [task for split in SPLITS for task in splits[split]], store, runner, watch(0.99 - _TOKENISE_SHARE, "shards")
    )
    train, heldout = (
        _assemble(splits[split], split, store, store.root.parent / split, origin, options) for split in SPLITS
    )
    return train, heldout


def _shard_tasks(source: str, parts: Sequence[Task], store: Store, options: _Options) -> dict[str, list[Task]]:
    """Split -> one task per shard of `source` in it: its range of hash buckets."""
    results = [store.result(part) for part in parts]
    documents = sum(result["documents"] for result in results)
    if documents < 2:
        raise DataError(
            f"source {source!r} has only {documents} document",
            rule="every source gives at least one document to training and one to the held-out split",
            fix="give more files for it, relax the rules that dropped the rest (ingot data inspect), or leave it out",
        )
    tokens = np.zeros((2, BUCKETS), np.uint64)
    for part in parts:
        found = np.load(store.folder(part.key) / "histogram.npy")
        tokens[:, found["bucket"]] += found["tokens"].T
    # A source in which no hash is low enough holds out its lowest; one in which all are trains on its highest.
    moved = ""
    if not tokens[1].any():
        moved = min(tuple(result["lowest"][0]) for result in results if result["lowest"])[1]
    elif not tokens[0].any():
        moved = max(tuple(result["highest"][0]) for result in results if result["highest"])[1]
    inputs = (store.group(part.key for part in parts),)
    limit = options.shard_bytes // np.dtype(options.dtype).itemsize
    tasks: dict[str, list[Task]] = {split: [] for split in SPLITS}
    for number, split in enumerate(SPLITS):
        for low, high in _ranges(tokens[number], limit) or [(0, BUCKETS)]:
            name = f"{quote(source, safe='')}-{len(tasks[split]):05d}"
            arguments = {
                "name": name,
                "source": source,
                "heldout": bool(number),
                "moved": moved,
                "buckets": [low, high],
                "dtype": options.dtype,
                "block_bytes": options.block_bytes,
                "heldout_fraction": options.heldout_fraction,
            }
            function, label = "ingot.data.build.shards:write_shard", f"{split}/{name}"
            tasks[split].append(Task(function=function, arguments=arguments, inputs=inputs, label=label))
    return tasks


def _ranges(sizes: np.ndarray, limit: int) -> list[tuple[int, int]]:
    """Ranges of buckets with at most `limit` tokens each, filled from the left; a bucket above it stands alone."""
    ranges: list[tuple[int, int]] = []
    low, held = 0, 0
    for bucket in np.flatnonzero(sizes).tolist():
        size = int(sizes[bucket])
        if held and held + size > limit:
            ranges.append((low, bucket))
            low, held = bucket, 0
        held += size
    return [*ranges, (low, BUCKETS)] if held else ranges


def write_shard(context: Context) -> dict | None:
    """Task: the shard of a range of hash buckets, from all tokenised parts of a source. Returns it as schema Shard.

    What each part has there is copied into scratch files first, part after part, and then put in order: one part is
    open at a time, and memory is 16 bytes per document.
    """
    arguments = context.task.arguments
    dtype = np.dtype(arguments["dtype"]).newbyteorder("<")
    path = context.out / f"{arguments['name']}.tokens"
    scratch = context.out / "scratch"
    scratch.mkdir()
    if not (documents := _collect(context, dtype, scratch)):
        shutil.rmtree(scratch)
        return None
    all_of_it = TokenisedPart(scratch, dtype)
    order = np.argsort(all_of_it.index["order"], kind="stable")
    start = text_bytes = 0
    with path.open("wb") as file, path.with_suffix(".documents").open("wb") as index_file:
        for rows, tokens, _ in all_of_it.taken(order):
            context.at(-1)
            index = np.zeros(len(rows), DOCUMENT_DTYPE)
            index["tokens"], index["id"] = rows["tokens"], rows["id"]
            index["start"] = start + np.cumsum(rows["tokens"], dtype=np.uint64) - rows["tokens"]
            index_file.write(index.tobytes())
            file.write(tokens.tobytes())
            start, text_bytes = start + len(tokens), text_bytes + int(rows["text_bytes"].sum())
    blocks = block_digests(path, arguments["block_bytes"])
    path.with_suffix(".blocks").write_bytes(blocks)
    lineage = write_shard_lineage(path.with_suffix(".lineage.parquet"), _lineage(context, all_of_it, order))
    shutil.rmtree(scratch)
    shard = Shard(
        name=arguments["name"],
        source=arguments["source"],
        tokens=start,
        documents=documents,
        text_bytes=text_bytes,
        blocks_sha256=sha256_bytes(blocks),
        documents_sha256=sha256_file(path.with_suffix(".documents")),
        lineage_sha256=lineage,
    )
    return to_dict(shard)


def _collect(context: Context, dtype: np.dtype, scratch: Path) -> int:
    """The shard's documents in the order of the parts, as one tokenised part. Returns how many."""
    with PartWriter(scratch) as writer:
        for folder in context.folders:
            context.at(-1)
            part = TokenisedPart(folder, dtype)
            for rows, tokens, lines in part.taken(_chosen(part, context.task.arguments)):
                writer.append(rows, tokens, lines)
    return writer.documents


def _chosen(part: TokenisedPart, arguments: dict) -> np.ndarray:
    """Rows of a part that belong to the shard, ascending."""
    low, high = arguments["buckets"]
    order, shift = part.index["order"], 64 - BUCKET_BITS
    # Not numpy's searchsorted, which would read and copy the whole column.
    first = bisect_left(order, np.uint64(low << shift))
    last = bisect_left(order, np.uint64(high << shift)) if high < BUCKETS else len(order)
    entries = part.index[first:last]
    out = heldout(entries["place"], arguments["heldout_fraction"])
    if arguments["moved"]:
        out ^= entries["id"] == np.void(bytes.fromhex(arguments["moved"]))
    return first + np.flatnonzero(out == arguments["heldout"])


def _lineage(context: Context, part: TokenisedPart, order: np.ndarray) -> Iterator[dict]:
    start = 0
    for rows, _, lines in part.taken(order):
        context.at(-1)
        for line, tokens in zip(lines.tobytes().splitlines(), rows["tokens"].tolist(), strict=True):
            yield {"start": start, "tokens": tokens} | json.loads(line)
            start += tokens


def _assemble(
    tasks: Sequence[Task], split: str, store: Store, folder: Path, origin: dict, options: _Options
) -> TokenManifest:
    """The token folder of one split out of finished shards; its manifest comes last."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shards = []
    for task in tasks:
        result = store.result(task)
        if result is None:
            continue
        shards.append(from_dict(Shard, result))
        for path in store.folder(task.key).glob(f"{task.arguments['name']}.*"):
            (folder / path.name).hardlink_to(path)
    manifest = TokenManifest(**origin, **vars(options), split=split, shards=tuple(shards))
    write_json(folder / MANIFEST, to_dict(manifest))
    return manifest
