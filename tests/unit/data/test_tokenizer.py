import gzip

import pytest
from tests.expect import refused

from ingot.data.build.corpus_build import build_corpus
from ingot.data.build.recipe import load_recipe
from ingot.data.sources.input import Input
from ingot.data.tokenizer import describe, train_on
from ingot.tokenizer.byte_bpe import train_bpe


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


def test_the_folder_around_a_corpus_is_as_good_as_the_corpus(tmp_path):
    crawl = tmp_path / "crawl.warc.gz"
    lines = [f"the {n} people of the city and that river {n * 7} would be there" for n in range(30)]
    pages = "".join(f"<p>{line}.</p>" for line in lines)
    block = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html><body>{pages}</body></html>".encode()
    head = (
        "WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a.example/\r\n"
        f"Content-Type: application/http\r\nContent-Length: {len(block)}\r\n\r\n"
    )
    crawl.write_bytes(gzip.compress(head.encode() + block + b"\r\n\r\n"))
    sections = ("language", "quality.gopher", "quality.gopher_repetition", "quality.c4", "quality.fineweb", "toxicity")
    recipe = load_recipe(None, [f"{section}.enabled=false" for section in sections])
    build_corpus([Input(location=str(crawl))], tmp_path / "data" / "corpus", recipe)
    around = train_on([tmp_path / "data"], 270, tmp_path / "a.json")
    assert around.read_bytes() == train_on([tmp_path / "data" / "corpus"], 270, tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_path_that_is_neither_text_nor_corpus_is_refused(tmp_path, name):
    with refused("E-TOKENIZER-INPUT", path=str(tmp_path / name)):
        train_on([tmp_path / name], 280, tmp_path / "t.json")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"ab\xff\xfe")
    with refused("E-TEXT-ENCODING"):
        train_on([tmp_path / "a.bin"], 280, tmp_path / "t.json")
