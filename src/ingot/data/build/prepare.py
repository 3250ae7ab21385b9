"""Crawl files -> corpus -> tokenizer -> token shards, in one folder.

OUT/corpus                   kept and dropped documents, funnel
OUT/tokens/tokenizer.json    trained on the corpus, or the one that was given
OUT/tokens/{train,heldout}   token folders
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ingot.data.build.corpus import MANIFEST as CORPUS_MANIFEST
from ingot.data.build.corpus import cut_files, load_corpus, read_documents, read_part, verify_corpus
from ingot.data.build.corpus_build import Progress, build_corpus
from ingot.data.build.recipe import DataRecipe
from ingot.data.build.shards import SHARD_BYTES, SPLITS, build_shards
from ingot.data.lineage.damage import raise_all
from ingot.data.lineage.purge.journal import is_unfinished
from ingot.data.lineage.verify import verify_tokens
from ingot.data.sources.input import Input
from ingot.data.tasks.run import Runner
from ingot.errors import ConfigError, DataError, DataMissing
from ingot.schema.corpus import CorpusManifest, CorpusPart
from ingot.schema.tokens import MANIFEST, TokenManifest, read_token_manifest
from ingot.storage import exclusive, sha256_file
from ingot.tokenizer.encoder import Encoder, load_encoder
from ingot.tokenizer.train import train_bpe

_SAMPLE_DOCUMENTS = 32  # on which the fast encoder has to equal the slow one
_TRAINING_BYTES = 1 << 30  # of text, about, that a tokenizer is trained on: merges do not change any more behind it
_READ_TIMES = 16  # as many bytes are read for it
_TRAINED = ".tokenizer-{}.json"  # of which corpus, of what size
_CORPUS_SHARE, _TOKENIZER_SHARE = 0.7, 0.8  # of the time, for the progress bar


@dataclass(frozen=True)
class Prepared:
    """What lies in OUT. engine: "tiktoken" or "tokenizers"; notice: why not the faster one, or "".

    fresh: False when everything was there already and nothing was done. warnings: crawl files that are cut.
    """

    corpus: CorpusManifest
    train: TokenManifest
    heldout: TokenManifest
    tokenizer: Path
    engine: str
    notice: str
    fresh: bool
    warnings: tuple[str, ...] = ()


def prepare(
    inputs: Sequence[Input],
    out: Path,
    recipe: DataRecipe | None = None,
    *,
    vocab_size: int = 32_768,
    tokenizer: Path | None = None,
    eot: str = "",
    runner: Runner | None = None,
    seed: int = 1234,
    shard_bytes: int = SHARD_BYTES,
    against: Path | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Make `out` ready for training. tokenizer: a tokenizer.json; a BPE of `vocab_size` is trained if None.

    eot: the token that ends a document, for a tokenizer whose token for it has an unusual name. runner: who does the
    tasks (execute/), this process if None; the result is the same for all. shard_bytes: see build_shards.
    against: see build_corpus.

    The same call again does nothing, after an interruption it goes on. Raises what build_corpus, train_bpe,
    load_encoder and build_shards raise; ConfigError when `out` holds tokens that something else made, RunBusyError when
    another process is at it.
    """
    recipe, report = recipe or DataRecipe(), progress or (lambda fraction, text: None)
    corpus, tokens = out / "corpus", out / "tokens"
    _require_whole(out)
    _check_tokenizer(tokenizer, eot)
    finished = all((tokens / split / MANIFEST).exists() for split in SPLITS)
    manifest = build_corpus(
        inputs,
        corpus,
        recipe,
        runner=runner,
        purged=out,
        against=against,
        replace=not finished,
        progress=lambda fraction, text: report(_CORPUS_SHARE * fraction, text),
    )
    report(_CORPUS_SHARE, "tokenizer")
    with exclusive(out, f"preparing {out}"):
        encoder, path = _encoder(corpus, tokens, tokenizer, eot, vocab_size, finished)
        interrupted = True
        try:
            train, heldout = build_shards(
                corpus,
                encoder,
                tokens,
                tokenizer=path,
                seed=seed,
                shard_bytes=shard_bytes,
                runner=runner,
                progress=lambda fraction, text: report(_TOKENIZER_SHARE + (1 - _TOKENIZER_SHARE) * fraction, text),
            )
            interrupted = False
        finally:
            if finished or not interrupted:  # else the next call needs it
                for trained in out.glob(_TRAINED.format("*")):
                    trained.unlink()
    return Prepared(
        manifest,
        train,
        heldout,
        tokens / "tokenizer.json",
        encoder.engine,
        encoder.notice,
        not finished,
        cut_files(corpus),
    )


def _require_whole(out: Path) -> None:
    if is_unfinished(out):
        raise DataError(
            f"a purge of {out} was interrupted: some of its files are old, some new",
            rule="they change as one, and are read when they have",
            fix="give the command of the purge again; any other purge of the folder finishes that one first, too",
        )


