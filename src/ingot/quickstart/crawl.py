"""A real crawl without a network: documentation installed on this machine is served on 127.0.0.1, fetched over HTTP,
and stored as WARC files.

There are two main sites: guide.ingot.invalid shows the prose of docstrings (most of it passes the quality rules), and
pydoc.ingot.invalid shows pydoc's pages of the standard library (most of them do not). A mirror of some guide pages,
links with campaign parameters, dead links, pages in other languages and two abusive pages give every stage of the data
pipeline something to drop.

The same installed packages give the same bytes: the time of the crawl (HTTP Date and WARC-Date) is fixed, record ids
are UUIDv5, and the order follows from a seed. The host names end in .invalid, which no DNS ever resolves (RFC 2606),
and the URLs do not contain the port of this run.
"""

import base64
import gzip
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ingot.quickstart import pydoc_pages
from ingot.quickstart.guide import GuidePage, read_page, render_mirror, render_page, source_files, url_path
from ingot.quickstart.http_site import Fetcher, serve
from ingot.rng import derive
from ingot.storage import atomic_file, require_free

GUIDE, MIRROR, PYDOC = "guide.ingot.invalid", "docs-mirror.ingot.invalid", "pydoc.ingot.invalid"
_WARC_DATE, _HTTP_DATE = "2026-01-01T00:00:00Z", "Thu, 01 Jan 2026 00:00:00 GMT"
_USER_AGENT = "ingot-quickstart/1.0"
_PYDOC_DEADLINE_SECONDS = 180.0
_NEIGHBORS = 12  # each page links to so many modules before it, and as many after it
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
    """Crawl the installed documentation into `files` + 1 WARC files in `folder`, and return their paths.

    The files crawl-guide-NNNN.warc.gz contain the guide, its mirror and the small sites, crawl-pydoc-0000.warc.gz the
    pydoc pages (`source_of` returns the source of a file). progress(fraction, text) is called from time to time. Raises
    ResourceError if the disk is full or the loopback address does not work.
    """
    report = progress or (lambda fraction, text: None)
    folder.mkdir(parents=True, exist_ok=True)
    require_free(folder, _NEEDED_BYTES, "the crawl")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pydoc-") as scratch:
        rendered = Path(scratch) / "pages.jsonl"
        renderer = _start_pydoc(rendered)  # on another core while the guide is read
        try:
            guide = _guide_pages(random.Random(derive(seed, "crawl")), report)
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
                        report(0.5 + 0.5 * done / total, f"fetched {done:,} of {total:,} pages")
            paths.append(folder / name)
    report(1.0, f"{total:,} pages{notice}")
    return paths


def source_of(path: Path) -> str:
    """Return the source name of a file that `make_crawl` wrote: "guide" or "pydoc"."""
    return path.name.split("-")[1]


def _guide_pages(order: random.Random, report: Progress) -> list[_Page]:
    """Return the pages of the guide and the small sites around it, shuffled, so that each file gets some of every
    kind."""
    found = source_files()
    read: list[GuidePage] = []
    for done, (module, file) in enumerate(found):
        read.append(read_page(module, file))
        if done % 200 == 0:
            report(0.5 * done / len(found), f"read {done:,} of {len(found):,} modules")
    shown = [page for page in read if page.sections]
    names = [page.module for page in shown]
    pages = []
    for i, page in enumerate(shown):
        neighbors = names[max(0, i - _NEIGHBORS) : i] + names[i + 1 : i + 1 + _NEIGHBORS]
        pages.append(_html(GUIDE, url_path(page.module), render_page(page, neighbors)))
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
    """Start pydoc_pages in a separate process without the environment variables of this one, because pydoc imports the
    modules that it shows. out: the file to write."""
    command = [sys.executable, "-s", "-P", str(Path(pydoc_pages.__file__)), str(out)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        command, env={"PYTHONHASHSEED": "0"}, cwd=out.parent, stdin=quiet, stdout=quiet, stderr=quiet
    )


def _wait_for(renderer: subprocess.Popen) -> str:
    """Wait for pydoc; return "" if it finished without an error, otherwise a notice. Pages already written are used."""
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
        # The page names its encoding in a meta element; pydoc's own server sends no charset either.
        pages.append(_Page(PYDOC, page["path"], "text/html", page["html"].encode("utf-8", "replace")))
    return pages


# WARC/1.0 files as crawlers write them: one gzip member per record (ISO 28500), so readers can start at any record.


_COMPRESSION = 6


