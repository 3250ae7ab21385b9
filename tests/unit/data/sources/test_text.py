import gzip
import io
import json

import pytest
from fastwarc.stream_io import ZstdWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.expect import refused

from ingot.data.sources.bounded import Limits
from ingot.data.sources.text import Fields, pick, read_jsonl, read_text
from ingot.data.sources.unpack import BadStream, Unpacked, lines


def zstd(data):
    out = io.BytesIO()
    writer = ZstdWriter(out)
    writer.write(data)
    writer.close()
    return out.getvalue()


SMALL = Limits(block_bytes=1000, body_bytes=500)
PACKINGS = {"plain": bytes, "gzip": gzip.compress, "zstd": zstd}


def outcomes(pairs):
    return [drop.rule.removeprefix("read.") if drop else document.raw.decode() for document, drop in pairs]


def rows_of(tmp_path, data, limits=SMALL, **fields):
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    return list(read_jsonl(path, "x.jsonl", "books", limits, Fields(**fields)))


@pytest.mark.parametrize("packing", PACKINGS)
def test_text_file_is_one_document(tmp_path, packing):
    path = tmp_path / "a.txt"
    path.write_bytes(PACKINGS[packing]("Ein Müller.\n\nEnde".encode()))
    ((document, drop),) = read_text(path, "a.txt", "books", SMALL)
    assert drop is None and document.raw.decode() == "Ein Müller.\n\nEnde"
    assert (document.content_type, document.url, document.source) == ("text/plain", "file:a.txt", "books")


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "empty_body"),
        (b" \n\t ", "empty_body"),
        (b"x" * 501, "too_large"),
        (gzip.compress(b"x" * 501), "too_large"),
        (gzip.compress(b"text " * 50)[:-9], "truncated_file"),
        (gzip.compress(b"text " * 50)[:-8] + bytes(8), "bad_stream"),
        (gzip.compress(b"text") + b"junk", "bad_stream"),
        (zstd(b"text " * 99)[:-3], "truncated_file"),
        (b"\x7fELF" + bytes(60), "not_text"),
        (b"%PDF-1.4 text", "not_text"),
    ],
)
def test_text_files_that_are_none(tmp_path, data, rule):
    (tmp_path / "a.txt").write_bytes(data)
    assert outcomes(read_text(tmp_path / "a.txt", "a.txt", "books", SMALL)) == [rule]


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_with_mapped_fields(tmp_path, packing):
    rows = [
        {"body": {"content": "one"}, "meta": {"link": "http://a.example/1", "lang": " EN "}, "key": 7},
        {"body.content": "two", "key": "k2"},
        {"body": {"content": "three"}},
    ]
    data = PACKINGS[packing]("\n\n".join(map(json.dumps, rows)).encode())
    pairs = rows_of(tmp_path, data, text="body.content", url="meta.link", id="key", language="meta.lang")
    assert outcomes(pairs) == ["one", "two", "three"]
    documents = [document for document, _ in pairs]
    assert [d.record_id for d in documents] == ["7", "k2", "row-4"]
    assert [d.url for d in documents] == ["http://a.example/1", "file:x.jsonl!row-2", "file:x.jsonl!row-4"]
    assert [d.language for d in documents] == ["en", "", ""] and len({d.id for d in documents}) == 3


