"""Fuzzing of everything that reads foreign bytes: python benchmarks/fuzz_sources.py --seconds 60 [--seed 0]

Good files of every format are damaged at random and read. Whatever they hold, a reader may end with DataError or give
pairs (document, drop); any other exception, a crash, 5 CPU seconds or 1.5 GiB are a bug, and the input is kept.
The same seed damages the same files in the same way.
"""

import argparse
import gzip
import io
import json
import multiprocessing
import random
import resource
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path

from ingot.data.sources.bounded import Limits
from ingot.data.sources.input import Input, read
from ingot.data.sources.warc import BadResponse, decoded_body, parse_response
from ingot.errors import DataError

LIMITS = Limits(
    block_bytes=1 << 20, body_bytes=1 << 20, header_bytes=1 << 12, file_bytes=1 << 16, ratio_floor_bytes=1 << 18
)
CPU_SECONDS, MEMORY_BYTES = 5, 1536 << 20
BATCH = 200
INTERESTING = (
    *(b"", b"\0", b"\xff" * 4, b"\r\n\r\n", b"-1", b"[" * 500, b"{}", b"\n", b"PAR1", b"\x80\x00\x00\x00"),
    *(b"WARC/1.0\r\n", b"Content-Length: 99999999999\r\n", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"),
)


def warc(records: int = 4) -> list[bytes]:
    made = []
    for number in range(records):
        page = f"<html><body><p>Page {number} " + "with words " * 40
        block = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n{page}".encode()
        head = (
            f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:{number}>\r\n"
            f"WARC-Target-URI: http://a.example/{number}\r\nContent-Type: application/http\r\n"
            f"Content-Length: {len(block)}\r\n\r\n"
        )
        made.append(head.encode() + block + b"\r\n\r\n")
    return made


def zstd(pieces: list[bytes], dictionary: bytes | None = None) -> bytes:
    from fastwarc.stream_io import ZstdWriter

    out = io.BytesIO()
    writer = ZstdWriter(out, dictionary=dictionary)
    for piece in pieces:
        writer.write(piece)
        writer.finish()
    writer.close()
    return out.getvalue()


def parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    texts = [f"row {n} " * 20 for n in range(50)]
    table = pyarrow.table({"text": texts, "meta": [{"url": "http://a.example/"}] * 50, "id": list(range(50))})
    pyarrow.parquet.write_table(table, out, row_group_size=20, compression="zstd")
    return out.getvalue()


def tar(format: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for name in ("a.py", "long/" * 30 + "b.py", "c.min.js"):
            info = tarfile.TarInfo(name)
            info.size = 600
            archive.addfile(info, io.BytesIO(b"x = 1\n" * 100))
    return out.getvalue()


def good_files() -> dict[str, bytes]:
    from fastwarc.stream_io import zstd_train_dictionary_from_samples

    records = warc()
    dictionary = zstd_train_dictionary_from_samples(warc(900), 4096)
    rows = b"".join(json.dumps({"text": f"row {n} " * 9, "url": "x"}).encode() + b"\n" for n in range(40))
    response = records[0].partition(b"\r\n\r\n")[2]
    return {
        "plain.warc": b"".join(records),
        "members.warc.gz": b"".join(map(gzip.compress, records)),
        "stream.warc.gz": gzip.compress(b"".join(records)),
        "frames.warc.zst": zstd(records),
        "dictionary.warc.zst": zstd(records, dictionary),
        "rows.jsonl": rows,
        "rows.jsonl.gz": gzip.compress(rows),
        "rows.jsonl.zst": zstd([rows]),
        "table.parquet": parquet(),
        "pax.tar": tar(tarfile.PAX_FORMAT),
        "gnu.tar": tar(tarfile.GNU_FORMAT),
        "code.tar.gz": gzip.compress(tar(tarfile.GNU_FORMAT)),
        "book.txt.gz": gzip.compress(b"word " * 500),
        "plain.http": response,
        "gzip.http": response.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n", 1)[:90]
        + gzip.compress(response),
        "chunked.http": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n",
    }


def damaged(data: bytes, pick: random.Random) -> bytes:
    """`data` with a few bytes changed, removed, repeated, moved, or its end cut off."""
    made = bytearray(data)
    for _ in range(pick.choice((1, 1, 2, 4, 16))):
        if not made:
            break
        place = pick.randrange(len(made))
        length = min(pick.choice((1, 2, 8, 100, 2000)), len(made) - place)
        match pick.randrange(7):
            case 0:
                made[place] ^= 1 << pick.randrange(8)
            case 1:
                made[place : place + length] = pick.randbytes(length)
            case 2:
                del made[place : place + length]
            case 3:
                made[place:place] = made[place : place + length] * pick.choice((1, 2, 50))
            case 4:
                made[place:place] = pick.choice(INTERESTING)
            case 5:
                made[place : place + length] = bytes(length)
            case 6:
                del made[place:]
    return bytes(made)


def attempt(name: str, data: bytes, folder: Path) -> str:
    """Read `data`; in one word how that ended. Lets everything through that must not happen."""
    if name.endswith(".http"):
        try:
            decoded_body(parse_response(data, LIMITS.header_bytes), LIMITS.body_bytes)
        except BadResponse as bad:
            return bad.rule
        return "kept"
    path = folder / name
    path.write_bytes(data)
    try:
        pairs = list(read(Input(location=str(path)), folder, LIMITS))
    except DataError:
        return "refused"
    assert pairs, "nothing at all"
    assert all(drop is None or drop.rule.startswith("read.") for _, drop in pairs)
    return "kept" if all(drop is None for _, drop in pairs) else "dropped"


def batch(name: str, data: bytes, seed: int, kept: Path, pipe) -> None:
    """BATCH attempts in a process of their own; the input is in `kept` while it is read."""
    resource.setrlimit(resource.RLIMIT_AS, (4 * MEMORY_BYTES, 4 * MEMORY_BYTES))  # libraries map far more than they use
    ends: Counter = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(seed, seed + BATCH):
            mutant = damaged(data, random.Random(f"{name} {number}"))
            kept.write_bytes(mutant)
            started = time.process_time()
            ends[attempt(name, mutant, Path(folder))] += 1
            if time.process_time() - started > CPU_SECONDS:
                raise TimeoutError(f"{name} {number} took {time.process_time() - started:.1f} s")
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 > MEMORY_BYTES:
                raise MemoryError(f"{name} {number}")
    kept.unlink()
    pipe.send(ends)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzzing of everything that reads foreign bytes.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="formats whose name holds this")
    options = parser.parse_args()
    files = {name: data for name, data in good_files().items() if options.only in name}
    context, folder = multiprocessing.get_context("fork"), Path(tempfile.mkdtemp(prefix="fuzz-"))
    started, seed, failed = time.monotonic(), options.seed, 0
    ends: dict[str, Counter] = {name: Counter() for name in files}
    while time.monotonic() - started < options.seconds:
        for name, data in files.items():
            ours, theirs = context.Pipe(duplex=False)
            kept = folder / f"{seed}-{name}"
            child = context.Process(target=batch, args=(name, data, seed, kept, theirs))
            child.start()
            theirs.close()
            child.join(BATCH * CPU_SECONDS)
            if child.exitcode == 0:
                ends[name] += ours.recv()
            else:
                child.kill()
                failed += 1
                print(f"FAILED {name}: exit {child.exitcode}, the input is {kept}", file=sys.stderr)
        seed += BATCH
    for name, counts in ends.items():
        print(f"{name:22} {sum(counts.values()):7}  " + "  ".join(f"{end} {n}" for end, n in counts.most_common()))
    print(f"{failed} failures; seeds {options.seed} to {seed - 1}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
