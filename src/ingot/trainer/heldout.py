"""The text of a run besides its batches: tokenizer, prompts, held-out documents, unigram model. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ingot.errors import ConfigError, DataError
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import Shard, TokenManifest, read_token_manifest
from ingot.storage import sha256_bytes
from ingot.tokenizer.encoder import Encoder, load_encoder
from ingot.trainer.guard.sanity import NGRAM, SANITY_ROWS, SanityBatch
from ingot.trainer.loader.reader import TokenReader, of_damage
from ingot.trainer.loader.window_filter import repeated_share

# Enough to count every frequent token. In a larger corpus, only the starts of evenly spaced shards are counted; of few
# shards, because reading the first token of a shard requires the hash of a whole block.
UNIGRAM_TOKENS, UNIGRAM_SHARDS = 20_000_000, 64


@dataclass(frozen=True)
class SourceText:
    """Whole held-out documents of one source, each followed by the end-of-text token.

    ids: token ids, int64. text_bytes: the number of UTF-8 bytes that the ids encode (end-of-text encodes none).
    """

    source: str
    ids: np.ndarray
    text_bytes: int


def first_tokens(folder: Path, manifest: TokenManifest, shard: Shard, count: int) -> np.ndarray:
    """Return the first `count` tokens (at least 2, at most all) of `shard`, int64, checked against its hashes."""
    count = min(max(count, 2), shard.tokens)
    # Read one window of this length with TokenReader, so that only one class reads and checks blocks.
    reader = TokenReader(folder, count - 1, manifest=replace(manifest, shards=(shard,)))
    return reader.read(np.zeros(1, np.int64))[0]


def read_heldout(folder: Path, manifest: TokenManifest, max_tokens: int, encoder: Encoder | None) -> list[SourceText]:
    """Read an equal share of `max_tokens` from each source, rounded to whole documents, at least one.

    Documents are shuffled within their shards, so the first documents are a fair sample. encoder: counts the bytes of a
    shard that is read in part. Raises ConfigError if an encoder is needed but None, DataError if there is nothing to
    score.
    """
    share = max_tokens // len(manifest.sources)
    texts = []
    for source in manifest.sources:
        ids, text_bytes = [], 0
        for shard in manifest.shards:
            left = share - sum(map(len, ids))
            if shard.source != source or shard.tokens < 2 or (ids and left < 1):
                continue
            part = whole_documents(folder, manifest, shard, left)
            ids.append(part)
            text_bytes += shard.text_bytes if len(part) == shard.tokens else count_bytes(part, manifest, encoder)
        if ids:
            texts.append(SourceText(source, np.concatenate(ids), text_bytes))
    if not texts:
        raise DataError(
            "E-HELDOUT-EMPTY",
            f"{folder} has no shard with at least two tokens",
            rule="held-out text has at least one shard with a document to score",
            fix="build the tokens again with more held-out documents: ingot data build",
            folder=str(folder),
        )
    return texts


def whole_documents(folder: Path, manifest: TokenManifest, shard: Shard, wanted: int) -> np.ndarray:
    """Read the documents that end within the first `wanted` tokens of `shard`; if none does, the first document."""
    count = wanted
    while True:
        ids = first_tokens(folder, manifest, shard, count)
        ends = np.flatnonzero(ids == manifest.eot_id) + 1
        if len(ends):
            within = ends[ends <= wanted]
            return ids[: within[-1] if len(within) else ends[0]]
        if len(ids) == shard.tokens:
            raise DataError(
                "E-SHARD-NO-EOT",
                f"shard {shard.name} in {folder} has no end-of-text token (id {manifest.eot_id})",
                rule="every document is followed by the end-of-text token",
                fix="build the tokens again: ingot data build",
                shard=shard.name,
                eot_id=manifest.eot_id,
            )
        count = 2 * len(ids)


def count_bytes(ids: np.ndarray, manifest: TokenManifest, encoder: Encoder | None) -> int:
    """Count the UTF-8 bytes of the documents in `ids`, document by document: a token may be a part of a character."""
    if encoder is None:
        raise ConfigError(
            "E-TOKENIZER-UNSET",
            "data.tokenizer is not set, but only a part of the held-out tokens is scored",
            rule="bits per byte need the exact number of bytes of the documents that were scored",
            fix="set data.tokenizer, or raise evaluate.max_tokens above the number of held-out tokens",
            needed_for="evaluate.max_tokens",
        )
    documents = np.split(ids, np.flatnonzero(ids == manifest.eot_id) + 1)
    return sum(len(encoder.decode(d[d != manifest.eot_id]).encode()) for d in documents)


@dataclass(frozen=True)
class HeldoutRows:
    """Documents of all sources, cut into W rows of T tokens for the model. inputs, targets: int64 [W, T].

    counted: bool [W, T], True for targets that are text. source: int64 [W], the index of each row's SourceText.
    """

    inputs: np.ndarray
    targets: np.ndarray
    counted: np.ndarray
    source: np.ndarray


def cut_rows(texts: Sequence[SourceText], seq_len: int, eot_id: int) -> HeldoutRows:
    """Cut texts into rows, so that every token is a target exactly once.

    A row begins with the token before its first target; the first row of a source begins with end-of-text. This token
    is an input of the model but does not count as a target, because it encodes no text. It also pads short rows.
    """
    inputs, targets, source = [], [], []
    for number, text in enumerate(texts):
        rows = -(-len(text.ids) // seq_len)
        padded = np.full(rows * seq_len + 1, eot_id, np.int64)
        padded[1 : len(text.ids) + 1] = text.ids
        inputs.append(padded[:-1].reshape(rows, seq_len))
        targets.append(padded[1:].reshape(rows, seq_len))
        source.append(np.full(rows, number, np.int64))
    all_targets = np.concatenate(targets)
    return HeldoutRows(np.concatenate(inputs), all_targets, all_targets != eot_id, np.concatenate(source))


def unigram_nats(folder: Path, manifest: TokenManifest, *, pass_damaged: bool = False) -> np.ndarray:
    """Return -log p for every token id, where p is its smoothed frequency in training tokens: float64 [vocab_size].

    pass_damaged: do not count shards whose beginning is damaged, instead of raising DataError.
    """
    shards = manifest.shards[:: -(-len(manifest.shards) // UNIGRAM_SHARDS) or 1]
    share = max(UNIGRAM_TOKENS // max(len(shards), 1), 2)
    counts = np.ones(manifest.vocab_size, np.int64)
    for shard in shards:
        if shard.tokens < 2:
            continue
        try:
            counts += np.bincount(first_tokens(folder, manifest, shard, share), minlength=manifest.vocab_size)
        except DataError as error:
            if not pass_damaged:
                raise
            of_damage(error)
    return np.log(counts.sum()) - np.log(counts)


@dataclass(frozen=True)
class Heldout:
    """The held-out text, prepared to be scored many times. unigram: result of `unigram_nats`, float64 [vocab_size]."""

    texts: list[SourceText]
    rows: HeldoutRows
    unigram: np.ndarray
    eot_id: int
    mask_documents: bool

    @classmethod
    def prepare(
        cls, texts: list[SourceText], unigram: np.ndarray, *, seq_len: int, eot_id: int, mask_documents: bool
    ) -> "Heldout":
        """Cut `texts` into rows of `seq_len` tokens."""
        return cls(texts, cut_rows(texts, seq_len, eot_id), unigram, eot_id, mask_documents)


def open_heldout(
    config: RunConfig, folder: RunFolder, encoder: Encoder | None, *, tokens: Path | None = None, max_tokens: int
) -> Heldout | None:
    """Open the held-out text in the token folder `tokens`, by default that of the run file; None if neither is given.

    Raises ConfigError if the tokenizer of the held-out tokens is not that of the training tokens.
    """
    if tokens is None:
        if not config.data.heldout:
            return None
        tokens = data_path(folder, config.data.heldout)
    manifest, train_path = read_token_manifest(tokens), data_path(folder, config.data.tokens)
    train = read_token_manifest(train_path)
    if manifest.tokenizer_sha256 != train.tokenizer_sha256:
        raise ConfigError(
            "E-TOKENIZER-MISMATCH",
            f"the tokens in {tokens} were encoded with a different tokenizer than data.tokens",
            rule="held-out text is scored in the tokens that the model was trained on",
            fix="build both from one corpus: ingot data build",
            path=str(tokens),
        )
    return Heldout.prepare(
        read_heldout(tokens, manifest, max_tokens, encoder),
        unigram_nats(train_path, train, pass_damaged=config.data.on_damage == "quarantine"),
        seq_len=config.train.seq_len,
        eot_id=manifest.eot_id,
        mask_documents=config.data.mask_documents,
    )


def data_path(folder: RunFolder, path: str) -> Path:
    """Resolve a path of the run file, which may be relative to the folder of the run file."""
    return (folder.config.parent / path).resolve()


def open_encoder(config: RunConfig, folder: RunFolder, manifest: TokenManifest) -> Encoder | None:
    """Open the run's tokenizer; None if the run file names none. Raises ConfigError if the training tokens were made
    with another tokenizer, or if prompts need a tokenizer and there is none."""
    if not config.data.tokenizer:
        if config.evaluate.prompts:
            raise ConfigError(
                "E-TOKENIZER-UNSET",
                "evaluate.prompts is set, but data.tokenizer is not",
                rule="a prompt is encoded with the tokenizer of the training tokens",
                fix="set data.tokenizer to the tokenizer.json of the tokens",
                needed_for="evaluate.prompts",
            )
        return None
    path = data_path(folder, config.data.tokenizer)
    encoder = load_encoder(path, eot=manifest.eot_id)
    if encoder.sha256 != manifest.tokenizer_sha256:
        raise ConfigError(
            "E-TOKENIZER-MISMATCH",
            f"data.tokenizer = {path} is not the tokenizer that encoded {config.data.tokens}",
            rule="samples and bytes are decoded with the tokenizer of the training tokens",
            fix="set data.tokenizer to the tokenizer.json that the tokens were built with",
            path=str(path),
        )
    return encoder


def check_prompts(config: RunConfig, encoder: Encoder | None) -> None:
    """Raise ConfigError for a prompt too long for the model, before training: samples are drawn after the last step."""
    if encoder is None:
        return
    positions, wanted = config.model.max_seq_len, config.evaluate.sample_tokens
    for prompt in config.evaluate.prompts:
        own = max(len(encoder.encode(prompt)), 1)
        if own + wanted > positions:
            raise ConfigError(
                "E-PROMPT-LENGTH",
                f"evaluate.prompts: {prompt[:40]!r} has {own} tokens, and {wanted} more are to be generated",
                rule=f"the model has {positions} positions (model.max_seq_len)",
                fix="shorten the prompt or lower evaluate.sample_tokens",
                tokens=own,
                wanted=wanted,
                positions=positions,
            )


def sanity_rows(heldout: Heldout) -> np.ndarray:
    """Return the rows of the held-out text that are the fixed batch, int64, evenly apart."""
    return np.unique(np.linspace(0, len(heldout.rows.source) - 1, SANITY_ROWS).astype(int))


def sanity_batch(heldout: Heldout) -> SanityBatch:
    """Return the facts of the fixed batch of `heldout`."""
    rows = sanity_rows(heldout)
    tokens = heldout.rows.targets[rows][heldout.rows.counted[rows]]
    repeated = repeated_share(tokens[None], NGRAM)
    return SanityBatch(sha256_bytes(tokens.astype("<i8").tobytes())[:16], float(repeated[0]))
