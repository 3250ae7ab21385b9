import hashlib

import numpy as np
import pytest

from ingot.config import to_dict
from ingot.schema.tokens import DOCUMENT_DTYPE, MANIFEST, Shard, TokenManifest
from ingot.storage import write_json

BLOCK_BYTES = 4096
EOT = 0


def shard_of(name, source, tokens):
    return Shard(
        name=name,
        source=source,
        tokens=tokens,
        documents=1,
        text_bytes=4 * tokens,
        blocks_sha256="",
        documents_sha256="",
    )


@pytest.fixture
def make_manifest():
    """`make_manifest([("web", 1000), ...])`: a manifest without files; one shard per (source, tokens)."""

    def make(shards, *, dtype="uint16", entries=None):
        entries = entries or [shard_of(f"{s}-{i:05d}", s, tokens) for i, (s, tokens) in enumerate(shards)]
        return TokenManifest(
            dtype=dtype,
            vocab_size=1000,
            eot_id=EOT,
            tokenizer_sha256="t",
            corpus_sha256="c",
            split="train",
            block_bytes=BLOCK_BYTES,
            seed=1,
            shards=tuple(entries),
        )

    return make


@pytest.fixture
def token_folder(tmp_path, make_manifest):
    """`token_folder([("web", 1000), ...])`: a folder whose token at position p of shard s is (7 * p + s) % 999 + 1.

    Every 50th token ends a document. Returns (folder, tokens per shard as written).
    """

    def make(shards, *, dtype="uint16", name="tokens"):
        folder = tmp_path / name
        folder.mkdir()
        entries, written = [], []
        for number, (source, count) in enumerate(shards):
            tokens = ((7 * np.arange(count) + number) % 999 + 1).astype(f"<{dtype[0]}{int(dtype[4:]) // 8}")
            tokens[49::50] = tokens[-1] = EOT
            written.append(tokens)
            ends = np.flatnonzero(tokens == EOT) + 1
            index = np.zeros(len(ends), DOCUMENT_DTYPE)
            index["start"], index["tokens"] = np.r_[0, ends[:-1]], np.diff(np.r_[0, ends])
            index["id"] = np.frombuffer(b"".join(hashlib.md5(b"%d" % e).digest() for e in ends), "V16")
            data = tokens.tobytes()
            parts = [data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)]
            blocks = b"".join(hashlib.sha256(part).digest() for part in parts)
            stem = f"{source}-{number:05d}"
            (folder / f"{stem}.tokens").write_bytes(data)
            (folder / f"{stem}.blocks").write_bytes(blocks)
            (folder / f"{stem}.documents").write_bytes(index.tobytes())
            entries.append(
                Shard(
                    name=stem,
                    source=source,
                    tokens=count,
                    documents=len(ends),
                    text_bytes=4 * count,
                    blocks_sha256=hashlib.sha256(blocks).hexdigest(),
                    documents_sha256=hashlib.sha256(index.tobytes()).hexdigest(),
                )
            )
        write_json(folder / MANIFEST, to_dict(make_manifest([], dtype=dtype, entries=entries)))
        return folder, written

    return make
