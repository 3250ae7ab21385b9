import gzip
import json
import zlib
from collections import Counter

import brotli
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.expect import refused

from ingot.data.sources.warc import BadResponse, Limits, decoded_body, parse_response, read_warc
from ingot.errors import DataError
from ingot.schema.corpus import document_id

PAGE = b"<!DOCTYPE html><html><body><p>Hello there.</p></body></html>"


def http(body=PAGE, headers=b"Content-Type: text/html; charset=UTF-8\r\n", status=b"200 OK"):
    return b"HTTP/1.1 " + status + b"\r\n" + headers + b"\r\n" + body


def record(
    block, number=1, kind=b"response", url=b"http://a.example/%d", length=None, content_type=b"application/http"
):
    head = (b"WARC/1.0\r\nWARC-Type: %s\r\nWARC-Record-ID: <urn:uuid:%d>\r\n" % (kind, number)) + (
        b"WARC-Target-URI: " + (url % number if b"%d" in url else url) + b"\r\n" if url else b""
    )
    length = str(len(block)).encode() if length is None else length
    return head + b"Content-Type: %s\r\nContent-Length: %s\r\n\r\n" % (content_type, length) + block + b"\r\n\r\n"


@pytest.fixture
def read(tmp_path):
    """Pairs of a WARC file made of `records`, plain or one gzip member per record."""

    def run(*records, packed=True, cut=None, limits=None):
        path = tmp_path / "x.warc"
        data = b"".join(map(gzip.compress, records)) if packed else b"".join(records)
        path.write_bytes(data[:cut])
        return list(read_warc(path, "web", limits))

    return run


def rules(pairs):
    return [drop.rule if drop else "kept" for _, drop in pairs]


@pytest.mark.parametrize("packed", [True, False])
def test_response_becomes_document_with_its_origin(read, packed):
    ((document, drop),) = read(record(http()), packed=packed)
    assert drop is None
    assert document.raw == PAGE and document.content_type == "text/html" and document.charset == "utf-8"
    assert (document.url, document.source, document.file) == ("http://a.example/1", "web", "x.warc")
    assert document.id == document_id("x.warc", "<urn:uuid:1>", "http://a.example/1")


def test_wet_conversion_is_plain_text(read):
    pairs = read(record("Zwölf Wörter.".encode(), kind=b"conversion", content_type=b"text/plain"))
    assert rules(pairs) == ["kept"]
    assert pairs[0][0].content_type == "text/plain" and pairs[0][0].raw.decode() == "Zwölf Wörter."


def test_every_response_has_a_named_fate(read):
    cases = {
        "read.http_status": record(http(status=b"404 Not Found")),
        "read.empty_body": record(http(b" \r\n ")),
        "read.not_html": record(http(b"body { color: red }", b"Content-Type: text/css\r\n")),
        "read.bad_http": record(b"HTTP/1.1 nonsense"),
        "read.not_http": record(b"a.example. 1 IN A 10.0.0.1", url=b"dns:a.example", content_type=b"text/dns"),
        "read.no_url": record(http(), url=b""),
        "read.unsupported_encoding": record(http(b"\x01\x02", b"Content-Encoding: sdch\r\n")),
        "read.bad_encoding": record(http(b"\x1f\x8b\x08junk", b"Content-Encoding: gzip\r\n")),
        "kept": record(http(), url=b"<HTTP://A.example/>"),
    }
    assert rules(read(*cases.values())) == list(cases)


def test_requests_are_no_pages(read):
    others = [record(http(), kind=kind) for kind in (b"warcinfo", b"request", b"metadata")]
    assert rules(read(*others, record(http()))) == ["kept"]
    pairs = read(*others)
    assert rules(pairs) == ["read.no_pages"] and "1 warcinfo" in pairs[0][1].value


def test_records_without_a_body_of_their_own_are_counted(read):
    pairs = read(record(b"HTTP/1.1 200 OK\r\n\r\n", kind=b"revisit"), record(b"more", 2, kind=b"continuation"))
    assert rules(pairs) == ["read.revisit", "read.continuation"]
    assert [document.url[-1] for document, _ in pairs] == ["1", "2"]


