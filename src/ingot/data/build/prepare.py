"""Build a corpus, a tokenizer and token shards from crawl files, in one folder.

OUT/corpus                   kept and dropped documents, funnel
OUT/tokens/tokenizer.json    trained on the corpus, or the given tokenizer
OUT/tokens/{train,heldout}   token folders
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ingot.data.build.corpus import MANIFEST as CORPUS_MANIFEST
from ingot.data.build.corpus import cut_files, load_corpus, read_documents, read_part, verify_corpus
from ingot.data.build.corpus_build import build_corpus
from ingot.data.build.recipe import DataRecipe
from ingot.data.build.shards import SHARD_BYTES, SPLITS, build_shards
from ingot.data.lineage.purge.journal import is_unfinished
from ingot.data.lineage.verify import raise_all, verify_tokens
from ingot.data.sources.input import Input
from ingot.data.tasks.run import ReportProgress, Runner
from ingot.errors import ConfigError, DataError, DataMissing
from ingot.schema.corpus import CorpusManifest, CorpusPart
from ingot.schema.tokens import MANIFEST, TokenManifest, read_token_manifest
from ingot.storage import exclusive, sha256_file
from ingot.tokenizer.byte_bpe import train_bpe
from ingot.tokenizer.encoder import Encoder, load_encoder

_SAMPLE_DOCUMENTS = 32  # documents on which the fast encoder has to give the same tokens as the slow encoder
_TRAINING_BYTES = 1 << 30  # about how much text a tokenizer is trained on: more hardly changes the merges
_READ_TIMES = 16  # the training text is chosen from about this many times as much text
_TRAINED = ".tokenizer-{}.json"  # named after the corpus and the vocabulary size
_CORPUS_SHARE, _TOKENIZER_SHARE = 0.7, 0.8  # progress bar: share of the time until the end of this step


@dataclass(frozen=True)
class Prepared:
    """The content of OUT. engine: "tiktoken" or "tokenizers"; notice: why the faster engine is not used, or "".

    fresh: False if everything was there already and nothing was done. warnings: one text for each crawl file that is
    truncated or could not be read.
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
    progress: ReportProgress | None = None,
) -> Prepared:
    """Build the corpus, tokenizer and token shards in `out`.

    tokenizer: a tokenizer.json; if None, a BPE with `vocab_size` tokens is trained. eot: the token that ends a
    document, if the tokenizer has an unusual name for it. runner: runs the tasks (tasks/run.py), by default in this
    process; the result is the same for all runners. shard_bytes: see build_shards. against: see build_corpus.

    If `out` is finished, the same call does nothing; after an interruption it continues. Raises the errors of
    build_corpus, train_bpe, load_encoder and build_shards; ConfigError if `out` holds tokens with other settings,
    RunBusyError if another process works on `out`.
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
            if finished or not interrupted:  # otherwise the next call needs the trained tokenizer
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
    """Raise DataError if a purge of `out` was interrupted."""
    if is_unfinished(out):
        raise DataError(
            "E-PURGE-UNFINISHED",
            f"a purge of {out} was interrupted: some of its files are old, some are new",
            rule="all files of a purge are replaced before the folder is read",
            fix="give the command of the purge again; any other purge of the folder also finishes that purge first",
            path=str(out),
        )


def _check_tokenizer(tokenizer: Path | None, eot: str) -> None:
    """Raise an error for an unusable tokenizer before the corpus is built, which may take hours."""
    if tokenizer is not None:
        load_encoder(tokenizer, eot=eot)
    elif eot:
        raise ConfigError(
            "E-EOT-ALONE",
            f"--eot {eot!r} is given without --tokenizer",
            rule="a tokenizer that is trained here has its own end-of-text token",
            fix="add --tokenizer FILE, or leave --eot out",
            eot=eot,
        )


def _encoder(
    corpus: Path, tokens: Path, tokenizer: Path | None, eot: str, vocab_size: int, finished: bool
) -> tuple[Encoder, Path]:
    """Return the encoder and its file. A tokenizer trained here stays beside `tokens` until they are finished."""
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
    """Yield the texts of a corpus: all of them, or for a large corpus a share that is the same in every process.

    The share consists of the documents whose id is below a limit, from every n-th file of each source, so only a
    part of the files is read.
    """
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
class CheckedFolder:
    """A folder whose hashes are correct. kind: "corpus" or "tokens"; checked: a text with the amount of data."""

    folder: str
    kind: str
    checked: str


def verify(folder: Path, progress: ReportProgress | None = None) -> list[CheckedFolder]:
    """Check the corpus and the token folders in `folder`, and check that the tokens were made from this corpus.

    `folder` may also be a corpus or token folder. Raises one DataError that lists all damage, or DataError if a purge
    has to be finished first.
    """
    for root in (folder, *folder.absolute().parents[:2]):  # `folder` may be OUT/corpus or OUT/tokens/train
        _require_whole(root)
    found: list[CheckedFolder] = []
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
            "E-DATA-FOLDER",
            f"{folder} holds neither a corpus nor tokens",
            rule=f"a corpus has {CORPUS_MANIFEST}, a token folder {MANIFEST}; both are written last",
            fix="give the folder that `ingot data build --out` wrote",
            path=str(folder),
        )
    return found


def _collect(found: list[CheckedFolder], damage: list[DataError], check: Callable[[], CheckedFolder | None]) -> None:
    try:
        checked = check()
    except DataError as error:
        damage.append(error)
    else:
        found += [checked] if checked else []


def _checked_corpus(corpus: Path) -> CheckedFolder:
    manifest = verify_corpus(corpus)
    documents = sum(part.documents for part in manifest.parts)
    files = len(manifest.parts) + len(manifest.dropped)
    return CheckedFolder(str(corpus), "corpus", f"{files:,} files, {documents:,} kept documents")


def _checked_tokens(tokens: Path, progress: ReportProgress | None) -> CheckedFolder:
    verified = verify_tokens(tokens, progress)
    text = f"{verified.blocks:,} blocks in {verified.shards:,} shards, {verified.tokens:,} tokens"
    return CheckedFolder(str(tokens), "tokens", text)


def _verify_origin(tokens: Path) -> None:
    """Compare tokenizer and corpus next to a token folder, if they are there, with the hashes in its manifest."""
    manifest = read_token_manifest(tokens)
    damage: list[DataError] = []
    for path, sha256 in (
        (tokens.parent / "tokenizer.json", manifest.tokenizer_sha256),
        (tokens.parent.parent / "corpus" / CORPUS_MANIFEST, manifest.corpus_sha256),
    ):
        if path.exists() and (found := sha256_file(path)) != sha256:
            damage.append(
                DataError(
                    "E-TOKENS-ORIGIN",
                    f"{path} has SHA-256 {found[:12]}.., but the tokens in {tokens} were made with {sha256[:12]}..",
                    rule="tokens are in one folder with the tokenizer and the corpus that they were made with",
                    fix="restore that file, or build into another folder",
                    path=str(path),
                    found=found,
                    expected=sha256,
                )
            )
    raise_all(damage)
