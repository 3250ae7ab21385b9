"""Lineage files: every record, equal bytes for equal rows, found again by any spelling of what is known."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.expect import refused

from ingot.data.lineage import records as lineage
from ingot.data.lineage.records import (
    copies_of,
    domain_of,
    find,
    host_of,
    read_lineage,
    rows_of,
    text_hash,
    url_hash,
    write_lineage,
    write_shard_lineage,
)
from ingot.data.sources.url import canonical_url
from ingot.storage import sha256_file


def row(number, url="", **more):
    base = {"id": f"{number:032x}", "url": url, "source": "web", "file": "f.warc.gz", "record_id": f"r{number}"}
    return base | {"language": "en", "stage": "", "rule": "", "value": "", "text": "never stored"} | more


def test_what_is_written_is_read(tmp_path):
    rows = [
        row(1, "https://A.example:443/x?utm_source=y", before="0" * 32, before_bytes=9, notes={"b": 1, "a": "é"}),
        row(2, "not a url \ud800", stage="read", rule="read.status", value="404", part="", row=-1),
        row(3, "https://a.example/x", part="web-00000.jsonl.gz", row=0),
    ]
    part = write_lineage(tmp_path / "lineage-00000.parquet", rows)
    assert (part.name, part.records) == ("lineage-00000.parquet", 3)
    assert part.sha256 == sha256_file(tmp_path / part.name)
    found = list(read_lineage(tmp_path / part.name))
    assert [list(one) for one in found] == [list(lineage.RECORD_COLUMNS)] * 3
    assert found[0]["notes"] == '{"a":"é","b":1}' and found[0]["domain"] == "a.example"
    assert found[0]["url_hash"] == found[2]["url_hash"] == url_hash("https://a.example/x")
    assert found[1]["url"] == "not a url \\ud800" and found[1]["domain"] == "" and found[1]["row"] == -1
    assert "never stored" not in (tmp_path / part.name).read_bytes().decode("latin-1")


def test_equal_rows_give_equal_bytes_in_bounded_groups(tmp_path, monkeypatch):
    import pyarrow.parquet as parquet

    monkeypatch.setattr(lineage, "GROUP_ROWS", 10)
    rows = [row(number, f"https://h{number % 3}.example/{number}") for number in range(35)]
    one = write_lineage(tmp_path / "one.parquet", rows)
    two = write_lineage(tmp_path / "two.parquet", iter(rows))
    assert one.sha256 == two.sha256
    facts = parquet.ParquetFile(tmp_path / "one.parquet").metadata
    assert [facts.row_group(i).num_rows for i in range(facts.num_row_groups)] == [10, 10, 10, 5]
    assert write_lineage(tmp_path / "none.parquet", []).records == 0
    assert list(read_lineage(tmp_path / "none.parquet")) == []


def test_texts_do_not_wait_in_memory(tmp_path):
    import tracemalloc

    tracemalloc.start()
    write_lineage(tmp_path / "lineage-00000.parquet", (row(n, text="x" * 100_000) for n in range(1000)))
    write_shard_lineage(tmp_path / "x.lineage.parquet", (row(n, text="x" * 100_000) for n in range(1000)))
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def test_of_a_shard(tmp_path):
    rows = [row(n, "http://b.example/", start=10 * n, tokens=10, before="b", after="a") for n in range(3)]
    sha256 = write_shard_lineage(tmp_path / "web-0.lineage.parquet", rows)
    assert sha256 == sha256_file(tmp_path / "web-0.lineage.parquet")
    found = list(read_lineage(tmp_path / "web-0.lineage.parquet"))
    assert [(one["start"], one["tokens"], one["domain"]) for one in found] == [
        (n * 10, 10, "b.example") for n in range(3)
    ]


@pytest.fixture
def folder(tmp_path):
    """Two crawl files below a folder whose name is a glob pattern."""
    corpus = tmp_path / "d[a]ta*" / "corpus"
    corpus.mkdir(parents=True)
    urls = ["https://a.example/p", "https://a.example/p/q", "https://a.example/pq", "https://www.a.example/", ""]
    write_lineage(corpus / "lineage-00000.parquet", [row(0xABCDEF00 + n, url) for n, url in enumerate(urls)])
    like, same = f"0.93 with {0xABCDEF00:032x}", {"stage": "url", "rule": "url.duplicate"}
    dropped = [
        row(20, "https://xa.example/", stage="near_duplicates", rule="near_duplicates.similar", value=like),
        row(21, "https://a.example/p/?utm_source=z", **same),
        row(22, "https://a.example/other", source="books", **same),
    ]
    write_lineage(corpus / "lineage-00001.parquet", dropped)
    return corpus.parent


def ids(rows):
    return [int(one["id"], 16) for one in rows]


def test_records_are_found(folder):
    first = 0xABCDEF00
    assert ids(find(folder, url="HTTPS://a.example/p#top")) == [first, 21]
    assert ids(find(folder, url="https://a.example/p", under=True)) == [first, first + 1, 21]
    assert ids(find(folder, domain=".A.example.")) == [first, first + 1, first + 2, first + 3, 21, 22]
    assert ids(find(folder, url="no host", under=True)) == []
    assert ids(find(folder, domain="www.a.example")) == [first + 3]
    assert ids(find(folder, doc=f"{first + 2:032x}")) == [first + 2]
    assert ids(find(folder, doc=f"{first:032x}"[:31])) == [first, first + 1, first + 2, first + 3, first + 4]
    assert ids(find(folder, domain="a.example", source="books")) == [22]
    assert ids(find(folder, domain="a.example", limit=2)) == [first, first + 1]
    every = ids(find(folder, url="https://a.example/", under=True))
    assert len(every) > 2 and ids(find(folder, url="https://a.example/", under=True, limit=2)) == every[:2]
    assert ids(rows_of(folder, [f"{21:032x}", f"{first:032x}"])) == [first, 21]
    assert ids(copies_of(folder, [f"{first:032x}"], [url_hash("https://a.example/p")])) == [20, 21]


def test_bad_conditions_are_refused(folder, tmp_path):
    id_, name, empty = "E-DOCUMENT-ID", "E-DOMAIN-NAME", "E-LOOKUP-EMPTY"
    for conditions, code in (({}, empty), ({"doc": "abc"}, id_), ({"doc": "x" * 32}, id_), ({"domain": ". "}, name)):
        with refused(code):
            find(folder, **conditions)
    with refused("E-LINEAGE-MISSING", folder=str(tmp_path)):
        find(tmp_path, doc="0" * 32)


def test_a_damaged_file_is_named_as_data(folder):
    path = folder / "corpus" / "lineage-00001.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with refused("E-LINEAGE-UNREADABLE"):
        find(folder, doc="0" * 32)


@given(st.text(max_size=60))
@example("%A::")  # urlsplit leaves what follows "%" (the zone of an IPv6 address) in upper case
@settings(max_examples=200)
def test_any_url_has_a_domain_and_a_hash(text):
    for url in (text, f"https://{text}/x", f"http://h.example/{text}"):
        canonical = canonical_url(url)
        assert domain_of(canonical) == domain_of(canonical).lower()
        assert (url_hash(canonical) == 0) == (canonical == "")
    assert (text_hash(text) == "") == (text == "")


def test_hosts():
    assert host_of("Bücher.example") == "xn--bcher-kva.example"
    assert host_of("https://a.example:8443/") == host_of("a.example.") == "a.example"
    assert domain_of("http://[::1]:80/x") == "::1"


def test_notes_are_json_whatever_they_hold(tmp_path):
    write_lineage(tmp_path / "lineage-00000.parquet", [row(1, notes={"x": "\ud800\u2028'\"", "n": 0.5})])
    (found,) = read_lineage(tmp_path / "lineage-00000.parquet")
    assert json.loads(found["notes"])["n"] == 0.5