def test_resources_are_pages_if_they_are_html_or_text_of_a_web_address(read):
    def resource(block, number, content_type, url=b"https://a.example/%d"):
        return record(block, number, kind=b"resource", content_type=content_type, url=url)

    pairs = read(
        resource(PAGE, 1, b"text/html; charset=UTF-8"),
        resource(b"words", 2, b"text/plain"),
        resource(b"\x89PNG\r\n", 3, b"image/png"),
        resource(b"a log", 4, b"text/plain", url=b"metadata://gnu.org/wget.log"),
    )
    assert rules(pairs) == ["kept", "kept"]
    assert pairs[0][0].raw == PAGE and [one.content_type for one, _ in pairs] == ["text/html", "text/plain"]


@pytest.mark.parametrize("line", [b"HTTP/2 200", b"HTTP/1.1 200", b"HTTP/1.1 200 ", b"HTTP/1.0  203 Non-Authoritative"])
def test_status_lines_as_servers_write_them(read, line):
    assert rules(read(record(line + b"\r\nContent-Type: text/html\r\n\r\n" + PAGE))) == ["kept"]


@pytest.mark.parametrize("version", [b"WARC/0.17", b"WARC/0.18", b"WARC/0.9", b"WARC/1.1"])
@pytest.mark.parametrize("packed", [True, False])
def test_other_versions_with_named_headers(read, version, packed):
    records = [record(http(), number).replace(b"WARC/1.0", version, 1) for number in (1, 2)]
    assert rules(read(*records, packed=packed)) == ["kept", "kept"]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"filedesc://x.arc 0.0.0.0 20010101", "ARC"),
        (gzip.compress(b"filedesc://x.arc 0.0.0.0 20010101", mtime=0), "ARC"),
        (b"WARC/0.9 0000000321 response http://a.example/", "WARC 0.9"),  # its headers have no names
    ],
)
def test_older_formats_are_refused_by_name(tmp_path, content, kind):
    (tmp_path / "x.warc.gz").write_bytes(content)
    with refused("E-WARC-NONE", archive=kind):
        list(read_warc(tmp_path / "x.warc.gz", "web"))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("length", [b"-5", b"abc", b"99999999999999999999999", b"", b"1_0", b"7", b"4000", b"300"])
def test_lying_content_length_costs_one_record(read, packed, length):
    """Too short, too long (it swallows the next record), negative, none at all: the records around it are read."""
    records = [record(http(), 1), record(http(), 2, length=length), record(http(), 3), record(http(), 4)]
    pairs = read(*records, packed=packed)
    kept = [document.url[-1] for document, drop in pairs if drop is None]
    assert kept in (["1", "3", "4"], ["1", "4"]) and len(pairs) >= 4
    if kept == ["1", "4"]:
        assert length == b"300"  # swallows record 3 exactly to its end or beyond: one more record is lost, by name
    assert {drop.rule for _, drop in pairs if drop} <= {"read.bad_record", "read.bad_http"}


@pytest.mark.parametrize("packed", [True, False])
def test_every_truncation_keeps_whole_records_and_says_so(read, packed):
    first, second = record(http(), 1), record(http(), 2)
    data = b"".join(map(gzip.compress, (first, second))) if packed else first + second
    border = len(gzip.compress(first)) if packed else len(first)
    for cut in range(border, len(data)):
        pairs = read(first, second, packed=packed, cut=cut)
        assert pairs[0][1] is None and pairs[0][0].url == "http://a.example/1"
        if cut == border:
            assert len(pairs) == 1
        elif packed or cut < len(data) - len(b"\r\n\r\n"):
            assert rules(pairs)[-1] == "read.truncated_file", cut


def test_damage_inside_a_gzip_member_costs_that_record(read, tmp_path):
    members = [bytearray(gzip.compress(record(http(), i))) for i in range(1, 5)]
    members[1][len(members[1]) // 2] ^= 0xFF
    (tmp_path / "d.warc.gz").write_bytes(b"".join(members))
    pairs = list(read_warc(tmp_path / "d.warc.gz", "web"))
    assert [d.url[-1] for d, drop in pairs if not drop] == ["1", "3", "4"]
    assert [drop.rule for _, drop in pairs if drop] == ["read.bad_record"]
    assert f"offset {len(members[0])}" in next(drop.value for _, drop in pairs if drop)


def test_junk_between_and_before_records(read):
    pairs = read(b"junk\n", record(http(), 1), b"more junk\r\n" * 5, record(http(), 2), packed=False)
    assert rules(pairs) == ["read.bad_record", "kept", "read.bad_record", "kept"]


def test_whole_file_as_one_gzip_stream(tmp_path):
    path = tmp_path / "one.warc.gz"
    data = gzip.compress(record(http(), 1) + record(http(), 2))
    path.write_bytes(data)
    assert rules(read_warc(path, "web")) == ["kept", "kept"]
    path.write_bytes(data[:-12])
    assert rules(read_warc(path, "web"))[-1] == "read.truncated_file"


@pytest.mark.parametrize(
    "content", [b"", b"hello world\n" * 9, b"\x1f\x8bzzzz", gzip.compress(b"no warc", mtime=0), b"WARC/"]
)
def test_garbage_is_refused_with_file_and_way_out(tmp_path, content):
    path = tmp_path / "garbage.warc.gz"
    path.write_bytes(content)
    with refused("E-WARC-NONE", path=str(path)):
        list(read_warc(path, "web"))


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "none.warc", tmp_path):
        with refused("E-INPUT-READ-FAILED", path=str(path)):
            list(read_warc(path, "web"))


