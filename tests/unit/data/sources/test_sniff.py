import time

import pytest

from ingot.data.sources.sniff import charset, looks_like_html, media_type, page_type


@pytest.mark.parametrize(
    ("body", "claimed", "identified", "kind"),
    [
        (b"<!doctype HTML>", "", "", "text/html"),
        (b" \n<!-- a --><!-- b -->\n<HTML lang=en>", "text/plain", "", "text/html"),
        (b'<?xml version="1.0"?>\n<html xmlns="x">', "application/xml", "", "text/html"),
        ("<html>ü".encode("utf-16"), "", "", "text/html"),
        (b"\xef\xbb\xbf<p>x", "application/octet-stream", "", "text/html"),
        (b"no tag at all", "text/html", "", "text/html"),
        (b"no tag at all", "", "application/xhtml+xml", "text/html"),
        (b"no tag at all", "text/plain", "", "text/plain"),
        (b"no tag at all", "", "", ""),
        (b"%PDF-1.7", "text/html", "", ""),
        (b"\x89PNG\r\n\x1a\n", "text/html", "text/html", ""),
        (bytes(range(32)) * 9, "text/html", "", ""),
        (b"<?xml version='1.0'?><rss></rss>", "application/rss+xml", "", ""),
        (b"var a = '<html>';", "application/javascript", "", ""),
    ],
)
def test_page_type(body, claimed, identified, kind):
    assert page_type(body, claimed, identified)[0] == kind


def test_content_type_header():
    assert media_type("Text/HTML ; charset=x") == "text/html"
    assert charset('text/html; Charset = "UTF-8"') == "utf-8" and charset("text/html") == ""


def test_sniffing_is_linear():
    start = time.process_time()
    for hostile in (b" " * 1_000_000, b"<!--" * 250_000, b"<!---->" * 150_000, b"<?xml" * 200_000):
        assert not looks_like_html(hostile)
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16"])
def test_pages_in_utf_16_are_pages(encoding):
    assert page_type("<!DOCTYPE html><html><body>page</body></html>".encode(encoding), "", "") == ("text/html", "")
