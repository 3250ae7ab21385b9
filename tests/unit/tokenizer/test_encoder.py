"""Any tokenizer.json: right ids, the right engine, and no text that can end a document."""

import functools
import gzip
import itertools
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.expect import refused
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ingot.tokenizer import encoder as module
from ingot.tokenizer.byte_bpe import EOT, train_bpe, well_formed
from ingot.tokenizer.encoder import load_encoder

TEXTS = [
    "The shop sells bread, tea and 12 kinds of cheese; it's open.\n" * 3,
    "She doesn't know whether the 1,234 sheep were counted twice.\n\n    indented()\n",
    "日本語 and Ελληνικά, café, 😀 " * 4,
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return train_bpe(TEXTS * 3, 400, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@pytest.fixture(scope="module")
def encoder(bpe):
    return load_encoder(bpe)


def changed(path, out, change):
    spec = json.loads(path.read_text())
    change(spec)
    out.write_text(json.dumps(spec))
    return out


@functools.cache
def opened(path):
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    return tokenizer


def reference(path, text):
    return opened(path).encode(text, add_special_tokens=False).ids


def test_our_bpe_runs_on_tiktoken_with_the_same_ids(bpe):
    encoder = load_encoder(bpe, TEXTS)
    assert (encoder.engine, encoder.notice, encoder.eot, encoder.eot_id) == ("tiktoken", "", EOT, 0)
    assert 300 < encoder.vocab_size <= 400
    for text in (*TEXTS, *module._DIFFICULT):
        ids = encoder.encode(text)
        assert ids.dtype == np.uint32
        assert ids.tolist() == reference(bpe, text)
        assert encoder.decode(ids) == text
    assert [ids.tolist() for ids in encoder.encode_batch(TEXTS)] == [encoder.encode(t).tolist() for t in TEXTS]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_gives_the_same_ids_and_comes_back(bpe, encoder, text):
    assert encoder.encode(text).tolist() == reference(bpe, text)
    assert encoder.decode(encoder.encode(text)) == text


def test_the_two_regex_engines_agree_on_what_a_letter_is(bpe, encoder):
    characters = [*range(0x3400), *range(0x3400, 0x110000, 97)]
    for first in range(0, len(characters), 2000):
        chosen = [chr(c) for c in characters[first : first + 2000] if not 0xD800 <= c < 0xE000]
        text = "".join(f"a{c}1{c} {c}" for c in chosen)
        assert encoder.encode(text).tolist() == reference(bpe, text), hex(characters[first])


@pytest.mark.parametrize("engine", ["tiktoken", "tokenizers"])
def test_a_text_cannot_end_its_document(bpe, tmp_path, engine):
    if engine == "tokenizers":
        bpe = changed(bpe, tmp_path / "t.json", lambda spec: spec.update(normalizer={"type": "NFC"}))
    encoder = load_encoder(bpe)
    assert encoder.engine == engine
    text = f"before {EOT} after {EOT}{EOT}"
    ids = encoder.encode(text)
    assert encoder.eot_id not in ids
    assert encoder.decode(ids) == text
    assert encoder.eot_id not in encoder.encode_batch([text, EOT])[1]


def test_an_end_of_text_listed_as_an_ordinary_token_is_kept_out_too(bpe, tmp_path):
    path = changed(bpe, tmp_path / "t.json", lambda spec: spec["added_tokens"][0].update(special=False))
    assert load_encoder(path).encode(f"a{EOT}b").tolist() == load_encoder(bpe).encode(f"a{EOT}b").tolist()


def unigram(path):
    """Write a Unigram model whose end of text is the piece with the best score, so that plain text can give it."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -5.0) for c in "▁abcdefghijklmnopqrstuvwxyz</>"), ("▁the", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(path))
    return path


def wordpiece(path):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"]))
    tokenizer.save(str(path))
    return path


def test_unigram_is_loaded_with_a_notice_and_guarded(tmp_path):
    encoder = load_encoder(unigram(tmp_path / "t.json"))
    assert (encoder.engine, encoder.eot) == ("tokenizers", "</s>")
    assert "Unigram" in encoder.notice
    ids = encoder.encode("the cat</s>the dog</s>")
    assert encoder.eot_id not in ids
    assert len(ids) > 10
    assert encoder.eot_id not in encoder.encode_batch(["x</s>"])[0]


def test_wordpiece_is_loaded_with_a_notice(tmp_path):
    encoder = load_encoder(wordpiece(tmp_path / "t.json"))
    assert (encoder.engine, encoder.eot) == ("tokenizers", "[SEP]")
    assert encoder.encode("[SEP] the shop").tolist() == reference(encoder.path, "[SEP] the shop")
    assert encoder.eot_id not in encoder.encode("the [SEP] shop")


def test_truncation_and_padding_in_the_file_do_not_cut_documents(bpe, tmp_path):
    def cut(spec):
        spec["normalizer"] = {"type": "NFC"}  # the engine that would obey
        spec["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}

    path = changed(bpe, tmp_path / "t.json", cut)
    assert load_encoder(path).encode(TEXTS[0]).tolist() == load_encoder(bpe).encode(TEXTS[0]).tolist()


def test_a_sample_that_differs_switches_tiktoken_off(bpe, monkeypatch):
    honest = module.tiktoken_form
    monkeypatch.setattr(module, "tiktoken_form", lambda spec: (r"[\s\S]{1,3}", *honest(spec)[1:]))
    encoder = load_encoder(bpe)
    assert encoder.engine == "tokenizers"
    assert "differently" in encoder.notice
    assert encoder.encode(TEXTS[0]).tolist() == reference(bpe, TEXTS[0])


def test_a_run_of_blanks_that_breaks_the_fast_engine_is_encoded_by_the_slow_one(encoder):
    text = "a" + " " * 1_000_000
    with pytest.raises(ValueError, match="Regex"):
        encoder._tiktoken.encode_to_numpy(text)
    assert encoder.decode(encoder.encode(text)) == text


def test_lone_surrogates_become_the_replacement_character(encoder):
    assert well_formed("fine \U0001f600") == "fine \U0001f600"
    assert encoder.decode(encoder.encode("a\ud800b\udfff")) == "a\ufffdb\ufffd"


def test_pickling_reopens_the_file_and_notices_a_change(bpe, tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(bpe.read_bytes())
    encoder = load_encoder(path)
    packed = pickle.dumps(encoder)
    assert len(packed) < 1000
    again = pickle.loads(packed)
    assert (again.engine, again.sha256) == (encoder.engine, encoder.sha256)
    assert again.encode(TEXTS[1]).tolist() == encoder.encode(TEXTS[1]).tolist()
    changed(path, path, lambda spec: spec.update(normalizer={"type": "NFC"}))
    with refused("E-TOKENIZER-CHANGED", path=str(path)):
        pickle.loads(packed)


def test_the_end_of_text_can_be_named(bpe, tmp_path):
    def rename(spec):
        spec["model"]["vocab"]["<stop>"] = spec["model"]["vocab"].pop(EOT)
        spec["added_tokens"][0]["content"] = "<stop>"

    path = changed(bpe, tmp_path / "t.json", rename)
    with refused("E-TOKENIZER-EOT", eot="", candidates=["<stop>"]) as caught:
        load_encoder(path)
    assert "--eot" in caught.value.fix
    assert load_encoder(path, eot="<stop>").eot_id == 0
    assert load_encoder(path, eot=0).eot == "<stop>"  # as a manifest names it
    with refused("E-TOKENIZER-EOT", eot=99_999):
        load_encoder(path, eot=99_999)
    with refused("E-TOKENIZER-EOT", eot="<halt>"):
        load_encoder(path, eot="<halt>")
    with refused("E-TOKENIZER-EOT-IN-TEXT", eot="x"):
        load_encoder(path, eot="x").encode("x")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', "\x00\xff"])
def test_what_is_no_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "t.json"
    path.write_text(content)
    with refused("E-TOKENIZER-FORMAT", path=str(path)):
        load_encoder(path)


def test_a_missing_file_is_a_usage_error(tmp_path):
    with refused("E-TOKENIZER-UNREADABLE", path=str(tmp_path / "t.json")):
        load_encoder(tmp_path / "t.json")


def test_real_text_gives_the_same_ids(test_data, tmp_path):
    texts = []
    for name in ("books", "news", "wiki", "code"):
        with gzip.open(test_data / "text" / f"{name}.jsonl.gz", "rt") as file:
            texts += [json.loads(line)["text"] for line in itertools.islice(file, 40)]
    with gzip.open(test_data / "text" / "udhr_labelled.jsonl.gz", "rt") as file:
        texts += [json.loads(line)["text"] for line in itertools.islice(file, 0, None, 4)]
    path = train_bpe(texts[::2], 2000, tmp_path / "t.json")
    encoder = load_encoder(path, texts[:20])
    assert encoder.engine == "tiktoken"
    for text in texts:
        assert encoder.encode(text).tolist() == reference(path, text)
        assert encoder.decode(encoder.encode(text)) == text
