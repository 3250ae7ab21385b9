import random
import struct

import pytest
from tests.expect import refused

from ingot.data.sources.bounded import Limits, Window
from ingot.data.sources.parquet import (
    _FOOTER,
    _PAGE,
    BadParquet,
    PageHeader,
    _most_bytes,
    _Thrift,
    read_footer,
    read_pages,
    read_parquet,
)
from ingot.data.sources.text import Fields

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

LIMITS = Limits()


def read(path, limits=LIMITS, **fields):
    return list(read_parquet(path, path.name, "books", limits, Fields(**fields)))


def outcomes(pairs):
    return [drop.rule.removeprefix("read.") if drop else document.raw.decode() for document, drop in pairs]


@pytest.fixture
def write(tmp_path):
    def run(columns, name="x.parquet", **options):
        parquet.write_table(arrow.table(columns), tmp_path / name, **options)
        return tmp_path / name

    return run


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_rows_in_order_over_row_groups(write, compression, version):
    texts = [f"text number {n}" for n in range(2500)]
    path = write(
        {"text": texts, "url": [f"http://a.example/{n}" for n in range(2500)], "junk": [b"x" * 100] * 2500},
        row_group_size=700,
        compression=compression,
        data_page_version=version,
    )
    pairs = read(path)
    assert outcomes(pairs) == texts
    assert pairs[1999][0].url == "http://a.example/1999" and pairs[1999][0].record_id == "row-1999"


def test_nested_fields_nulls_and_types(write):
    path = write(
        {
            "meta": [{"body": "one", "lang": "de"}, {"body": None, "lang": "en"}, None, {"body": " ", "lang": None}],
            "id": [11, 12, 13, None],
            "large": arrow.array(["a"] * 4, arrow.large_string()),
            "bytes": [b"caf\xc3\xa9", b"\xff\xfe", b"c", b"d"],
        }
    )
    pairs = read(path, text="meta.body", language="meta.lang")
    assert outcomes(pairs) == ["one", "bad_row", "bad_row", "empty_body"]
    assert [d.record_id for d, _ in pairs] == ["11", "12", "13", "row-3"] and pairs[0][0].language == "de"
    assert outcomes(read(path, text="large")) == ["a"] * 4
    assert outcomes(read(path, text="bytes")) == ["café", "bad_row", "c", "d"]


def test_column_that_is_not_there_names_those_that_are(write):
    path = write({"content": ["a"], "name": ["b"]})
    with refused("E-PARQUET-COLUMN", column="text", columns=["content", "name"]):
        read(path)
    for name in ("content.x", "no.content"):
        with refused("E-PARQUET-COLUMN", column=name):
            read(path, text=name)
    assert outcomes(read(path, text="content", url="nope", id="nope", language="nope")) == ["a"]


