"""Token shards from texts that are at hand, without a crawl: `ingot.tokenize_to_shards`."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import xxhash

from ingot.data.build.corpus import MANIFEST, json_line, jsonl_writer, load_corpus, write_manifest
from ingot.data.build.shards import build_shards
from ingot.data.tasks.run import Runner
from ingot.errors import IngotError, UsageError
from ingot.schema.corpus import CorpusManifest, CorpusPart, document_id
from ingot.schema.tokens import TokenManifest
from ingot.storage import exclusive, sha256_bytes, sha256_file
from ingot.tokenizer.encoder import load_encoder
from ingot.units import parse_bytes

_PART_CHARACTERS = 64 << 20  # of the texts of one corpus file, which one task tokenizes
_CONFIG = sha256_bytes(b"texts without filters")  # of every corpus that this module writes, and of no build


def tokenize_to_shards(
    texts: Iterable[str] | Mapping[str, Iterable[str]],
    tokenizer: str | Path,
    out: str | Path,
    *,
    eot: str = "",
    heldout_fraction: float = 0.02,
    shard_size: str | int = "1GB",
    seed: int = 1234,
    runner: Runner | None = None,
    progress: Callable[[float, str], None] = lambda fraction, text: None,
) -> tuple[TokenManifest, TokenManifest]:
    """Write texts as a corpus and as token shards for training, without any filter. Return the manifests of the
    training tokens and of the held-out tokens.

    texts: documents in order, or source name -> documents ("text" is the source of a plain iterable). They are read
    once and may be larger than memory. tokenizer: a tokenizer.json of any kind. out: the folder, which gets corpus/,
    tokens/train, tokens/heldout and tokens/tokenizer.json, as from `build_data`. eot: the end-of-text token, if it has
    an unusual name. heldout_fraction: the share of documents that are held out, at least one of each source.
    shard_size: the largest size of a shard. seed: of the shuffle. runner: where tasks run (default: this process).

    The same texts give the same shards. Finished tokens in `out` are kept if the texts and settings are the same.
    Raises ConfigError if they are not, or if the tokenizer has no end-of-text token; UsageError if `out/corpus` exists
    and is not of this function; DataError for a source with fewer than two documents; ResourceError if the disk is too
    small; RunBusyError if another process writes `out`.

        train, heldout = ingot.tokenize_to_shards(texts, "tokenizer.json", "data")
        ingot.TokenDataset("data", seq_len=1024, global_batch=8)
    """
    out = Path(out)
    encoder = load_encoder(Path(tokenizer), eot=eot)
    out.mkdir(parents=True, exist_ok=True)
    with exclusive(out, f"writing texts into {out}"):
        fresh, replaced, corpus = out / ".corpus", out / ".corpus.replaced", out / "corpus"
        _require_own(corpus)
        for unfinished in (fresh, replaced):
            shutil.rmtree(unfinished, ignore_errors=True)
        _write_corpus(texts if isinstance(texts, Mapping) else {"text": texts}, fresh)
        manifests = build_shards(
            fresh,
            encoder,
            out / "tokens",
            tokenizer=Path(tokenizer),
            seed=seed,
            heldout_fraction=heldout_fraction,
            shard_bytes=parse_bytes(shard_size),
            runner=runner,
            progress=progress,
        )
        # Only now: tokens of other texts are refused above, and keep their corpus.
        # Renamed before it is removed: half of a corpus, after a kill, would be taken for a folder of the user.
        if corpus.exists():
            corpus.rename(replaced)
        fresh.rename(corpus)
        shutil.rmtree(replaced, ignore_errors=True)
    return manifests


def _require_own(corpus: Path) -> None:
    """Raise UsageError if `corpus` exists and was not written by this module: it would be replaced."""
    if (corpus.exists() or corpus.is_symlink()) and not _is_own(corpus):
        raise UsageError(
            "E-TEXTS-FOLDER",
            f"{corpus} exists and was not written by tokenize_to_shards",
            rule=f"only a corpus of tokenize_to_shards is replaced, which its {MANIFEST} identifies",
            fix="choose another folder: tokenize_to_shards(texts, tokenizer, OUT)",
            path=str(corpus),
        )


def _is_own(corpus: Path) -> bool:
    try:
        return not corpus.is_symlink() and load_corpus(corpus).config_sha256 == _CONFIG
    except IngotError:
        return False


def _write_corpus(sources: Mapping[str, Iterable[str]], folder: Path) -> None:
    folder.mkdir()
    parts = [part for source, texts in sources.items() for part in _write_parts(source, iter(texts), folder)]
    manifest = CorpusManifest(
        inputs={part.name: part.sha256 for part in parts},
        sources={part.name: part.source for part in parts},
        config_sha256=_CONFIG,
        parts=tuple(parts),
        funnel=(),
    )
    write_manifest(folder, manifest)


def _write_parts(source: str, texts: Iterator[str], folder: Path) -> Iterator[CorpusPart]:
    """Write the documents of a source into files of limited size, and yield the entry of each file."""
    number, text = 0, next(texts, None)
    for part in range(1 << 30):
        if text is None:
            return
        name = f"{quote(source, safe='')}-{part:05d}.jsonl.gz"
        characters = documents = text_bytes = 0
        with jsonl_writer(folder / name) as write:
            while text is not None and characters < _PART_CHARACTERS:
                encoded = text.encode("utf-8", "surrogatepass")
                write(json_line(_row(source, number, text, encoded)))
                characters, documents = characters + len(text), documents + 1
                text_bytes, number = text_bytes + len(encoded), number + 1
                text = next(texts, None)
        sha256 = sha256_file(folder / name)
        yield CorpusPart(name=name, source=source, documents=documents, text_bytes=text_bytes, sha256=sha256)


def _row(source: str, number: int, text: str, encoded: bytes) -> dict:
    digest = xxhash.xxh3_128_hexdigest(encoded)
    identity = {"id": document_id(source, str(number), ""), "url": "", "source": source, "file": source}
    sizes = {"before": digest, "before_bytes": len(encoded), "after": digest, "after_bytes": len(encoded)}
    return identity | {"record_id": str(number), "language": "", "text": text} | sizes