def test_every_row_has_a_fate(tmp_path):
    rows = {
        b'{"text": "good"}': "good",
        b'{"text": 5}': "bad_row",
        b'{"text": null}': "bad_row",
        b'{"other": "x"}': "bad_row",
        b'{"text": " "}': "empty_body",
        b"[1, 2]": "bad_row",
        b'"text"': "bad_row",
        b'{"text": "cut': "bad_row",
        b"[" * 900: "bad_row",
        b'{"text": %s}' % (b"9" * 800): "bad_row",
        b'{"text": "%s"}' % (b"x" * 600): "too_large",
        b'{"text": "%s"}' % (b"x" * 2000): "too_large",
        b'{"text": "\\ud83d\\ude00 \\ud800"}': "😀 �",
        b'{"text": "caf\xe9"}': "caf�",
        b'{"text": "a\\u0000b", "url": 3, "id": []}': "a\0b",
        b'{"text": "last"}': "last",
    }
    pairs = rows_of(tmp_path, b"\n".join(rows))
    assert outcomes(pairs) == list(rows.values())
    assert all(drop.value.startswith("row ") for _, drop in pairs if drop)


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    assert outcomes(rows_of(tmp_path, b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')) == ["a", "b"]


def test_cut_and_damaged_files_keep_what_stands_before(tmp_path):
    rows = b"".join(b'{"text": "row %d"}\n' % n for n in range(2000))
    cut = outcomes(rows_of(tmp_path, gzip.compress(rows)[:-2000]))
    assert cut[:3] == ["row 0", "row 1", "row 2"] and cut[-1] == "truncated_file" and cut.count("truncated_file") == 1
    assert outcomes(rows_of(tmp_path, b"\n \n")) == ["empty_body"]


@pytest.mark.parametrize("data", [b'[{"text": "a"}, {"text": "b"}]', b'[\n {"text": "a"}\n]', b"["])
def test_json_arrays_are_refused_with_the_way_out(tmp_path, data):
    with refused("E-JSONL-ARRAY") as caught:
        rows_of(tmp_path, data)
    assert "jq -c" in caught.value.fix


def test_rows_without_the_text_column_name_the_columns_and_the_setting(tmp_path):
    row = b'{"content": "a", "id": 1}'
    with refused("E-JSONL-COLUMN", column="text", columns=["content", "id"]) as caught:
        rows_of(tmp_path, row)
    assert f"{caught.value.facts['path']} text=content" in caught.value.fix
    with refused("E-JSONL-COLUMN", column="body.content", columns=["body"]):
        rows_of(tmp_path, b'{"body": {"x": 1}}\n' * 3, text="body.content")
    assert outcomes(rows_of(tmp_path, b'{"text": null}')) == ["bad_row"]


def test_one_row_with_the_text_column_is_enough_wherever_it_stands(tmp_path):
    row, text = b'{"content": "a", "id": 1}', b'{"text": "a"}'
    for count in (1, 99, 100, 150):
        assert outcomes(rows_of(tmp_path, b"\n".join([row] * count + [text]))) == ["bad_row"] * count + ["a"]
    assert outcomes(rows_of(tmp_path, b"\n".join([text] + [row] * 150))) == ["a"] + ["bad_row"] * 150
    assert outcomes(rows_of(tmp_path, b"[1]\nno JSON")) == ["bad_row"] * 2


@pytest.mark.parametrize(
    "data",
    [
        b'{"content": "a"}\n' * 150,
        b'no JSON\n{"content": "a"}\n',
        b'{"content": "%s"}\n{"content": "a"}' % (b"x" * 2000),
        gzip.compress(b"".join(b'{"content": "row %d"}\n' % n for n in range(2000)))[:-2000],
    ],
    ids=["long", "bad row", "large row", "cut"],
)
def test_a_wrong_column_is_told_at_the_end_of_any_file(tmp_path, data):
    with refused("E-JSONL-COLUMN", columns=["content"]):
        rows_of(tmp_path, data)


def test_pick():
    row = {"a": {"b": {"c": 1}}, "a.b": 2}
    assert pick(row, "a.b.c") == 1 and pick(row, "a.b") == 2
    assert pick(row, "a.x.c") is None and pick(row, "") is None and pick([], "a") is None


def test_stream_of_gigabytes_out_of_kilobytes_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("ingot.data.sources.unpack._RATIO_FLOOR_BYTES", 1 << 20)
    for pack in (gzip.compress, zstd):
        (tmp_path / "z").write_bytes(pack(b"\n" * (20 << 20)))
        with Unpacked(tmp_path / "z", Limits()) as stream, pytest.raises(BadStream, match="too_large"):
            stream.skip(1 << 40)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=30), st.integers(1, 50))
def test_lines_are_those_of_split(tmp_path_factory, parts, piece):
    data = b"\n".join(parts)
    path = tmp_path_factory.mktemp("l") / "l"
    path.write_bytes(data)
    expected = data.split(b"\n")
    expected = expected[:-1] if expected[-1] == b"" else expected

    class Small(Unpacked):
        def read(self, count):
            return super().read(min(count, piece))

    with Small(path, Limits()) as stream:
        found = list(lines(stream, 20))
    assert found == [(line if len(line) <= 20 else b"", len(line)) for line in expected]
