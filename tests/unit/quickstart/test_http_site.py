import socket

from tests.expect import refused

from ingot.quickstart.http_site import Fetcher, serve

PAGES = {
    "http://a.invalid/x": ("text/html", b"<p>on a</p>"),
    "http://b.invalid/x": ("text/plain", "on b, ü".encode()),
    "http://a.invalid/x?q=1": ("text/html", b"<p>query</p>" * 9000),
}
DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


def test_hosts_queries_and_dead_links_over_one_connection():
    with serve(PAGES, DATE) as address, Fetcher(address, "test/1") as fetcher:
        for url, (kind, body) in PAGES.items():
            host, _, path = url.removeprefix("http://").partition("/")
            head, _, got = fetcher.get(host, "/" + path).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and kind.encode() in head and got == body
            assert DATE.encode() in head
        assert fetcher.get("a.invalid", "/none").startswith(b"HTTP/1.1 404")


def test_a_page_is_sent_at_once():
    """Header and body in two packets would wait 40 ms for an acknowledgement (Nagle's algorithm)."""
    with serve(PAGES, DATE) as address, socket.create_connection(address) as client:
        for _ in range(20):
            client.sendall(b"GET /x HTTP/1.1\r\nHost: a.invalid\r\n\r\n")
            head, _, body = client.recv(65536).partition(b"\r\n\r\n")
            assert f"Content-Length: {len(body)}".encode() in head and body


def test_a_server_that_is_gone_is_said():
    with serve(PAGES, DATE) as address:
        pass
    with refused("E-LOOPBACK-SILENT"):
        Fetcher(address, "test/1")


def test_a_server_that_goes_away_is_said():
    with serve(PAGES, DATE) as address:
        fetcher = Fetcher(address, "test/1")
        fetcher._socket.shutdown(2)
        with refused("E-LOOPBACK-SILENT"):
            fetcher.get("a.invalid", "/x")
