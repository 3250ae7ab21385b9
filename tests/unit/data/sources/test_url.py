import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.data.sources.url import UrlDuplicates, canonical_url


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        (" HTTPS://Example.COM:443/a/b/?utm_source=x&b=2&a=1#part ", "https://example.com/a/b?a=1&b=2"),
        ("http://a.example", "http://a.example/"),
        ("http://a.example:80/", "http://a.example/"),
        ("http://a.example:8080/", "http://a.example:8080/"),
        ("https://a.example:80/", "https://a.example:80/"),
        ("http://a.example./x", "http://a.example/x"),
        ("http://user:secret@a.example/x", "http://a.example/x"),
        ("http://müller.example/ü?ö=ä", "http://xn--mller-kva.example/%C3%BC?%C3%B6=%C3%A4"),
        ("http://a/%7euser/%e4%2f", "http://a/~user/%E4%2F"),
        ("http://a/b/../c/./d", "http://a/c/d"),
        ("http://a/../..", "http://a/"),
        ("http://a/x;jsessionid=A1B2?PHPSESSID=9&gclid=1&fbclid=2", "http://a/x"),
        ("http://a/x?b=2&a=1&b=1", "http://a/x?a=1&b=2&b=1"),  # repeated names keep their order
        ("http://a/x?flag&&q=a+b", "http://a/x?flag&q=a+b"),
        ("http://a/#!/page", "http://a/#!/page"),
        ("http://[::1]:80/x", "http://[::1]/x"),
        ("http://a:99x/", "http://a:99x/"),  # no port; left alone
        ("http://[broken/", "http://[broken/"),
        ("mailto:x@y", "mailto:x@y"),
        ("", ""),
    ],
)
def test_one_spelling(url, canonical):
    assert canonical_url(url) == canonical


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # RFC 3986: 5.2.4 (dot segments), 6.2.2.1 (case), 6.2.2.2 (escapes), 6.2.2.3, 6.2.3 (ports, empty path)
        ("http://a/b/c/./../../g", "http://a/g"),
        ("http://a/mid/content=5/../6", "http://a/mid/6"),
        ("http://a/b/c/g;x=1/../y", "http://a/b/c/y"),
        ("http://a/../g", "http://a/g"),
        ("http://a/b/%2E%2e/g", "http://a/g"),
        ("HTTP://www.EXAMPLE.com/", "http://www.example.com/"),
        ("http://a/%c3%a9?%c3%a9", "http://a/é?é"),
        ("http://a/%41%2D%7E", "http://a/A-~"),
        ("http://example.com", "http://example.com/"),
        ("http://example.com:/", "http://example.com/"),
        ("http://example.com:80/", "http://example.com/"),
        ("http://example.com/data/", "http://example.com/data"),
        ("http://example.com/?", "http://example.com/"),
        # by convention
        ("http://a/x?fbclid=1&q=2&utm_medium=mail&srsltid=3", "http://a/x?q=2"),
        ("http://a/x?B=1&a=2", "http://a/x?a=2&B=1"),
        ("http://XN--Mller-kva.example/", "http://MÜLLER.example/"),
        ("\thttp://a/x\n", "http://a/x"),
    ],
)
def test_one_page_one_spelling(one, other):
    assert canonical_url(one) == canonical_url(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://a//x", "http://a/x"),
        ("http://a/x+y", "http://a/x%20y"),
        ("http://a/x?q", "http://a/x?q="),
        ("http://a/index.html", "http://a/"),
        ("http://a/x", "https://a/x"),
        ("http://a/x", "http://www.a/x"),
        ("http://a/X", "http://a/x"),
        ("http://a/x?p=1", "http://a/x?p=2"),
        ("http://a/a%2Fb", "http://a/a/b"),
        ("http://a/#!/x", "http://a/#!/y"),
        ("http://a/x?q=A", "http://a/x?q=a"),
    ],
)
def test_different_pages_stay_different(one, other):
    assert canonical_url(one) != canonical_url(other)


@given(st.text(max_size=40), st.sampled_from(["", "http://", "https://a.example/", "http://a?", "HTTP://[", "//"]))
def test_never_raises_and_is_idempotent(text, prefix):
    once = canonical_url(prefix + text)
    assert canonical_url(once) == once


@pytest.mark.parametrize("piece", ["/..", "%2", "&a=1", "/./", "?", "ü", ";jsessionid=", "&utm_a"])
def test_hostile_urls_take_linear_time(piece):
    started = time.process_time()
    canonical_url("http://a.example/" + piece * 50_000)
    canonical_url("http://a.example/?x" + piece * 50_000)
    assert time.process_time() - started < 2


def test_first_one_stays():
    duplicates = UrlDuplicates()
    assert [
        duplicates.seen(u) for u in ("http://a/", "http://b/", "http://a/", "http://\udcff/", "http://\udcff/")
    ] == [
        False,
        False,
        True,
        False,
        True,
    ]


def test_planted_variants_and_nothing_else(test_data):
    rows = [json.loads(line) for line in (test_data / "truth_warc.jsonl").read_text().splitlines()]
    variants = [row for row in rows if row["kind"] == "url_dup"]
    assert len(variants) == 40
    assert all(canonical_url(row["url"]) == canonical_url(row["of"]) for row in variants)
    others = [canonical_url(row["url"]) for row in rows if row["kind"] != "url_dup"]
    assert len(set(others)) == len(others)