def test_bombs_cost_one_record_each(read):
    limits = Limits(block_bytes=1 << 20, body_bytes=1 << 20, header_bytes=4096)
    deflated = zlib.compress(bytes(50 << 20))
    pairs = read(
        record(http(b"<p>" + bytes(20 << 20)), 1),  # inflates with the file
        record(http(deflated, b"Content-Encoding: deflate\r\n"), 2),  # inflates with the body
        record(http(b"x", b"X: " + b"y" * 5000 + b"\r\n"), 3),
        record(http(gzip.compress(b"x", mtime=0), b"Content-Encoding: " + b"gzip, " * 9 + b"gzip\r\n"), 4),
        record(http(), 5),
        limits=limits,
    )
    assert rules(pairs) == ["read.too_large"] * 3 + ["read.unsupported_encoding", "kept"]


def test_page_cut_by_the_crawler_is_kept_with_a_note(read):
    cut = record(http()).replace(
        b"Content-Type: application", b"WARC-Truncated: length\r\nContent-Type: application", 1
    )
    ((document, drop),) = read(cut)
    assert drop is None and document.notes["warc_truncated"] == "length"


def test_text_about_warc_is_not_taken_for_a_record(read):
    body = PAGE + b"\r\n\r\nWARC/1.0\r\nWARC-Type: response\r\n\r\n"
    for packed in (True, False):
        assert rules(read(record(http(body), 1), record(http(), 2), packed=packed)) == ["kept", "kept"]


@settings(max_examples=150, deadline=2000)
@given(st.data())
def test_fuzz_only_dataerror_and_pairs(tmp_path_factory, data):
    """Arbitrary bytes, and real files with bytes changed, cut and moved: an error that says why, or pairs."""
    good = [record(http(), i) for i in range(1, 4)]
    base = data.draw(
        st.sampled_from([b"".join(good), b"".join(map(gzip.compress, good)), gzip.compress(b"".join(good)), b""])
    )
    mutable = bytearray(base + data.draw(st.binary(max_size=60)))
    for _ in range(data.draw(st.integers(0, 6))):
        if mutable:
            place = data.draw(st.integers(0, len(mutable) - 1))
            mutable[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path = tmp_path_factory.mktemp("fuzz") / "f.warc"
    path.write_bytes(bytes(mutable))
    try:
        pairs = list(read_warc(path, "web", Limits(1 << 16, 1 << 16, 1 << 12)))
    except DataError:
        return
    assert pairs and all(drop is None or drop.rule.startswith("read.") for _, drop in pairs)


def test_shared_crawl_loses_nothing(test_data):
    truth = {}
    for line in (test_data / "truth_warc.jsonl").read_text().splitlines():
        row = json.loads(line)
        truth[row["record_id"]] = row["kind"]
    expected = {"status_404": "read.http_status", "status_301": "read.http_status"}
    expected |= {"not_html": "read.not_html", "empty_body": "read.empty_body"}
    met = Counter()
    for path in sorted((test_data / "warc").glob("shared-0*.warc.gz")):
        for document, drop in read_warc(path, "web"):
            kind = truth.pop(document.record_id)
            assert (drop.rule if drop else None) == expected.get(kind), document.url
            met[kind] += 1
    assert not truth and sum(met.values()) == 1089


def test_real_writers_and_quirks(test_data):
    expected = {  # pages, records dropped
        "chatnoir-resiliparse__clueweb-quirk.warc.gz": (29, 0),
        "dolma__sample-0000.warc.gz": (22, 0),
        "jwarc__cc.warc.gz": (1, 0),
        "warcio__example-iana.org-chunked.warc": (1, 0),
        "warcio__example-trunc.warc": (1, 1),
        "warcio__example-wget-bad-target-uri.warc.gz": (1, 0),
        "whirlwind-python__whirlwind.warc.wet.gz": (1, 0),
        "whirlwind-python__whirlwind.warc.wat.gz": (0, 1),
    }
    for name, (pages, dropped) in expected.items():
        outcomes = rules(read_warc(test_data / "real_warc" / name, "web"))
        assert (outcomes.count("kept"), len(outcomes) - outcomes.count("kept")) == (pages, dropped), name
    cut = rules(read_warc(test_data / "warc" / "shared-truncated.warc.gz", "web"))
    assert cut == ["kept"] * 35 + ["read.truncated_file"]


# HTTP responses

TEXT = b"plain words, not markup " * 40
LIMIT = 1 << 20


def body_of(body, *headers):
    block = b"HTTP/1.1 200 OK\r\n" + b"".join(h + b"\r\n" for h in headers) + b"\r\n" + body
    return decoded_body(parse_response(block, 4096), LIMIT)


def raw_deflate(data):
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


@pytest.mark.parametrize(
    ("name", "encode"),
    [
        (b"gzip", gzip.compress),
        (b"X-GZIP", gzip.compress),
        (b"deflate", zlib.compress),
        (b"deflate", raw_deflate),
        (b"br", brotli.compress),
        (b"identity", bytes),
        (b"gzip, br", lambda data: brotli.compress(gzip.compress(data))),
        (b"gzip", lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:]) + b"trailing junk"),
    ],
)
def test_content_encodings(name, encode):
    assert body_of(encode(TEXT), b"Content-Encoding: " + name) == TEXT


