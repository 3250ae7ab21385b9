"""The live page with a run of a million logged steps, in Chromium: how long until it is drawn, and until it follows.

Reading: CPU seconds until the server has read the whole record, and the memory that this takes. Answer: CPU seconds in
which the server makes the chart of the loss. First paint: from the navigation to the first drawn chart, in fresh
windows of a browser that runs; reading: of a server that was just started and still reads the record. Both in turn.
Read with a page: from the start of the server until it has read all, while a page is open. Update: what the page's
script takes for a message with new steps. Pages: CPU seconds of the server for one message to as many open pages.

    python benchmarks/watch.py [--steps 1000000] [--windows 7] [--pages 500]
"""

import argparse
import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from record import record

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.watched import WatchedRun  # noqa: E402

from ingot.schema.run_folder import RunFolder  # noqa: E402
from ingot.watch.charts import chart  # noqa: E402
from ingot.watch.live import LiveRun  # noqa: E402

CHROMIUM = os.environ.get("INGOT_CHROMIUM", "/usr/bin/chromium")
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
_WINDOW = {"width": 1280, "height": 900}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--pages", type=int, default=500)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        written = WatchedRun(
            steps=args.steps + 1000, ended=args.steps, log_every=100, back=(args.steps // 2, args.steps // 3)
        )
        root = written.write(Path(folder) / "run")
        found = {"steps": args.steps, "log_bytes": RunFolder(root).events.stat().st_size}
        found |= reading(root)
        print(found, flush=True)
        found |= in_browser(root, written, args.windows, args.pages)
    print(json.dumps(found, indent=1))
    record("watch", found, ["starlette", "uvicorn", "numpy"])


def reading(root: Path) -> dict[str, float]:
    """Return the seconds to read the record, the memory after it, and the seconds of an answer."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    run = LiveRun(root).read_all()
    read = time.process_time() - began
    answers = []
    for _ in range(7):
        began = time.process_time()
        chart([run], "loss", pixels=1300)
        answers.append(time.process_time() - began)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"read_seconds": read, "read_bytes": grown, "answer_seconds": statistics.median(answers)}


def in_browser(root: Path, written: WatchedRun, windows: int, pages: int) -> dict[str, object]:
    """Return what Chromium measures."""
    reading_paints, paints = [], []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(_FLAGS))
        began = time.perf_counter()
        with served(root) as (url, pid):
            context = browser.new_context(viewport=_WINDOW)
            first_paint(context.new_page(), url)  # the first window of a browser takes longer, whatever it shows
            wait_until_read(url)
            read_seconds = time.perf_counter() - began
            context.close()
            for _ in range(windows):
                with served(root) as (own_url, _):
                    context = browser.new_context(viewport=_WINDOW)
                    reading_paints.append(first_paint(context.new_page(), own_url))
                    assert is_reading(own_url), "the record was read before the page was drawn: take more steps"
                    context.close()
                context = browser.new_context(viewport=_WINDOW)
                page = context.new_page()
                paints.append(first_paint(page, url))
                if len(paints) < windows:
                    context.close()
            updates = [update(page, root, written, number) for number in range(windows)]
            browser.close()
            seconds = fan_out(url, root, written, pid, pages)
    return {
        "first_paint_reading_ms": statistics.median(reading_paints),
        "first_paint_reading_all_ms": reading_paints,
        "first_paint_ms": statistics.median(paints),
        "first_paint_all_ms": paints,
        "read_with_page_seconds": read_seconds,
        "update_ms": statistics.median(updates),
        "pages": pages,
        "pages_cpu_seconds": seconds,
    }


@contextlib.contextmanager
def served(root: Path) -> Iterator[tuple[str, int]]:
    """Yield the address of a server of the run, which was just started, and its process id."""
    command = [sys.executable, "-m", "ingot", "watch", str(root), "--web", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process.pid
    finally:
        process.terminate()
        process.wait()


def first_paint(page: Page, url: str) -> float:
    """Open the page; return the milliseconds from the navigation to the first drawn chart."""
    page.goto(url)
    while (painted := page.evaluate("document.documentElement.dataset.painted")) is None:
        page.wait_for_timeout(20)
    return float(painted)


def asked(url: str, path: str):
    base, _, token = url.partition("/?token=")
    request = urllib.request.Request(f"{base}{path}", headers={"Authorization": f"Bearer {token}"})
    return urllib.request.urlopen(request, timeout=120)


def is_reading(url: str) -> bool:
    return "reading" in json.load(asked(url, "/api/runs"))["runs"][0]["note"]


def wait_until_read(url: str) -> None:
    while is_reading(url):
        time.sleep(1.0)  # each question delays the reader


def add_line(root: Path, written: WatchedRun, number: int) -> int:
    """Append ten steps and their log line to the log; return the last step."""
    last = written.ended + 10 * (number + 1)
    rows = [
        {"kind": "step", "time": 1.79e9, "step": step, "loss": 3.0, "grad_norm": 1.0, "lr": 1e-4}
        for step in range(last - 9, last + 1)
    ]
    with RunFolder(root).events.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in [*rows, *written.line(1.79e9, last)]))
    return last


def update(page: Page, root: Path, written: WatchedRun, number: int) -> float:
    """Append a log line; return the milliseconds that the page's script took to show it."""
    last = add_line(root, written, number)
    while f"step {last:,} of" not in page.inner_text("#subtitle"):
        page.wait_for_timeout(20)
    return float(page.evaluate("document.documentElement.dataset.updateMs"))


def fan_out(url: str, root: Path, written: WatchedRun, pid: int, pages: int) -> float:
    """Open as many streams of events, append a line, read it from all; return the CPU seconds of the server."""
    base, _, token = url.partition("/?token=")
    host, _, port = base.removeprefix("http://").partition(":")
    head = f"GET /api/events HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    streams = []
    for _ in range(pages):
        stream = socket.create_connection((host, int(port)), timeout=120)
        stream.sendall(head)
        streams.append(stream)
    for stream in streams:
        read_until(stream, b"retry: 2000")
    before = cpu_seconds(pid)
    add_line(root, written, 1000)
    for stream in streams:
        read_until(stream, b"data: ")
    return cpu_seconds(pid) - before


def read_until(stream: socket.socket, wanted: bytes) -> None:
    found = b""
    while wanted not in found:
        found += stream.recv(1 << 16)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
