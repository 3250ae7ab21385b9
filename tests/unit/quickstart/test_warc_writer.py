import io

from fastwarc.warc import ArchiveIterator

from ingot.data.sources.warc import read_warc
from ingot.quickstart.crawl import WarcWriter

MESSAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>hello</html>"


def written():
    file = io.BytesIO()
    writer = WarcWriter(file, "x.warc.gz", "2026-01-01T00:00:00Z")
    for path in ("a", "b"):
        writer.response(f"http://h.invalid/{path}", "127.0.0.1", MESSAGE)
    return file.getvalue()


def test_records_are_members_with_valid_digests():
    records = list(ArchiveIterator(io.BytesIO(written()), parse_http=False, verify_digests=False))
    assert len({record.stream_pos for record in records}) == 3  # each record can be read on its own
    for record in ArchiveIterator(io.BytesIO(written()), parse_http=True):
        if record.is_http:
            assert record.verify_payload_digest()
    for record in ArchiveIterator(io.BytesIO(written()), parse_http=False):
        if record.headers.get("WARC-Type") == "response":
            assert record.verify_block_digest()


def test_our_reader_reads_it_back(tmp_path):
    (tmp_path / "x.warc.gz").write_bytes(written())
    pairs = list(read_warc(tmp_path / "x.warc.gz", "guide"))
    assert [d.url for d, drop in pairs if drop is None] == ["http://h.invalid/a", "http://h.invalid/b"]
    assert pairs[0][0].raw == b"<html>hello</html>" and pairs[0][0].record_id != pairs[1][0].record_id


def test_same_bytes_every_time():
    assert written() == written()