def test_announced_but_plain_body_is_taken_as_it_is():
    page = b"<html><body>hi</body></html>"
    for name in (b"gzip", b"br", b"deflate", b"zstd"):
        assert body_of(page, b"Content-Encoding: " + name) == page
    assert body_of(TEXT, b"Content-Encoding: gzip") == TEXT
    assert body_of(TEXT, b"Transfer-Encoding: chunked") == TEXT


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_chunks(end):
    chunks = b"5" + end + b"hello" + end + b"6;ext=1" + end + b" world" + end + b"0" + end + end
    assert body_of(chunks, b"Transfer-Encoding: chunked") == b"hello world"
    cut = chunks[: chunks.index(b" world")]
    assert body_of(cut, b"Transfer-Encoding: Chunked") == b"hello"  # the server hung up
    with pytest.raises(BadResponse, match="bad_encoding"):
        body_of(b"5" + end + b"helloXXXX", b"Transfer-Encoding: chunked")


def test_headers_repeat_fold_and_end_in_bare_lf():
    response = parse_response(b"HTTP/1.0 301 Moved\nLocation: /a\nLOCATION: /b\nno colon\n\nbody", 4096)
    assert (response.status, response.headers, response.body) == (301, {"location": "/a"}, b"body")
    folded = parse_response(b"HTTP/1.1 200 OK\r\nContent-Type: text/html;\r\n\tcharset=koi8-r\r\n x\r\n\r\n", 4096)
    assert folded.headers == {"content-type": "text/html; charset=koi8-r x"}


def test_encodings_come_in_chains_on_one_line_or_several_and_in_the_transfer():
    page = b"<p>Hello there."
    chain = brotli.compress(gzip.compress(page))
    assert body_of(chain, b"Content-Encoding: gzip, br") == page
    assert body_of(chain, b"Content-Encoding: gzip\r\nVary: *\r\ncontent-encoding: BR") == page
    packed = gzip.compress(page)
    assert body_of(b"%015x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed), b"Transfer-Encoding: gzip, chunked") == page


@pytest.mark.parametrize(
    ("block", "rule"),
    [(b"", "bad_http"), (b"GET / HTTP/1.1\r\n\r\n", "bad_http"), (b"HTTP/1.1 200 OK\r\nA: b\r\n", "bad_http")],
)
def test_no_response(block, rule):
    with pytest.raises(BadResponse, match=rule):
        parse_response(block, 4096)


@pytest.mark.parametrize(("name", "encode"), [(b"gzip", gzip.compress), (b"br", brotli.compress)])
def test_bomb_stops_at_the_limit(name, encode):
    with pytest.raises(BadResponse, match="too_large"):
        body_of(encode(bytes(8 << 20)), b"Content-Encoding: " + name)
