"""A real crawl without a network: documentation that is installed here, served on loopback, fetched over HTTP, and
stored as WARC files.

Two sites: guide.ingot.invalid shows the prose of docstrings (most of it survives the quality rules), and
pydoc.ingot.invalid shows what pydoc makes of the standard library (most of it does not). A mirror of some guide pages,
links with campaign parameters, dead links, pages in other languages and two ill-mannered ones give every stage of the
data pipeline something to drop.

Reproducible: the same installed packages give the same bytes. Fixed for that are the time of the crawl (HTTP Date and
WARC-Date), record ids (UUIDv5), and the order (a seed). The host names end in .invalid, which no DNS ever answers
(RFC 2606), so the URLs do not carry the port of this run.
"""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ingot.quickstart import pydoc_pages
from ingot.quickstart.guide import GuidePage, read_page, render_mirror, render_page, source_files, url_path
from ingot.quickstart.http_site import Fetcher, serve
from ingot.quickstart.own_pages import OWN_PAGES
from ingot.quickstart.warc_writer import WarcWriter
from ingot.rng import derive
from ingot.storage import atomic_file, require_free

GUIDE, MIRROR, PYDOC = "guide.ingot.invalid", "docs-mirror.ingot.invalid", "pydoc.ingot.invalid"
_WARC_DATE, _HTTP_DATE = "2026-01-01T00:00:00Z", "Thu, 01 Jan 2026 00:00:00 GMT"
_USER_AGENT = "ingot-quickstart/1.0"
_PYDOC_DEADLINE_SECONDS = 180.0
_NEIGHBOURS = 12  # links per page, before and after the module
_EVERY_UTM, _EVERY_MIRROR, _DEAD_LINKS = 40, 30, 12
_NEEDED_BYTES = 200 << 20

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class _Page:
    host: str
    path: str
    content_type: str
    body: bytes  # empty: the server has no such page


def make_crawl(folder: Path, *, progress: Progress | None = None, files: int = 4, seed: int = 1234) -> list[Path]:
    """Crawl the installed documentation into `files` + 1 WARC files in `folder`; returns their paths.

    crawl-guide-0000.warc.gz ... hold the guide with its surroundings, crawl-pydoc-0000.warc.gz the pydoc pages
    (`source_of` tells which). progress(fraction, text) is called now and then. Raises ResourceError when the disk is
    full or loopback does not work.
    """
    tell = progress or (lambda fraction, text: None)
    folder.mkdir(parents=True, exist_ok=True)
    require_free(folder, _NEEDED_BYTES, "the crawl")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pydoc-") as scratch:
        rendered = Path(scratch) / "pages.jsonl"
        renderer = _start_pydoc(rendered)  # on another core while the guide is read
        try:
            guide = _guide_pages(random.Random(derive(seed, "crawl")), tell)
            notice = _wait_for(renderer)
        finally:
            renderer.kill()
            renderer.wait()
        pydoc = _read_pydoc(rendered)
    parts = [(f"crawl-guide-{i:04d}.warc.gz", guide[i::files]) for i in range(files)]
    parts.append(("crawl-pydoc-0000.warc.gz", pydoc))
    site = {f"http://{p.host}{p.path}": (p.content_type, p.body) for _, pages in parts for p in pages if p.body}
    total, done, paths = len(guide) + len(pydoc), 0, []
    with serve(site, _HTTP_DATE) as address, Fetcher(address, _USER_AGENT) as fetcher:
        for name, pages in parts:
            with atomic_file(folder / name) as file:
                writer = WarcWriter(file, name, _WARC_DATE)
                for page in pages:
                    response = fetcher.get(page.host, page.path)
                    writer.response(f"http://{page.host}{page.path}", address[0], response)
                    done += 1
                    if done % 200 == 0:
                        tell(0.5 + 0.5 * done / total, f"fetched {done:,} of {total:,} pages")
            paths.append(folder / name)
    tell(1.0, f"{total:,} pages{notice}")
    return paths


def source_of(path: Path) -> str:
    """The source name of a file that `make_crawl` wrote: "guide" or "pydoc"."""
    return path.name.split("-")[1]


def _guide_pages(order: random.Random, tell: Progress) -> list[_Page]:
    """The guide and what surrounds it, in crawl order: shuffled, so that every file holds a bit of everything."""
    found = source_files()
    read: list[GuidePage] = []
    for done, (module, file) in enumerate(found):
        read.append(read_page(module, file))
        if done % 200 == 0:
            tell(0.5 * done / len(found), f"read {done:,} of {len(found):,} modules")
    shown = [page for page in read if page.sections]
    names = [page.module for page in shown]
    pages = []
    for i, page in enumerate(shown):
        neighbours = names[max(0, i - _NEIGHBOURS) : i] + names[i + 1 : i + 1 + _NEIGHBOURS]
        pages.append(_html(GUIDE, url_path(page.module), render_page(page, neighbours)))
    order.shuffle(shown)
    pages += [_html(MIRROR, f"/pages{url_path(page.module)}", render_mirror(page)) for page in shown[::_EVERY_MIRROR]]
    pages += [
        _html(GUIDE, f"{page.path}?utm_source=newsletter&utm_medium=email", page.body.decode())
        for page in pages[::_EVERY_UTM]
        if page.host == GUIDE
    ]
    pages += [_Page(GUIDE, url_path(page.module), "", b"") for page in read if not page.sections][:_DEAD_LINKS]
    pages += [_html(host, path, text) for host, path, text in OWN_PAGES]
    order.shuffle(pages)
    return pages


def _html(host: str, path: str, text: str) -> _Page:
    return _Page(host, path, "text/html; charset=utf-8", text.encode())


def _start_pydoc(out: Path) -> subprocess.Popen:
    """pydoc imports what it shows, so it gets a process of its own; see pydoc_pages about its empty environment."""
    command = [sys.executable, "-s", "-P", str(Path(pydoc_pages.__file__)), str(out)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        command, env={"PYTHONHASHSEED": "0"}, cwd=out.parent, stdin=quiet, stdout=quiet, stderr=quiet
    )


def _wait_for(renderer: subprocess.Popen) -> str:
    """ "" when pydoc is done, else what to tell: what it wrote before the deadline or its end is used."""
    try:
        code = renderer.wait(_PYDOC_DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"; pydoc did not finish within {_PYDOC_DEADLINE_SECONDS:.0f} s"
    return "" if code == 0 else f"; pydoc ended with code {code}"


def _read_pydoc(rendered: Path) -> list[_Page]:
    pages = []
    for line in rendered.read_text(encoding="utf-8").split("\n") if rendered.exists() else ():
        try:
            page = json.loads(line)
        except json.JSONDecodeError:
            break  # the line that was being written at the deadline, or the end of the file
        # The page itself names its encoding, as pydoc's own server leaves it to the meta element.
        pages.append(_Page(PYDOC, page["path"], "text/html", page["html"].encode("utf-8", "replace")))
    return pages
