"""A small crawl with known fates, written as a crawler writes it."""

import gzip
import random
from pathlib import Path

import pytest

_COMMON = (
    "the people water house river which would about there their other could these first after where right think "
    "great through before little under never found those while might something always together important children "
    "of and that have with into time year work country school world because small large place night between city "
    "story hand morning letter father mother light paper window garden summer winter travel music market"
)


def english(seed: int, sentences: int = 16, extra: str = "") -> str:
    """Lines that are English enough for every rule, different for every seed; `extra` ends each sentence."""
    pick = random.Random(seed)
    made = [" ".join(pick.choices(_COMMON.split(), k=12)) + extra for _ in range(sentences)]
    return "\n".join(f"The {one} and that of {two}." for one, two in zip(made[::2], made[1::2], strict=True))


def html(text: str) -> str:
    paragraphs = "".join(f"<p>{line}</p>" for line in text.split("\n"))
    return f"<html><head><title>A page</title></head><body><article><h1>A page</h1>{paragraphs}</article></body></html>"


def write_crawl(path: Path, pages) -> Path:
    """pages: (url, text or whole HTML page, HTTP status)."""
    with path.open("wb") as file:
        for number, (url, text, status) in enumerate(pages):
            page = (text if text.startswith("<html") else html(text)).encode()
            http = (
                f"HTTP/1.1 {status} X\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {len(page)}\r\n\r\n"
            )
            block = http.encode() + page
            head = (
                "WARC/1.0\r\nWARC-Type: response\r\n"
                f"WARC-Record-ID: <urn:uuid:00000000-0000-4000-8000-{number:012d}>\r\n"
                f"WARC-Target-URI: {url}\r\nWARC-Date: 2025-01-01T00:00:00Z\r\n"
                f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(block)}\r\n\r\n"
            )
            file.write(gzip.compress(head.encode() + block + b"\r\n\r\n", mtime=0))
    return path


@pytest.fixture
def crawl(tmp_path) -> list[Path]:
    """Two files: four good pages, a page for almost every stage, duplicates across the files."""
    one = [
        ("http://a.example/1", english(1), 200),
        ("http://a.example/2", english(2) + "\nWrite to jane@corp-site.org for more of the story.", 200),
        ("http://a.example/missing", "not found", 404),
        ("http://a.example/empty", "<html><body></body></html>", 200),
        ("http://a.example/short", "The end of it and that is all to be said.", 200),  # words: ok
        ("http://a.example/german", "Der Hund und die Katze gehen heute nicht in den Wald, weil es regnet. " * 9, 200),
        ("http://a.example/1#comments", english(1), 200),
    ]
    two = [
        ("http://b.example/3", english(3), 200),
        ("http://A.example:80/2?utm_source=x", english(9), 200),  # same URL as before, other text
        (
            "http://b.example/mirror",
            english(1) + "\nThe copy of this page is on another host, it was said.",  # words: ok
            200,
        ),
        ("http://b.example/code", english(4) + "\nfunction run() { return to the start of it; }", 200),
        (
            "http://b.example/spam",
            english(5, extra=" idiot, damn moron"),
            200,
        ),
        ("http://b.example/6", english(6), 200),
    ]
    return [write_crawl(tmp_path / "crawl-0.warc.gz", one), write_crawl(tmp_path / "crawl-1.warc.gz", two)]