class WarcWriter:
    """A writer of WARC/1.0 records to an open binary file, one gzip member per record.

    Equal calls write equal bytes: `date` is the time of all records, and record ids are the UUIDv5 of file name,
    position and URL.
    """

    def __init__(self, file: IO[bytes], name: str, date: str):
        self._file, self._name, self._date = file, name, date
        self._count = 0
        fields = "software: ingot quickstart\r\nformat: WARC File Format 1.0\r\nrobots: obey\r\n"
        self._warcinfo = self._write("warcinfo", fields.encode(), "application/warc-fields", {"WARC-Filename": name})

    def response(self, url: str, address: str, message: bytes) -> None:
        """Append a response record. address: IP address of the server. message: the HTTP response, with headers."""
        _, _, payload = message.partition(b"\r\n\r\n")
        headers = {
            "WARC-Target-URI": url,
            "WARC-Warcinfo-ID": self._warcinfo,
            "WARC-IP-Address": address,
            "WARC-Block-Digest": _digest(message),
            "WARC-Payload-Digest": _digest(payload),
        }
        self._write("response", message, "application/http; msgtype=response", headers)

    def _write(self, kind: str, block: bytes, content_type: str, headers: dict[str, str]) -> str:
        seed = f"{self._name}\0{self._count}\0{headers.get('WARC-Target-URI', '')}"
        record_id = f"<urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, seed)}>"
        lines = {"WARC-Type": kind, "WARC-Date": self._date, "WARC-Record-ID": record_id, **headers}
        lines |= {"Content-Type": content_type, "Content-Length": str(len(block))}
        head = "WARC/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
        self._file.write(gzip.compress(head.encode() + block + b"\r\n\r\n", _COMPRESSION, mtime=0))
        self._count += 1
        return record_id


def _digest(data: bytes) -> str:
    return "sha1:" + base64.b32encode(hashlib.sha1(data, usedforsecurity=False).digest()).decode()


# Pages written for the quickstart crawl: other languages, insults, a list of contacts, and spam.
# Each of them gives one stage of the data pipeline something to drop.


# words: off (text of pages)
_GERMAN = """
Die Bibliothek lädt ihre Daten in kleinen Schritten, damit auch ein gewöhnlicher Rechner mit großen Sammlungen arbeiten
kann. Wer eine Datei zum ersten Mal öffnet, sollte wissen, dass nichts davon verändert wird. Alle Ergebnisse landen in
einem neuen Ordner, und ein abgebrochener Lauf wird beim nächsten Mal einfach fortgesetzt. Für jede verworfene Seite
steht ein Grund im Protokoll, so dass man jede Entscheidung nachlesen und bei Bedarf ändern kann.
"""
_FRENCH = """
La bibliothèque lit les données par petits morceaux, afin qu'un ordinateur ordinaire puisse traiter de grandes
collections. La première ouverture d'un fichier ne modifie rien. Tous les résultats sont écrits dans un nouveau
dossier, et un travail interrompu reprend là où il s'était arrêté. Chaque page rejetée reçoit une raison précise dans
le journal, ce qui permet de relire chaque décision et de la corriger si nécessaire.
"""
_SPANISH = """
La biblioteca lee los datos en trozos pequeños para que un ordenador normal pueda trabajar con colecciones grandes.
Abrir un archivo por primera vez no cambia nada. Todos los resultados se guardan en una carpeta nueva, y un trabajo
interrumpido continúa donde se quedó. Cada página descartada recibe un motivo en el registro, de modo que se puede
revisar cada decisión y cambiarla cuando haga falta.
"""
_RANT = """
I have had it with this damn parser and with the idiot who wrote it. Every time that I feed it a long file it stops in
the middle and tells me that the end was not expected. What kind of moron would call that an error message? The manual
is crap from the first page to the last, and the examples in it do not even run. My manager said that I should be
patient with the authors, but I think that they are a bunch of idiots with too much time. If you have to use this crap
at work, then I am sorry for you and for the whole damn team.
"""
_FLAME = """
Only an imbecile would sort a list that is already sorted, and yet here we are with this crappy function. The answer to
my report was that it works as designed, which is bollocks and they know it. I told them that the damn loop runs twice
and that any jackass with a clock can measure it. They closed the thread and went home to be pissed about something
else. Have fun with your slow program, you morons, because that is what you have earned with this attitude.
"""
_CONTACTS = """
The list of maintainers is kept for people who have to reach somebody about a release. Write to anna@guide.example,
bela@guide.example, carla@guide.example and dario@guide.example for the north. Write to emma@guide.example,
farid@guide.example, greta@guide.example and hugo@guide.example for the south. The office with the number
212-555-0147 is open in the morning. The office with the number 212-555-0163 is open in the evening. If nobody answers
to your message, then try ines@guide.example or jonas@guide.example and be patient.
"""
# words: on


def _page(title: str, text: str, language: str = "en") -> str:
    return (
        f'<!DOCTYPE html><html lang="{language}"><head><meta charset="utf-8"><title>{title}</title></head><body>'
        f'<header><a href="/">Community</a></header><main><article><h1>{title}</h1>'
        f"<p>{text.strip()}</p></article></main><footer>Posted by a member.</footer></body></html>"
    )


_SPAM = " ".join(["Click here for the best deal on cheap tickets, the best deal of the year."] * 40)
_HOST = "community.ingot.invalid"
OWN_PAGES: tuple[tuple[str, str, str], ...] = (
    (_HOST, "/de/bibliothek.html", _page("Die Bibliothek", _GERMAN, "de")),
    (_HOST, "/fr/bibliotheque.html", _page("La bibliothèque", _FRENCH, "fr")),
    (_HOST, "/es/biblioteca.html", _page("La biblioteca", _SPANISH, "es")),
    (_HOST, "/forum/parser.html", _page("Parser again", _RANT)),
    (_HOST, "/forum/sorting.html", _page("About sorting", _FLAME)),
    (_HOST, "/contacts.html", _page("Maintainers", _CONTACTS)),
    (_HOST, "/offers.html", _page("Offers", _SPAM)),
    (_HOST, "/empty.html", "<html><head><title>Soon</title></head><body><script>start()</script></body></html>"),
)
