"""Token shards on disk: the files that `data` writes and training reads.

A token folder holds `manifest.json` and, per shard NAME:
  NAME.tokens     little-endian uint16 or uint32; documents back to back, each followed by the EOT token
  NAME.blocks     32-byte SHA-256 digests, one per `block_bytes` of NAME.tokens (the last block may be short)
  NAME.documents  the document index: records of DOCUMENT_DTYPE, in order of `start`
  NAME.lineage.parquet  where each document comes from, in the same order; training does not need it
Only the manifest is read at start. It contains the SHA-256 of .blocks, .documents and the lineage, so every byte can be
verified.
A shard holds documents of one source, shuffled at build: reading a shard in order gives them in random order.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from ingot.config import from_dict
from ingot.errors import ConfigError, DataError, DataMissing
from ingot.storage import canonical_json, sha256_bytes

MANIFEST = "manifest.json"

# numpy dtype of one row of NAME.documents: first token (in the shard), number of tokens with EOT, document id
DOCUMENT_DTYPE = [("start", "<u8"), ("tokens", "<u4"), ("id", "V16")]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard. text_bytes: number of UTF-8 bytes that the tokens encode, EOT excluded. lineage_sha256: "" if there is
    no lineage.
    """

    name: str
    source: str
    tokens: int
    documents: int
    text_bytes: int
    blocks_sha256: str
    documents_sha256: str
    lineage_sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class TokenManifest:
    """The manifest of a token folder."""

    version: int = 1
    dtype: str  # "uint16" or "uint32"
    vocab_size: int
    eot_id: int
    tokenizer_sha256: str
    corpus_sha256: str  # hash of the corpus.json that was encoded, which leads back to the crawl
    split: str  # "train" or "heldout"
    block_bytes: int
    seed: int  # seed of the shuffle at build
    heldout_fraction: float = 0.0  # share of the documents that are held out; 0: not recorded
    shard_bytes: int = 0  # requested limit of a shard's size; 0: not recorded
    shards: tuple[Shard, ...]

    def problems(self):
        if self.version != 1:
            yield "version", f"is {self.version}, this ingot reads version 1"
        if not 0 <= self.eot_id < self.vocab_size:
            yield "eot_id", f"is {self.eot_id}, must be an id below vocab_size = {self.vocab_size}"
        if self.block_bytes < 4 or self.block_bytes % 4:
            yield "block_bytes", f"is {self.block_bytes}, must be a multiple of 4: blocks hold whole tokens"
        if self.dtype not in ("uint16", "uint32"):
            yield "dtype", f"{self.dtype!r} must be 'uint16' or 'uint32'"
        if self.dtype == "uint16" and self.vocab_size > 65_536:
            yield "dtype", f"uint16 holds ids up to 65,535, but vocab_size is {self.vocab_size:,}; use uint32"

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.shards)

    @property
    def text_bytes(self) -> int:
        return sum(s.text_bytes for s in self.shards)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(sorted({s.source for s in self.shards}))

    def fingerprint(self) -> str:
        """Return a hash of the manifest without lineage. It identifies the token stream: equal fingerprints give the
        same order of samples.
        """
        # Same result as to_dict, but ten times faster for 10,000 shards: both classes are flat and contain no None.
        shards = [{k: v for k, v in vars(shard).items() if k != "lineage_sha256"} for shard in self.shards]
        values = vars(self) | {"shards": shards}
        return sha256_bytes(canonical_json(values).encode())


def token_manifest_from_dict(values: dict, where: str) -> TokenManifest:
    return from_dict(TokenManifest, values, where=lambda key: f"{where} ({key})")


def training_tokens(folder: Path) -> Path:
    """Return the token folder to train on, from DATA (`ingot data build --out DATA`), DATA/tokens or
    DATA/tokens/train.
    """
    for tokens in (folder, folder / "train", folder / "tokens" / "train"):
        if (tokens / MANIFEST).exists():
            return tokens
    return folder


def read_token_manifest(folder: Path) -> TokenManifest:
    """Return the manifest of a token folder without reading anything else.

    Raises DataMissing if the folder is not a token folder, and DataError if it is damaged: if it has shards without a
    manifest, or a broken manifest.
    """
    path = folder / MANIFEST
    fix = "build it with: ingot data build FILES... --out DIR"
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
    except (FileNotFoundError, NotADirectoryError):
        kind = DataError if any(folder.glob("*.tokens")) else DataMissing
        raise kind(
            "E-TOKENS-UNFINISHED" if kind is DataError else "E-TOKENS-MISSING",
            f"{folder} is not a token folder: no {MANIFEST}",
            rule="the manifest is written last, so a folder without a manifest was never finished",
            fix=fix,
            folder=str(folder),
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(
            "E-TOKENS-MANIFEST",
            f"{path} cannot be read ({error})",
            rule="a token folder has a manifest in JSON",
            fix=fix,
            path=str(path),
        ) from None
    try:
        return token_manifest_from_dict(values, str(path))
    except ConfigError as error:
        raise DataError(
            "E-TOKENS-MANIFEST",
            error.found,
            rule="ingot writes this file; do not edit it",
            fix=fix,
            **error.facts | {"path": str(path)},
        ) from None


def check_vocabulary(manifest: TokenManifest, vocab_size: int) -> None:
    """Raise ConfigError unless a model with `vocab_size` rows can embed every token of the folder."""
    if manifest.vocab_size > vocab_size:
        raise ConfigError(
            "E-VOCABULARY-SMALL",
            f"the tokens use ids below {manifest.vocab_size:,}, but model.vocab_size is {vocab_size:,}",
            rule="every token has a row in the embedding",
            fix=f"set model.vocab_size to at least {manifest.vocab_size}, or train on tokens of the other tokenizer",
            needed=manifest.vocab_size,
            vocab_size=vocab_size,
        )
