"""Held-out text to be scored: whole documents with their exact number of bytes, and a unigram model to compare with.

No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ingot.errors import ConfigError, DataError
from ingot.schema.tokens import Shard, TokenManifest
from ingot.tokenizer.encoder import Encoder
from ingot.trainer.loader.reader import TokenReader

# Enough for the counts of every token that matters; of a larger corpus the starts of evenly chosen shards are counted.
# Few shards, because the first token of a shard costs the hash of a whole block.
UNIGRAM_TOKENS, UNIGRAM_SHARDS = 20_000_000, 64


@dataclass(frozen=True)
class SourceText:
    """Whole held-out documents of one source, each followed by the end of text.

    ids: int64. text_bytes: UTF-8 bytes that the ids encode (the end of text encodes none).
    """

    source: str
    ids: np.ndarray
    text_bytes: int


def first_tokens(folder: Path, manifest: TokenManifest, shard: Shard, count: int) -> np.ndarray:
    """The first `count` tokens (at least 2, at most all) of `shard`, int64, checked against their hashes."""
    count = min(max(count, 2), shard.tokens)
    # One window that is as long as the wish: reading and checking blocks has one home.
    reader = TokenReader(folder, count - 1, manifest=replace(manifest, shards=(shard,)))
    return reader.read(np.zeros(1, np.int64))[0]


def read_heldout(folder: Path, manifest: TokenManifest, max_tokens: int, encoder: Encoder | None) -> list[SourceText]:
    """Per source an equal share of `max_tokens`, rounded to whole documents, at least one.

    Documents lie shuffled in their shards, so the first ones are a fair sample. encoder: needed to count the bytes
    where a shard is read in part; raises ConfigError without it. Raises DataError when there is nothing to score.
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
        raise DataError(f"{folder} holds no held-out text", rule="a shard has at least two tokens")
    return texts


def whole_documents(folder: Path, manifest: TokenManifest, shard: Shard, wanted: int) -> np.ndarray:
    """The documents that end within the first `wanted` tokens of `shard`, or its first document."""
    count = wanted
    while True:
        ids = first_tokens(folder, manifest, shard, count)
        ends = np.flatnonzero(ids == manifest.eot_id) + 1
        if len(ends):
            within = ends[ends <= wanted]
            return ids[: within[-1] if len(within) else ends[0]]
        if len(ids) == shard.tokens:
            raise DataError(
                f"shard {shard.name} in {folder} holds no end of text (token {manifest.eot_id})",
                rule="every document is followed by the end of text",
                fix="build the tokens again: ingot data build",
            )
        count = 2 * len(ids)


def count_bytes(ids: np.ndarray, manifest: TokenManifest, encoder: Encoder | None) -> int:
    """UTF-8 bytes of the documents in `ids`. Decoded document by document: a token may be part of a character."""
    if encoder is None:
        raise ConfigError(
            "data.tokenizer is not set, but only a part of the held-out tokens is scored",
            rule="bits per byte need the exact number of bytes of the documents that were scored",
            fix="set data.tokenizer, or raise evaluate.max_tokens above the held-out tokens",
        )
    documents = np.split(ids, np.flatnonzero(ids == manifest.eot_id) + 1)
    return sum(len(encoder.decode(d[d != manifest.eot_id]).encode()) for d in documents)


@dataclass(frozen=True)
class Windows:
    """Documents of all sources cut into rows for the model: inputs, targets int64 [W, T].

    counted: bool [W, T], targets that are text; source: int64 [W], index into the texts.
    """

    inputs: np.ndarray
    targets: np.ndarray
    counted: np.ndarray
    source: np.ndarray


def cut_windows(texts: Sequence[SourceText], seq_len: int, eot_id: int) -> Windows:
    """Every token is a target exactly once; a row begins with the token before its first target, a source with EOT.

    The end of text is fed to the model, but not counted: it stands for no byte of text. Short rows are filled with it.
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
    return Windows(np.concatenate(inputs), all_targets, all_targets != eot_id, np.concatenate(source))


def unigram_nats(folder: Path, manifest: TokenManifest) -> np.ndarray:
    """-log p of every token id under its frequency in the training tokens, add-one smoothed: float64 [vocab_size]."""
    shards = manifest.shards[:: -(-len(manifest.shards) // UNIGRAM_SHARDS) or 1]
    share = max(UNIGRAM_TOKENS // max(len(shards), 1), 2)
    counts = np.ones(manifest.vocab_size, np.int64)
    for shard in shards:
        if shard.tokens >= 2:
            counts += np.bincount(first_tokens(folder, manifest, shard, share), minlength=manifest.vocab_size)
    return np.log(counts.sum()) - np.log(counts)
