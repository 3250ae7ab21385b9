"""A folder as `data build --out` leaves it, made by hand: every byte of it is known to the test."""

import dataclasses
import gzip
import hashlib
import importlib.util
import random
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from ingot.config import to_dict
from ingot.data.build.corpus import json_line
from ingot.data.lineage.records import text_hash, write_lineage, write_shard_lineage
from ingot.data.lineage.verify import block_digests
from ingot.schema.corpus import CorpusManifest, CorpusPart, FunnelStage, document_id
from ingot.schema.tokens import DOCUMENT_DTYPE, Shard, TokenManifest
from ingot.storage import sha256_file, write_atomic, write_json
from ingot.tokenizer.byte_bpe import train_bpe
from ingot.tokenizer.encoder import load_encoder

WORDS = ["river", "stone", "cloud", "bridge", "lamp", "winter", "garden", "window", "letter", "morning", "music"]


def page(number, url, *, source="web", file=0, text=None, drop=None, seed=0):
    """A record. drop: (stage, rule, value)."""
    pick = random.Random(f"{seed} {number}")
    text = text or " ".join(pick.choices(WORDS, k=pick.randrange(30, 90))) + f" number {number}."
    name = f"{source}-{file}.warc.gz"
    return {
        "id": document_id(name, str(number), url), "url": url, "source": source, "file": name, "number": file,
        "record_id": str(number), "text": text, "drop": drop,
    }  # fmt: skip


def crawl(seed=0, pages=60):
    """Records of two sources in three crawl files: four hosts, some dropped, a copy of each kind."""
    made = []
    for number in range(pages):
        file, source = number % 3, "books" if number % 3 == 2 else "web"
        host = ("a.example", "b.example", "sub.b.example", "xb.example")[number % 4]
        drop = ("gopher", "gopher.word_count", f"{number % 7} < 50") if number % 5 == 4 else None
        made.append(page(number, f"https://{host}/p/{number}", source=source, file=file, drop=drop, seed=seed))
    like = made[0]
    value = f"0.912 with {like['id']}"
    drop = ("near_duplicates", "near_duplicates.similar", value)
    made.append(page(900, "https://mirror.example/1", file=1, text=like["text"] + " twice", drop=drop))
    drop = ("duplicates", "duplicates.same_text", f"as {like['id']}")
    made.append(page(902, "https://copy.example/1", file=1, text=like["text"], drop=drop))
    drop = ("url", "url.duplicate", like["url"])
    made.append(page(901, like["url"] + "?utm_source=x", file=1, drop=drop))
    return made


def _row(record):
    kept, text = record["drop"] is None, record["text"]
    stage, rule, value = record["drop"] or ("", "", "")
    return {name: record[name] for name in ("id", "url", "source", "file", "record_id")} | {
        "language": "en", "text": text if kept else text[:300], "before": text_hash(text + " before"),
        "before_bytes": len(text) + 7, "after": text_hash(text) if kept else "",
        "after_bytes": len(text.encode()) if kept else 0, "stage": stage, "rule": rule, "value": value,
        "notes": {"encoding": "utf-8", "language_score": 0.97},
    }  # fmt: skip


def _shard_of(record):
    place = hashlib.blake2b(record["id"].encode(), digest_size=2).digest()
    return ("heldout" if place[0] < 40 else "train"), place[1] % 2


def _write_part(path, rows):
    with path.open("wb") as file, gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
        for row in rows:
            packed.write(json_line(row))


def _fields(kind, **values):
    """`kind` with those of `values` that it has: the schemas grow."""
    return kind(**{k: v for k, v in values.items() if k in {f.name for f in dataclasses.fields(kind)}})


def _naming_none_of(without, record):
    """The record, with zeros where it says to be a copy of one that is not there."""
    stage, rule, value = record["drop"] or ("", "", "")
    if value[-32:] not in without:
        return record
    return record | {"drop": (stage, rule, value[:-32] + "0" * 32)}


