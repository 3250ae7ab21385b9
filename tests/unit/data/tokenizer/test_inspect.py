import pytest

from ingot.data.tokenizer.bpe import train_bpe
from ingot.data.tokenizer.inspect import describe, train_on
from ingot.errors import DataError, UsageError


def test_a_description_shows_the_pieces(tmp_path):
    path = train_bpe(["the cat sat on the mat " * 30], 270, tmp_path / "t.json")
    shown = describe(path, "the cat")
    assert "".join(shown.pieces) == "the cat"
    assert shown.bytes_per_token == round(7 / len(shown.pieces), 3)
    assert (shown.engine, shown.end_of_text, shown.end_of_text_id) == ("tiktoken", "<|endoftext|>", 0)
    assert describe(path).pieces


def test_training_on_text_files_equals_training_on_their_text(tmp_path):
    text = "one line\n\n\n  another line\n" * 40
    (tmp_path / "a.txt").write_text(text)
    first = train_on([tmp_path / "a.txt"], 280, tmp_path / "a.json")
    assert first.read_bytes() == train_bpe([text], 280, tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_path_that_is_neither_text_nor_corpus_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="neither a text file nor a corpus"):
        train_on([tmp_path / name], 280, tmp_path / "t.json")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"ab\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        train_on([tmp_path / "a.bin"], 280, tmp_path / "t.json")