def _check_tokenizer(tokenizer: Path | None, eot: str) -> None:
    """What cannot be used is told now, not after hours of building the corpus."""
    if tokenizer is not None:
        load_encoder(tokenizer, eot=eot)
    elif eot:
        raise ConfigError(
            f"--eot {eot!r} without --tokenizer",
            rule="a tokenizer that is trained here has an end-of-text token of its own",
            fix="add --tokenizer FILE, or leave --eot out",
        )


def _encoder(
    corpus: Path, tokens: Path, tokenizer: Path | None, eot: str, vocab_size: int, finished: bool
) -> tuple[Encoder, Path]:
    """The encoder, and its file. One that is trained now stays in `out` until the tokens are finished."""
    path = tokenizer
    if path is None and finished and read_token_manifest(tokens / SPLITS[0]).vocab_size == vocab_size:
        path = tokens / "tokenizer.json"
    elif path is None:
        path = tokens.with_name(_TRAINED.format(f"{sha256_file(corpus / CORPUS_MANIFEST)[:16]}-{vocab_size}"))
        if not path.exists():
            train_bpe(_training_texts(corpus), vocab_size, path)
    sample = [document["text"] for _, document in islice(read_documents(corpus, verify=False), _SAMPLE_DOCUMENTS)]
    return load_encoder(path, sample, eot=eot), path


def _training_texts(corpus: Path) -> Iterator[str]:
    """All texts of the corpus, or of a large one a share that any process finds again: of every source each so many-th
    part, so that it need not be read as a whole, and of these the documents whose id is low enough."""
    by_source: dict[str, list[CorpusPart]] = {}
    for part in load_corpus(corpus).parts:
        by_source.setdefault(part.source, []).append(part)
    every = sum(part.text_bytes for parts in by_source.values() for part in parts) // (_READ_TIMES * _TRAINING_BYTES)
    chosen = [part for parts in by_source.values() for part in parts[:: max(every, 1)]]
    limit = min(_TRAINING_BYTES / max(sum(part.text_bytes for part in chosen), 1), 1.0) * 2**64
    for part in chosen:
        for row in read_part(corpus / part.name, part.sha256):
            if int(row["id"][:16], 16) < limit:
                yield row["text"]


@dataclass(frozen=True)
class Checked:
    """A folder whose hashes are all right. kind: "corpus" or "tokens"; checked: how much that was, for people."""

    folder: str
    kind: str
    checked: str


def verify(folder: Path, progress: Progress | None = None) -> list[Checked]:
    """Check the corpus and the token folders at or below `folder`, and that the tokens were made with what lies beside.

    Raises one DataError that lists all damage, or says that a purge has to be finished first.
    """
    for root in (folder, *folder.absolute().parents[:2]):  # what is given may be its corpus, or its tokens/train
        _require_whole(root)
    found: list[Checked] = []
    damage: list[DataError] = []
    for corpus in (folder, folder / "corpus"):
        if (corpus / CORPUS_MANIFEST).exists():
            _collect(found, damage, lambda corpus=corpus: _checked_corpus(corpus))
    for tokens in (folder, *(parent / split for parent in (folder, folder / "tokens") for split in SPLITS)):
        if (tokens / MANIFEST).exists():
            _collect(found, damage, lambda tokens=tokens: _checked_tokens(tokens, progress))
            _collect(found, damage, lambda tokens=tokens: _verify_origin(tokens))
    raise_all(damage)
    if not found:
        raise DataMissing(
            f"{folder} holds neither a corpus nor tokens",
            rule=f"a corpus has {CORPUS_MANIFEST}, a token folder {MANIFEST}; both are written last",
            fix="give the folder that `ingot data build --out` wrote",
        )
    return found


def _collect(found: list[Checked], damage: list[DataError], check: Callable[[], Checked | None]) -> None:
    try:
        checked = check()
    except DataError as error:
        damage.append(error)
    else:
        found += [checked] if checked else []


def _checked_corpus(corpus: Path) -> Checked:
    manifest = verify_corpus(corpus)
    documents = sum(part.documents for part in manifest.parts)
    files = len(manifest.parts) + len(manifest.dropped)
    return Checked(str(corpus), "corpus", f"{files:,} files, {documents:,} kept documents")


def _checked_tokens(tokens: Path, progress: Progress | None) -> Checked:
    verified = verify_tokens(tokens, progress)
    text = f"{verified.blocks:,} blocks in {verified.shards:,} shards, {verified.tokens:,} tokens"
    return Checked(str(tokens), "tokens", text)


def _verify_origin(tokens: Path) -> None:
    """Hold the tokenizer and the corpus beside a token folder, where they are, against the hashes in its manifest."""
    manifest = read_token_manifest(tokens)
    damage: list[DataError] = []
    for path, sha256 in (
        (tokens.parent / "tokenizer.json", manifest.tokenizer_sha256),
        (tokens.parent.parent / "corpus" / CORPUS_MANIFEST, manifest.corpus_sha256),
    ):
        if path.exists() and (found := sha256_file(path)) != sha256:
            damage.append(
                DataError(
                    f"{path} has SHA-256 {found[:12]}.., the tokens in {tokens} were made with {sha256[:12]}..",
                    rule="tokens lie beside the tokenizer and the corpus that they were made with",
                    fix="restore that file, or build into another folder",
                )
            )
    raise_all(damage)
