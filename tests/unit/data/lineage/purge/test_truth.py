"""Planted pages that must be gone: built from real crawl files, purged by their marker, looked for in every byte."""

import gzip
import json

import numpy as np

from ingot.data.build.prepare import prepare
from ingot.data.lineage.purge.purge import purge
from ingot.data.lineage.purge.request import PurgeRequest
from ingot.data.lineage.verify import verify_tokens
from ingot.data.sources.input import Input
from ingot.schema.tokens import read_token_manifest
from ingot.tokenizer.encoder import load_encoder


def test_planted_markers_are_gone(test_data, tmp_path):
    lines = (test_data / "truth_warc.jsonl").read_text().splitlines()
    planted = [one for one in map(json.loads, lines) if one["kind"] == "purge_target"]
    mine = [one for one in planted if one["file"] == 0]
    crawl = test_data / "warc" / "shared-00000.warc.gz"
    data = tmp_path / "data"
    prepare([Input(location=str(crawl))], data, vocab_size=2048)
    markers = [one["marker"] for one in mine]
    before = b"".join(texts(data))
    assert all(marker.encode() in before for marker in markers)
    outcome = purge(data, PurgeRequest(pattern="|".join(markers)))
    assert {target.url for target in outcome.targets.records} == {one["url"] for one in mine}
    after = b"".join(texts(data))
    assert not any(marker.encode() in after for marker in markers)
    assert len(after) > 0.9 * len(before)
    for split in ("train", "heldout"):
        verify_tokens(data / "tokens" / split)


def texts(data):
    """Every text of the folder: parts unchanged, shards decoded."""
    for part in sorted((data / "corpus").glob("*.gz")):
        yield gzip.decompress(part.read_bytes())
    encoder = load_encoder(data / "tokens" / "tokenizer.json")
    for split in ("train", "heldout"):
        for shard in read_token_manifest(data / "tokens" / split).shards:
            yield encoder.decode(np.fromfile(data / "tokens" / split / f"{shard.name}.tokens", "<u2")).encode()
