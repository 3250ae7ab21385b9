"""Hostile inputs in a process of bounded address space and time: each ends, and says what was left out."""

import gzip
import multiprocessing
import resource
import struct
import zlib
from collections import Counter
from pathlib import Path

import pytest

from ingot.data.sources.input import Input, read

_CPU_SECONDS = 15


def _read(paths: list[Path], megabytes: int, pipe) -> None:
    import pyarrow.parquet  # noqa: F401  (libraries are no part of what an input costs)

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    for path in paths:
        pairs = read(Input(location=str(path)), path.parent)
        pipe.send(dict(Counter(drop.rule.removeprefix("read.") if drop else "kept" for _, drop in pairs)))


@pytest.fixture
def outcomes(tmp_path):
    def run(files: dict[str, bytes], megabytes: int = 300) -> list[dict]:
        """Read all files in one process; return the rules of their records with counts."""
        pytest.importorskip("pyarrow")
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_read, args=([tmp_path / name for name in files], megabytes, theirs))
        child.start()
        theirs.close()
        counts = []
        for name in files:
            try:
                counts.append(ours.recv())
            except EOFError:
                child.join(5)
                pytest.fail(f"{name}: the reader died ({child.exitcode})")
        child.join(20)
        return counts

    return run


def packed(*pieces: tuple[bytes, int]) -> bytes:
    """gzip of each (bytes, how often), built in pieces: after a full flush, equal bytes are packed equally."""
    body, crc, size = [], 0, 0
    for data, times in pieces:
        stream = zlib.compressobj(9, zlib.DEFLATED, -15)
        body.append((stream.compress(data) + stream.flush(zlib.Z_FULL_FLUSH)) * times)
        size += len(data) * times
        for _ in range(times):
            crc = zlib.crc32(data, crc)
    end = zlib.compressobj(9, zlib.DEFLATED, -15).flush()
    header = b"\x1f\x8b\x08" + bytes(6) + b"\xff"
    return header + b"".join(body) + end + struct.pack("<II", crc, size & 0xFFFFFFFF)


def response(number: int, length: int) -> bytes:
    head = (
        "WARC/1.0\r\nWARC-Type: response\r\n"
        f"WARC-Record-ID: <urn:uuid:{number}>\r\nWARC-Target-URI: http://a.example/{number}\r\n"
        f"Content-Type: application/http\r\nContent-Length: {length}\r\n\r\n"
    )
    return head.encode()


PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>words"
GOOD = gzip.compress(response(1, len(PAGE)) + PAGE + b"\r\n\r\n")
MEGABYTE = bytes(1 << 20)


def hostile_warc() -> dict[str, tuple[bytes, dict[str, int]]]:
    """Return files of WARC records that inflate beyond all limits, each with the rules of its records and counts."""
    large = packed((response(2, len(PAGE) + (320 << 20)) + PAGE, 1), (MEGABYTE, 320), (b"\r\n\r\n", 1))
    deflated = packed((b"<p>x", 1), (MEGABYTE, 320))
    body = PAGE.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n").removesuffix(b"<p>words") + deflated
    headers = packed((b"WARC/1.0\r\n", 1), (b"A: " + b"b" * 997 + b"\r\n", 1 << 20))
    return {
        "a.warc.gz": (GOOD + large + GOOD, {"kept": 2, "too_large": 1}),
        "b.warc": (response(3, len(body)) + body + b"\r\n\r\n", {"too_large": 1}),
        "c.warc.gz": (GOOD + headers + GOOD, {"kept": 2, "bad_record": 1}),
    }


def hostile_json() -> dict[str, tuple[bytes, dict[str, int]]]:
    """Return files of JSON lines in the same way: long, deep and heavy ones, and one that does not end."""
    rows = ((b'{"text": "good"}\n{"text": "', 1), (b"x" * (1 << 20), 50), (b'"}\n', 1), (b"[" * 100_000 + b"\n", 1))
    ending = ((b'{"a": [', 1), (b"{}," * (1 << 18), 43), (b'{}], "text": "heavy"}\n{"text": "good"}\n', 1))
    return {
        "a.jsonl.gz": (packed(*rows, *ending), {"kept": 2, "too_large": 2, "bad_row": 1}),
        "c.jsonl.gz": (packed((MEGABYTE, 320)), {"too_large": 1}),
    }


@pytest.mark.parametrize("hostile", [hostile_warc, hostile_json])
def test_records_beyond_all_limits(outcomes, hostile):
    files = hostile()
    found = outcomes({name: data for name, (data, _) in files.items()})
    assert found == [counts for _, counts in files.values()]


def test_the_heaviest_line_that_fits(outcomes):
    """The worst that 32 MB of JSON can be: eleven million empty objects of 72 bytes."""
    just_fits = ((b'{"a": [', 1), (b"{}," * (1 << 18), 42), (b'{}], "text": "heavy"}\n{"text": "good"}\n', 1))
    assert outcomes({"b.jsonl.gz": packed(*just_fits)}, 1200) == [{"kept": 2}]


def test_text_and_archives(outcomes):
    header = bytearray(512)
    header[:4], header[156:157] = b"a.py", b"0"
    header[124:136] = b"\x80" + struct.pack(">3xQ", 320 << 20)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    tar = packed((bytes(header), 1), (MEGABYTE, 320), (bytes(1024), 1))
    assert outcomes({"a.txt.gz": packed((b"words " * (1 << 17), 430)), "a.tar.gz": tar}) == [{"too_large": 1}] * 2


def test_parquet_that_lies_in_its_page_header(outcomes, tmp_path):
    """The footer is honest, the page says that it has 2 GB."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    path = tmp_path / "made"
    table = arrow.table({"text": ["words " * 3000] * 3})
    pyarrow.parquet.write_table(table, path, use_dictionary=False, compression="zstd", write_statistics=False)
    data = bytearray(path.read_bytes())
    start = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    size = data.index(b"\x15", start + 2)  # field 2 of the page header, a varint
    end = size + 1
    while data[end] & 128:
        end += 1
    width = end - size
    size_stated = (1 << 7 * width) - 2
    data[size + 1 : end + 1] = bytes(size_stated >> 7 * n & 127 | (128 if n < width - 1 else 0) for n in range(width))
    (found,) = outcomes({"x.parquet": bytes(data)})
    assert set(found) <= {"too_large", "bad_row_group"} and sum(found.values()) == 1
