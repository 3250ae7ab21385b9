"""Damaged files of every format end with DataError or in pairs; benchmarks/fuzz_sources.py does this for hours."""

import gzip
import io
import json
import tarfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.data.sources.bounded import Limits
from ingot.data.sources.input import Input, read
from ingot.data.sources.warc import BadResponse, decoded_body, parse_response
from ingot.errors import DataError

LIMITS = Limits(block_bytes=1 << 16, body_bytes=1 << 16, header_bytes=1 << 12, file_bytes=1 << 12)
ROWS = b"".join(json.dumps({"text": f"row {n}", "id": n}).encode() + b"\n" for n in range(20))


def tar():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in ("a.py", "ü" * 90 + "/b.py"):
            info = tarfile.TarInfo(name)
            info.size = 6
            archive.addfile(info, io.BytesIO(b"x = 1\n"))
    return out.getvalue()


GOOD = {"jsonl": ROWS, "jsonl.gz": gzip.compress(ROWS), "tar": tar(), "tar.gz": gzip.compress(tar()), "txt": b"words"}
RESPONSES = [
    b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b"<p>x" * 50),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: br, gzip\r\n\r\n" + gzip.compress(b"\x0b\x02\x80hello\x03"),
]


@st.composite
def mutants(draw, bases):
    made = bytearray(draw(bases))
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, len(made)))
        made[place : place + draw(st.sampled_from((0, 1, 4, 600)))] = draw(st.binary(max_size=8))
    return bytes(made[: draw(st.none() | st.integers(0, len(made)))])


@pytest.mark.parametrize("format", GOOD)
@settings(max_examples=60, deadline=3000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_files(tmp_path, format, data):
    path = tmp_path / f"f.{format}"
    path.write_bytes(data.draw(mutants(st.just(GOOD[format]))))
    try:
        pairs = list(read(Input(location=str(path)), tmp_path, LIMITS))
    except DataError:
        return
    assert pairs and all(drop is None or drop.rule.startswith("read.") for _, drop in pairs)
    assert all(document.raw for document, drop in pairs if drop is None)


@pytest.mark.parametrize("format", ["warc", "parquet", "wet"])
@settings(max_examples=60, deadline=3000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300))
def test_any_bytes_under_any_name(tmp_path, format, data):
    path = tmp_path / "f"
    path.write_bytes(data)
    try:
        pairs = list(read(Input(location=str(path), format=format), tmp_path, LIMITS))
    except DataError:
        return
    assert pairs


@settings(max_examples=300, deadline=1000)
@given(mutants(st.sampled_from(RESPONSES)))
def test_responses(block):
    try:
        body = decoded_body(parse_response(block, 4096), 1 << 16)
    except BadResponse:
        return
    assert len(body) <= 1 << 16
