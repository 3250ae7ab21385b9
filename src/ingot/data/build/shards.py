"""Build token shards (layout: schema/tokens.py) from a corpus: shuffled, split into training and held-out documents.

Each file of the corpus is tokenized in one task (tokenize.py). Then each shard is merged in one task (write_shard.py),
from the documents of all files in the shard's range of hashes. The memory of a task does not grow with the corpus.
Split and order are pure functions of a document's id, so they do not depend on the number of workers, and a document
stays in its split when the corpus grows (unless its source is so small that one document has to be moved).
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np

from ingot.config import to_dict
from ingot.data.build.corpus import MANIFEST as CORPUS_MANIFEST
from ingot.data.build.corpus import load_corpus
from ingot.data.build.tokenize import (
    BUCKETS,
    Tokenize,
    TokenizedPart,
    tokenize,
)
from ingot.data.build.write_shard import WriteShard, write_shard
from ingot.data.tasks.run import Inline, PhaseStatus, ReportProgress, Runner, describe, run_all
from ingot.data.tasks.store import Store, open_store
from ingot.data.tasks.task import Task
from ingot.errors import ConfigError, DataError
from ingot.schema.corpus import CorpusManifest
from ingot.schema.tokens import MANIFEST, Shard, TokenManifest, read_token_manifest
from ingot.storage import exclusive, fsync_dir, require_free, sha256_file, write_atomic, write_json
from ingot.tokenizer.encoder import Encoder

SPLITS = ("train", "heldout")
SHARD_BYTES = 10**9
_TOKENIZE_SHARE = 0.85  # share of the time, for the progress bar


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The settings that decide every byte of the token folders, besides corpus and tokenizer."""

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
    progress: ReportProgress | None = None,
) -> tuple[TokenManifest, TokenManifest]:
    """Write out/train, out/heldout and out/tokenizer.json. Return both manifests (train, heldout).

    The id of a document decides whether it is held out; every source holds out at least one document. dtype: "auto" is
    uint16 for a vocabulary of up to 65,536 tokens, else uint32. shard_bytes: the largest size of a shard, unless one of
    the 65,536 ranges of hashes has more tokens. Finished folders of the same corpus, tokenizer and options are kept as
    they are. The next call continues an interrupted one.
    Raises ConfigError; DataError if a source has fewer than two documents; ResourceError if the disk is too small.
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
        for left in (removed, work):  # files of a build that was stopped after its last shard
            shutil.rmtree(left, ignore_errors=True)
        return existing
    if sha256_file(tokenizer) != encoder.sha256:
        raise DataError(
            "E-TOKENIZER-CHANGED",
            f"{tokenizer} is not the tokenizer that was loaded",
            rule="the tokenizer file stays as it is during a build",
            fix="run the same command again",
            path=str(tokenizer),
        )
    if not manifest.parts:
        raise DataError(
            "E-CORPUS-EMPTY",
            f"{corpus} holds no documents",
            rule="a corpus holds at least one document",
            fix=f"see the dropped documents: ingot data inspect {corpus}",
            path=str(corpus),
        )
    # Tokenized files and shards are on disk together for a while. English has 4 bytes per token: this is twice enough.
    require_free(out, text_bytes * np.dtype(options.dtype).itemsize, "tokenizing the corpus")
    out.mkdir(parents=True, exist_ok=True)
    with exclusive(out, f"building tokens in {out}"):
        shutil.rmtree(removed, ignore_errors=True)
        write_atomic(out / "tokenizer.json", tokenizer.read_bytes())
        store, runner = open_store(work / "store"), runner or Inline()
        train, heldout = _build(manifest, corpus, encoder, out, store, runner, origin, options, report)
        for split in SPLITS:
            shutil.rmtree(out / split, ignore_errors=True)  # a folder without manifest, which was never finished
            (work / split).rename(out / split)
        work.rename(removed)  # before it is removed: a process that is killed here must not leave half of a store
        fsync_dir(out)
        shutil.rmtree(removed)
    report(1.0, "token shards written")
    return train, heldout


def _dtype(dtype: str, vocab_size: int) -> str:
    needed = "uint16" if vocab_size <= 1 << 16 else "uint32"
    if dtype not in ("auto", "uint16", "uint32") or (dtype == "uint16" and needed == "uint32"):
        raise ConfigError(
            "E-TOKENS-DTYPE",
            f"dtype = {dtype!r} with a vocabulary of {vocab_size:,} tokens",
            rule="tokens are stored as 'uint16' (ids up to 65,535) or 'uint32'",
            fix="use dtype 'auto'",
            dtype=dtype,
            vocab_size=vocab_size,
        )
    return needed if dtype == "auto" else dtype


def _check(options: _Options) -> None:
    """Raise ConfigError if an option is out of its range."""
    for name, fine, rule in (
        ("heldout_fraction", 0 < options.heldout_fraction < 1, "a share of the documents, between 0 and 1"),
        ("block_bytes", options.block_bytes >= 4096 and not options.block_bytes % 4096, "a multiple of 4096"),
        ("shard_bytes", options.shard_bytes >= options.block_bytes, "at least block_bytes"),
    ):
        if not fine:
            value = getattr(options, name)
            text = f"{name} = {value}"
            raise ConfigError("E-TOKENS-OPTION", text, rule=rule, fix="choose another value", option=name, value=value)


def _finished(out: Path, origin: dict, options: _Options) -> tuple[TokenManifest, TokenManifest] | None:
    """Return the manifests in `out`, None unless both splits are there. Raises ConfigError if their settings differ."""
    found = [read_token_manifest(out / split) for split in SPLITS if (out / split / MANIFEST).exists()]
    for manifest in found:
        for name, value in (origin | vars(options)).items():
            if getattr(manifest, name) != value:
                raise ConfigError(
                    "E-TOKENS-FINISHED",
                    f"{out} holds finished tokens with {name} = {getattr(manifest, name)}, not {value}",
                    rule="finished tokens are not overwritten: a run may be training on them",
                    fix=f"choose another --out, or remove {out} first",
                    path=str(out),
                    setting=name,
                    found=getattr(manifest, name),
                    expected=value,
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
    report: ReportProgress,
) -> tuple[TokenManifest, TokenManifest]:
    """Write both token folders next to the store, each manifest last."""
    by_source: dict[str, list[Task[TokenizedPart]]] = {}
    for part in sorted(manifest.parts, key=lambda part: (part.source, part.name)):
        specification = Tokenize(
            name=part.name,
            sha256=part.sha256,
            tokenizer_sha256=encoder.sha256,
            eot=encoder.eot,
            notice=encoder.notice,
            dtype=options.dtype,
            seed=options.seed,
            heldout_fraction=options.heldout_fraction,
            path=corpus / part.name,
            tokenizer=out / "tokenizer.json",
        )
        by_source.setdefault(part.source, []).append(tokenize.task(specification, part.name))
    tasks = [task for tasks in by_source.values() for task in tasks]

    def watch(share: float, doing: str) -> Callable[[PhaseStatus], None]:
        first = 0.0 if doing == "encoding" else _TOKENIZE_SHARE
        return lambda status: report(first + share * status.done / max(status.total, 1), f"{doing}: {describe(status)}")

    run_all(tasks, store, runner, watch(_TOKENIZE_SHARE, "encoding"))
    splits: dict[str, list[Task[Shard | None]]] = {split: [] for split in SPLITS}
    for source, parts in by_source.items():
        for split, shards in _shard_tasks(source, parts, store, options).items():
            splits[split] += shards
    run_all(
        [task for split in SPLITS for task in splits[split]], store, runner, watch(0.99 - _TOKENIZE_SHARE, "shards")
    )
    train, heldout = (_assemble(splits[split], split, store, origin, options) for split in SPLITS)
    return train, heldout


def _shard_tasks(
    source: str, parts: Sequence[Task[TokenizedPart]], store: Store, options: _Options
) -> dict[str, list[Task[Shard | None]]]:
    """Return split -> one task per shard of `source` in that split, each for a range of hash buckets."""
    results = [store.result(part) for part in parts]
    documents = sum(result.documents for result in results)
    if documents < 2:
        raise DataError(
            "E-SOURCE-SMALL",
            f"source {source!r} has only {documents} document",
            rule="every source gives at least one document to training and one to the held-out split",
            fix="give more files for it, relax the rules that dropped the rest (ingot data inspect), or leave it out",
            source=source,
            documents=documents,
        )
    tokens = np.zeros((2, BUCKETS), np.uint64)
    for part in parts:
        found = np.load(store.folder(part) / "histogram.npy")
        tokens[:, found["bucket"]] += found["tokens"].T
    # If no document's hash is low enough, the lowest is held out; if all are low enough, the highest is trained on.
    moved = ""
    if not tokens[1].any():
        moved = min(result.lowest for result in results if result.lowest).id
    elif not tokens[0].any():
        moved = max(result.highest for result in results if result.highest).id
    group = store.group(parts)
    limit = options.shard_bytes // np.dtype(options.dtype).itemsize
    tasks: dict[str, list[Task[Shard | None]]] = {split: [] for split in SPLITS}
    for number, split in enumerate(SPLITS):
        for low, high in _ranges(tokens[number], limit) or [(0, BUCKETS)]:
            name = f"{quote(source, safe='')}-{len(tasks[split]):05d}"
            specification = WriteShard(
                name=name,
                source=source,
                heldout=split == "heldout",
                moved=moved,
                buckets=(low, high),
                dtype=options.dtype,
                block_bytes=options.block_bytes,
                heldout_fraction=options.heldout_fraction,
                parts=group,
            )
            tasks[split].append(write_shard.task(specification, f"{split}/{name}"))
    return tasks


def _ranges(sizes: np.ndarray, limit: int) -> list[tuple[int, int]]:
    """Return consecutive ranges of buckets of at most `limit` tokens, or of one bucket. sizes: tokens per bucket."""
    ranges: list[tuple[int, int]] = []
    low, held = 0, 0
    for bucket in np.flatnonzero(sizes).tolist():
        size = int(sizes[bucket])
        if held and held + size > limit:
            ranges.append((low, bucket))
            low, held = bucket, 0
        held += size
    return [*ranges, (low, BUCKETS)] if held else ranges


def _assemble(
    tasks: Sequence[Task[Shard | None]], split: str, store: Store, origin: dict, options: _Options
) -> TokenManifest:
    """Link the finished shards of one split into its token folder next to the store, then write its manifest."""
    folder = store.root.parent / split
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shards = []
    for task in tasks:
        shard = store.result(task)
        if shard is None:
            continue
        shards.append(shard)
        for path in store.folder(task).glob(f"{shard.name}.*"):
            (folder / path.name).hardlink_to(path)
    manifest = TokenManifest(**origin, **vars(options), split=split, shards=tuple(shards))
    write_json(folder / MANIFEST, to_dict(manifest))
    return manifest