def make_folder(root: Path, records, tokenizer: Path, without=frozenset()) -> Path:
    """Write root/corpus and root/tokens from all `records` but those whose id is in `without`."""
    corpus, tokens = root / "corpus", root / "tokens"
    corpus.mkdir(parents=True)
    (tokens / "train").mkdir(parents=True)
    (tokens / "heldout").mkdir()
    write_atomic(tokens / "tokenizer.json", tokenizer.read_bytes())
    present = [_naming_none_of(without, record) for record in records if record["id"] not in without]
    parts, dropped, lineage = [], [], []
    for number, source in sorted({(r["number"], r["source"]) for r in records}):
        rows, count = [], 0
        mine = [_row(r) for r in present if r["number"] == number]
        name = f"{source}-{number:05d}.jsonl.gz"
        for row in mine:
            kept = not row["rule"]
            rows.append(row | {"part": name if kept else "", "row": count if kept else -1})
            count += kept
        for listed, part, chosen in (
            (parts, name, [r for r in mine if not r["rule"]]),
            (dropped, f"dropped-{number:05d}.jsonl.gz", [r for r in mine if r["rule"]]),
        ):
            if chosen:
                _write_part(corpus / part, chosen)
                size = sum(len(r["text"].encode()) for r in chosen)
                sha256 = sha256_file(corpus / part)
                listed.append(
                    CorpusPart(name=part, source=source, documents=len(chosen), text_bytes=size, sha256=sha256)
                )
        lineage.append(write_lineage(corpus / f"lineage-{number:05d}.parquet", rows))
    counts = Counter(r["drop"][:2] for r in present if r["drop"])
    left, funnel = len(present), []
    for stage in ("url", "gopher", "duplicates", "near_duplicates"):
        lost = {rule: n for (name, rule), n in counts.items() if name == stage}
        row = FunnelStage(name=stage, ran="x", documents_in=left, documents_out=left - sum(lost.values()), dropped=lost)
        funnel.append(row)
        left = row.documents_out
    manifest = _fields(
        CorpusManifest, inputs={}, config_sha256="0" * 64, parts=tuple(parts), dropped=tuple(dropped),
        funnel=tuple(funnel), lineage=tuple(lineage),
    )  # fmt: skip
    write_json(corpus / "corpus.json", to_dict(manifest))
    encoder = load_encoder(tokenizer)
    for split in ("train", "heldout"):
        _write_split(tokens / split, split, present, encoder, sha256_file(corpus / "corpus.json"))
    return root


def _write_split(folder, split, records, encoder, corpus_sha256):
    by_shard = defaultdict(list)
    for record in records:
        if record["drop"] is None and _shard_of(record)[0] == split:
            by_shard[record["source"], _shard_of(record)[1]].append(record)
    shards = []
    for (source, number), mine in sorted(by_shard.items()):
        mine.sort(key=lambda r: hashlib.sha256(r["id"].encode()).digest())
        name = f"{source}-{number:05d}"
        ids = [np.append(encoder.encode(r["text"]), encoder.eot_id).astype("<u2") for r in mine]
        write_atomic(folder / f"{name}.tokens", np.concatenate(ids).tobytes())
        index = np.zeros(len(mine), DOCUMENT_DTYPE)
        index["tokens"] = [len(one) for one in ids]
        index["start"] = np.cumsum(index["tokens"]) - index["tokens"]
        index["id"] = np.frombuffer(b"".join(bytes.fromhex(r["id"]) for r in mine), "V16")
        blocks = block_digests(folder / f"{name}.tokens", 4096)
        write_atomic(folder / f"{name}.documents", index.tobytes())
        write_atomic(folder / f"{name}.blocks", blocks)
        rows = [
            _row(r) | {"start": int(i["start"]), "tokens": int(i["tokens"])} for r, i in zip(mine, index, strict=True)
        ]
        shards.append(
            _fields(
                Shard, name=name, source=source, tokens=int(index["tokens"].sum()), documents=len(mine),
                text_bytes=sum(len(r["text"].encode()) for r in mine), blocks_sha256=hashlib.sha256(blocks).hexdigest(),
                documents_sha256=hashlib.sha256(index.tobytes()).hexdigest(),
                lineage_sha256=write_shard_lineage(folder / f"{name}.lineage.parquet", rows),
            )
        )  # fmt: skip
    manifest = TokenManifest(
        dtype="uint16", vocab_size=encoder.vocab_size, eot_id=encoder.eot_id, tokenizer_sha256=encoder.sha256,
        corpus_sha256=corpus_sha256, split=split, block_bytes=4096, seed=1, shards=tuple(shards),
    )  # fmt: skip
    write_json(folder / "manifest.json", to_dict(manifest))


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """This module's functions, and `tokenizer`: test modules cannot import one another."""
    spec = importlib.util.spec_from_file_location("folders", __file__)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    vars(module)["tokenizer"] = train_bpe((record["text"] for record in crawl()), 300, path)
    return module
