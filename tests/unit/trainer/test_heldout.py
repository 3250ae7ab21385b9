import math
from dataclasses import replace

import numpy as np
import pytest
from tests.expect import refused

from ingot.schema.tokens import read_token_manifest
from ingot.tokenizer.encoder import load_encoder
from ingot.trainer import heldout as heldout_module
from ingot.trainer.heldout import SourceText, cut_rows, first_tokens, read_heldout, unigram_nats


@pytest.fixture
def heldout(token_folders):
    folder = token_folders / "heldout"
    return folder, read_token_manifest(folder), load_encoder(token_folders / "tokenizer.json")


def test_everything_is_read_when_it_fits(heldout):
    folder, manifest, _ = heldout
    texts = read_heldout(folder, manifest, 10**6, None)
    assert [t.source for t in texts] == ["metal", "stone"]
    assert sum(len(t.ids) for t in texts) == manifest.tokens
    assert sum(t.text_bytes for t in texts) == manifest.text_bytes


@pytest.mark.parametrize("max_tokens", [1, 30, 100, 200, 400])
def test_a_part_is_whole_documents_and_counts_their_bytes(heldout, max_tokens):
    folder, manifest, encoder = heldout
    for text in read_heldout(folder, manifest, max_tokens, encoder):
        assert text.ids[-1] == manifest.eot_id
        assert text.text_bytes == len(encoder.decode(text.ids[text.ids != manifest.eot_id]).encode())
        first_document = int(np.flatnonzero(text.ids == manifest.eot_id)[0]) + 1
        assert len(text.ids) <= max(max_tokens // 2, first_document)


def test_a_part_needs_the_tokenizer(heldout):
    folder, manifest, _ = heldout
    with refused("E-TOKENIZER-UNSET"):
        read_heldout(folder, manifest, 100, None)


def test_damage_is_noticed(heldout, tmp_path):
    import shutil

    folder, manifest, _ = heldout
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    path = copy / "metal.tokens"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with refused("E-SHARD-HASH"):
        first_tokens(copy, manifest, manifest.shards[0], 10)


def test_every_text_token_is_a_target_once():
    texts = [SourceText("a", np.array([5, 6, 7, 0, 8, 9, 0]), 20), SourceText("b", np.array([4, 0]), 3)]
    windows = cut_rows(texts, seq_len=3, eot_id=0)
    assert windows.inputs.tolist() == [[0, 5, 6], [7, 0, 8], [9, 0, 0], [0, 4, 0]]
    assert windows.targets.tolist() == [[5, 6, 7], [0, 8, 9], [0, 0, 0], [4, 0, 0]]
    assert windows.targets[windows.counted].tolist() == [5, 6, 7, 8, 9, 4]
    assert windows.source.tolist() == [0, 0, 0, 1]


def test_unigram_is_a_smoothed_distribution(token_folders):
    folder = token_folders / "train"
    manifest = read_token_manifest(folder)
    nats = unigram_nats(folder, manifest)
    assert np.exp(-nats).sum() == pytest.approx(1.0)
    assert np.isfinite(nats).all()
    ids = np.concatenate([np.fromfile(folder / f"{s.name}.tokens", "<u2") for s in manifest.shards])
    count = int((ids == manifest.eot_id).sum())
    assert nats[manifest.eot_id] == pytest.approx(-math.log((count + 1) / (len(ids) + manifest.vocab_size)))


def test_unigram_of_many_shards_opens_few(token_folders, monkeypatch):
    folder, opened = token_folders / "train", []
    manifest = read_token_manifest(folder)
    many = replace(manifest, shards=manifest.shards * 500)
    monkeypatch.setattr(heldout_module, "first_tokens", lambda *a: opened.append(a[2].name) or np.zeros(2, np.int64))
    unigram_nats(folder, many)
    assert len(opened) == 63  # every sixteenth of a thousand


def test_a_shard_without_an_end_of_text_is_an_error(heldout):
    folder, manifest, encoder = heldout
    with refused("E-SHARD-NO-EOT"):
        read_heldout(folder, replace(manifest, eot_id=999, vocab_size=1000), 10, encoder)
