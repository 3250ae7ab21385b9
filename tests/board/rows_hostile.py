"""The row of hostile crawl files: a real build leaves out each bad record with its reason, in bounded memory."""

import gzip
import json
import re
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.e2e.test_data_faults import family, start, write_crawl
from tests.unit.data.extract.test_html import TOO_DEEP
from tests.unit.data.sources.test_bounds import hostile_json, hostile_warc, response

from ingot.drill.oracles import Verdicts

from .bench import Bench
from .row import Row, random_of

_MOST_BYTES = 512 << 20  # of resident memory, each process
_SECONDS = 300.0
_POLL_SECONDS = 0.02


def rd2(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Build a crawl among whose files are archives that inflate to 320 MiB, headers without end, pages of 200,000 open
    tags, lines of JSON that are too long or too deep, and random bytes."""
    random, root = random_of("RD2", seed), bench.root / f"data-hostile-{seed}"
    root.mkdir()
    crawl, expected = write_crawl(root), Counter[str]()
    for name, (data, counts) in (hostile_warc() | hostile_json()).items():
        (root / name).write_bytes(data)
        crawl.append(str(root / name))
        expected.update({f"read.{rule}": count for rule, count in counts.items() if rule != "kept"})
    pages, noise = root / "pages.warc.gz", root / "noise.warc.gz"
    pages.write_bytes(b"".join(_record(number, page) for number, page in enumerate(TOO_DEEP)))
    noise.write_bytes(_record(0, "<p>" + "The people of that house. " * 9) + random.randbytes(1 << 20))
    random.shuffle(crawl := [*crawl, str(pages), str(noise)])
    code, output, peak = _built(crawl, root / "built")
    verdicts.judge("o6", "the build", "" if code == 0 else f"exit code {code}: {output[-300:]}")
    verdicts.judge("o8", "the build", "" if peak < _MOST_BYTES else f"a process had {peak >> 20} MiB")
    verdicts.numbers["peak_mib"] = float(peak >> 20)
    stages = json.loads((root / "built" / "corpus" / "corpus.json").read_text())["funnel"]
    found = Counter[str]()
    for stage in stages:
        found.update(stage["dropped"])
        gone = stage["documents_in"] - stage["documents_out"] - sum(stage["dropped"].values())
        verdicts.judge("o3", stage["name"], f"{gone} documents have no reason" if gone else "")
    expected.update({"extract.too_deep": len(TOO_DEEP), "read.truncated_file": 1})
    for rule, count in expected.items():
        verdicts.judge("o3", rule, "" if found[rule] == count else f"{found[rule]} instead of {count}")
    bench.drop(root.name)


def _record(number: int, page: str) -> bytes:
    body = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n{page}".encode()
    return gzip.compress(response(100 + number, len(body)) + body + b"\r\n\r\n", mtime=0)


def _built(crawl: list[str], out: Path) -> tuple[int, str, int]:
    """Build a crawl. Returns the exit code, what was printed, and the most memory [bytes] that a process had."""
    driver, peak, ends = start(crawl, out), 0, time.monotonic() + _SECONDS
    while driver.poll() is None and time.monotonic() < ends:
        for pid in family(driver.pid):
            with suppress(OSError):  # it has ended
                if found := re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
                    peak = max(peak, int(found[1]) << 10)
        time.sleep(_POLL_SECONDS)
    driver.kill()
    return driver.wait(), driver.communicate()[0].decode(errors="replace"), peak


ROWS = (Row("RD2", "a data build of hostile WARC, HTML and JSON", rd2),)
