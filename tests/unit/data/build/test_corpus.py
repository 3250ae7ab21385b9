import gzip
import json

import pytest
from tests.expect import refused

from ingot.data.build.corpus import json_line, jsonl_writer, load_corpus, read_documents, read_jsonl, verify_corpus
from ingot.data.build.corpus_build import build_corpus
from ingot.data.sources.input import Input


@pytest.fixture
def corpus(crawl, tmp_path):
    build_corpus([Input(location=str(path)) for path in crawl], tmp_path / "corpus")
    return tmp_path / "corpus"


def test_lines_keep_any_text(tmp_path):
    row = {"text": "naïve 日本 \n\t\u2028 \x00 \udc80", "n": 1}
    with jsonl_writer(tmp_path / "a.jsonl.gz") as write:
        write(json_line(row))
        write(json_line({}))
    assert list(read_jsonl(tmp_path / "a.jsonl.gz")) == [row, {}]
    gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()).decode("utf-8")  # other tools can read it


def test_equal_rows_equal_bytes(tmp_path):
    for name in ("a", "b"):
        with jsonl_writer(tmp_path / name) as write:
            write(json_line({"x": 1}))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_writer_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(ZeroDivisionError), jsonl_writer(tmp_path / "a") as write:
        write(b"x")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_seconds_are_not_part_of_what_is_hashed(corpus):
    assert "seconds" not in json.loads((corpus / "corpus.json").read_text())["funnel"][0]
    assert sum(stage.seconds for stage in load_corpus(corpus).funnel) > 0
    (corpus / "seconds.json").unlink()
    assert sum(stage.seconds for stage in load_corpus(corpus).funnel) == 0


@pytest.mark.parametrize("which", ["parts", "dropped"])
def test_a_flipped_byte_is_found(corpus, which):
    verify_corpus(corpus)
    part = corpus / getattr(load_corpus(corpus), which)[0].name
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with refused("E-CORPUS-HASH", path=str(part)):
        verify_corpus(corpus)


def test_readers_verify_first(corpus):
    part = corpus / load_corpus(corpus).parts[0].name
    part.write_bytes(part.read_bytes()[:-20])
    with refused("E-CORPUS-HASH", path=str(part)):
        next(read_documents(corpus))
    with refused("E-CORPUS-FILE-DAMAGED", path=str(part)):
        list(read_documents(corpus, verify=False))


def test_a_missing_part_is_named(corpus):
    part = corpus / load_corpus(corpus).parts[0].name
    part.unlink()
    for verify in (True, False):
        with refused("E-CORPUS-FILE-MISSING", path=str(part)):
            list(read_documents(corpus, verify=verify))


def test_a_folder_that_is_no_corpus(corpus, tmp_path):
    with refused("E-CORPUS-MISSING", path=str(tmp_path / "absent")):
        load_corpus(tmp_path / "absent")
    for text in ("{", "[]", '{"funnel": 3}'):
        (corpus / "corpus.json").write_text(text)
        with refused("E-CORPUS-MANIFEST", path=str(corpus / "corpus.json")):
            load_corpus(corpus)
    (corpus / "corpus.json").write_text('{"funnel": [], "inputs": {}, "pats": []}')
    with refused("E-CORPUS-MANIFEST", path=str(corpus / "corpus.json"), keys=["pats", "config_sha256", "parts"]):
        load_corpus(corpus)
