import pytest

from ingot.errors import ConfigError, DataError
from ingot.tokenizer.byte_bpe import EOT, train_bpe
from ingot.tokenizer.encoder import load_encoder

TEXTS = ["the cat and the hat and the bat\n" * 20, "counting 1 22 333 4444 55555\n" * 20, "naïve café\n" * 20]


def test_training_twice_and_in_another_order_gives_the_same_file(tmp_path):
    first = train_bpe(TEXTS, 300, tmp_path / "a.json")
    second = train_bpe(reversed(TEXTS), 300, tmp_path / "b.json")
    assert first.read_bytes() == second.read_bytes()


def test_the_vocabulary_has_all_bytes_and_digits_come_in_threes(tmp_path):
    encoder = load_encoder(train_bpe(TEXTS, 280, tmp_path / "t.json"))
    assert (encoder.vocab_size, encoder.eot) == (280, EOT)
    everything = bytes(range(256)).decode("latin-1")
    assert encoder.decode(encoder.encode(everything)) == everything
    pieces = [encoder.decode([i]) for i in encoder.encode("55555").tolist()]
    assert max(map(len, pieces)) <= 3


def test_a_small_text_gives_a_smaller_vocabulary(tmp_path):
    assert load_encoder(train_bpe(["aaab"], 4096, tmp_path / "t.json")).vocab_size < 300


def test_lone_surrogates_do_not_stop_training(tmp_path):
    assert train_bpe(["a\ud800b" * 3], 260, tmp_path / "t.json").exists()


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_no_text_is_an_error_and_writes_nothing(tmp_path, texts):
    with pytest.raises(DataError, match="no text"):
        train_bpe(texts, 300, tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_below_the_bytes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="vocab_size is 256"):
        train_bpe(TEXTS, 256, tmp_path / "t.json")