def test_no_parquet_and_no_footer(tmp_path, write):
    (tmp_path / "y").write_bytes(b"PK\x03\x04" + bytes(50))
    with refused("E-PARQUET-MAGIC"):
        read(tmp_path / "y")
    data = write({"text": ["a"] * 100}).read_bytes()
    for cut in (5, 40, len(data) // 2, len(data) - 1):
        (tmp_path / "z").write_bytes(data[:cut])
        assert outcomes(read(tmp_path / "z")) == ["truncated_file"]
    (tmp_path / "z").write_bytes(data[:-8] + struct.pack("<I", 1 << 30) + b"PAR1")
    assert outcomes(read(tmp_path / "z")) == ["truncated_file"]
    assert outcomes(read(write({"text": arrow.array([], arrow.string())}))) == ["empty_body"]


def test_pages_are_read_as_pyarrow_wrote_them(write):
    texts = [f"{n} " * 300 for n in range(3000)]
    path = write({"text": texts}, use_dictionary=False, compression="none", data_page_size=1 << 16)
    with Window(path) as file:
        ((chunk,),) = [group.chunks for group in read_footer(file)]
        pages = read_pages(file, chunk, LIMITS)
    assert len(pages) > 2 and sum(page.values for page in pages) == 3000
    assert 0 <= sum(page.size for page in pages) - sum(len(text) + 4 for text in texts) < 100 * len(pages)
    assert all(page.size < 1 << 21 and not page.dictionary for page in pages)
    path = write({"text": ["same", "other"] * 500})
    with Window(path) as file:
        pages = read_pages(file, read_footer(file)[0].chunks[0], LIMITS)
    assert [page.dictionary for page in pages] == [True, False] and pages[1].values == 1000


def test_footer_says_what_pyarrow_says(write):
    table = {"text": [f"{n}" for n in range(900)], "meta": [{"url": "x", "n": n} for n in range(900)]}
    path = write(table, row_group_size=400, compression="zstd")
    theirs = parquet.ParquetFile(path).metadata
    with Window(path) as file:
        groups = read_footer(file)
    assert [group.rows for group in groups] == [400, 400, 100]
    for number, group in enumerate(groups):
        columns = [theirs.row_group(number).column(index) for index in range(3)]
        assert [c.path for c in group.chunks] == [c.path_in_schema for c in columns] == ["text", "meta.url", "meta.n"]
        starts = [min(c.data_page_offset, c.dictionary_page_offset or c.data_page_offset) for c in columns]
        assert [c.start for c in group.chunks] == starts
        assert [c.end - c.start for c in group.chunks] == [c.total_compressed_size for c in columns]


def test_bombs_cost_their_row_group(write):
    bomb, good = "x" * (80 << 20), "good"
    path = write(
        {"text": [good, bomb, good]}, row_group_size=1, use_dictionary=False, compression="zstd", write_statistics=False
    )
    assert path.stat().st_size < 1 << 20
    pairs = read(path)
    assert outcomes(pairs) == ["good", "too_large", "good"]
    assert "row group 1, 0 of 1 rows" in pairs[1][1].value and pairs[2][0].record_id == "row-2"


def test_dictionary_that_expands_is_read_few_rows_at_once(write):
    """150 rows of 1 MB each that share one value."""
    path = write({"text": ["y" * (1 << 20)] * 150}, compression="none", dictionary_pagesize_limit=1 << 22)
    assert path.stat().st_size < 4 << 20
    count = sum(1 for document, _ in read_parquet(path, "x", "s", LIMITS, Fields()) if len(document.raw) == 1 << 20)
    assert count == 150


def test_damage_costs_a_row_group(write):
    random.seed(5)
    texts = ["".join(random.choices("abcdefgh ", k=400)) for _ in range(400)]
    path = write({"text": texts}, row_group_size=100, use_dictionary=False, compression="zstd")
    data = bytearray(path.read_bytes())
    chunk = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    data[chunk.data_page_offset + 60 : chunk.data_page_offset + 5000] = bytes(4940)
    path.write_bytes(bytes(data))
    found = outcomes(read(path))
    assert [found.count(text) for text in texts[:100] + texts[200:]] == [1] * 300
    assert found.count("bad_row_group") == 1 and len(found) == 301


def test_most_bytes_of_neighbouring_rows():
    pages = [
        PageHeader(100, 10, False),
        PageHeader(10, 10, False),
        PageHeader(500, 1, False),
        PageHeader(10, 10, False),
    ]
    assert _most_bytes(pages, 1) == 500 and _most_bytes(pages, 2) == 510 and _most_bytes(pages, 3) == 520
    assert _most_bytes(pages, 12) == 610 and _most_bytes(pages, 13) == 620 and _most_bytes(pages, 99) == 620
    assert _most_bytes([PageHeader(1000, 50, True), PageHeader(8, 10, False)], 4) == 4008
    assert _most_bytes([], 7) == 0


@pytest.mark.parametrize(
    "data", [b"\x19" * 4000, b"\x1c" * 4000, b"\x15" + b"\xff" * 30, b"\x1b", b"\x19\xff\xff\xff\xff\x0f"]
)
def test_hostile_headers_end(data):
    for wanted in (_PAGE, _FOOTER):
        with pytest.raises((BadParquet, IndexError)):
            _Thrift(data).struct(wanted)
