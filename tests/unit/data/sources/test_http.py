import gzip
import zlib

import brotli
import pytest

from ingot.data.sources.warc import BadResponse, decoded_body, parse_response

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
