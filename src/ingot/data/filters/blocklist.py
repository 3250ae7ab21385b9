"""Filter pages by their address: block lists of domains and URLs, and a score of words in the URL.

The user provides the lists: plain lines, hosts files, Adblock filters for whole domains, or a folder of the collection
of the University of Toulouse (UT1: CATEGORY/domains and CATEGORY/urls), each plain or gzipped. RefinedWeb (Penedo et
al. 2023, arXiv:2306.01116) blocked 4.6 million domains this way and scored the words in URLs. The setting `words` does
the latter, with a list that comes with ingot, blocklist_words.txt.

Each entry is kept as a hash of 8 bytes, in sorted order: 40 MB for five million domains. A name that is not listed is
blocked by mistake with a probability of entries / 2^64 per look-up.
"""

import functools
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ingot.data.sources.url import canonical_url
from ingot.errors import DataError, DataMissing
from ingot.ranges import Limit
from ingot.schema.corpus import Document, Drop
from ingot.storage import sha256_file

_LONGEST_LINE = 1 << 16  # bytes; the rest of a longer line is read as another line
_LIST_NAMES = ("domains", "urls")  # names of the lists in a UT1 folder
_NULL_ADDRESSES = ("0.0.0.0", "127.0.0.1", "::", "::1")
_LOCAL_NAMES = frozenset(
    ("localhost", "localhost.localdomain", "local", "broadcasthost", "ip6-localhost", "ip6-loopback")
)
_ADBLOCK = re.compile(r"\|\|([^/^$*|]+)\^(?:\$.*)?")
_DOMAIN = re.compile(r"[a-z0-9_](?:[a-z0-9_.\-]*[a-z0-9_])?\.?")
_PLAIN_LINES = re.compile(rb"[a-z0-9_.\-\n]+")
_SCHEME = re.compile(r"\s*[a-z][a-z0-9+.-]*://", re.IGNORECASE | re.ASCII)
_WORD = re.compile(r"[a-z]{3,}")
_HASH = functools.partial(xxhash.xxh3_64_intdigest, seed=0)


@dataclass(frozen=True, kw_only=True)
class BlocklistRules:
    """Settings of block lists.

    files: lists, or folders of lists. words: a URL is blocked if its words score this or more; 0: no scoring.
    """

    enabled: bool = True
    files: tuple[str, ...] = ()
    words: Limit = 2.0

    def problems(self):
        if self.words < 0:
            yield "words", f"is {self.words}, must be at least 0"


@dataclass(frozen=True)
class Lists:
    """Loaded block lists.

    domains, urls: uint64, sorted hashes of names and of canonical URLs. skipped: number of lines that are neither.
    """

    domains: np.ndarray
    urls: np.ndarray
    skipped: int


def fingerprint(rules: BlocklistRules) -> dict[str, Any]:
    """Return everything that affects the filter's results, as JSON values: the hashes of files, not their paths.

    Raises DataMissing if a file does not exist.
    """
    paths = [path for name in rules.files for path in _paths(name)]
    words = hashlib.sha256("\n".join(f"{word} {score}" for word, score in sorted(url_words().items())).encode())
    return {
        "words": rules.words,
        "word_list": words.hexdigest() if rules.words else "",
        "files": [{"name": path.name, "sha256": sha256_file(path)} for path in paths],
    }


def _paths(name: str) -> list[Path]:
    """Return [`name`] for a file; for a folder all lists in it, sorted by path."""
    path = Path(name)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.removesuffix(".gz") in _LIST_NAMES)
        found = found or sorted(p for p in path.iterdir() if p.is_file())
    else:
        found = [path] if path.is_file() else []
    if not found:
        raise DataMissing(
            "E-BLOCKLIST-MISSING",
            f"no block list at {path}",
            rule="blocklist.files names files, or folders with files",
            fix="correct the path in blocklist.files of the recipe, or remove it",
            path=str(path),
        )
    return found


@functools.lru_cache(maxsize=4)
def load_lists(names: tuple[str, ...]) -> Lists:
    """Read the lists in `names`, once per process. Raises DataMissing, and DataError for a damaged gzip file."""
    domains: list[np.ndarray] = []
    urls: list[np.ndarray] = []
    skipped = 0
    for path in (path for name in names for path in _paths(name)):
        try:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
                # Read pieces of whole lines, so that millions of entries are never in memory as Python objects.
                while piece := file.read(1 << 22):
                    piece += file.readline(_LONGEST_LINE)
                    one, other, lost = _parse(piece)
                    domains.append(one)
                    urls.append(other)
                    skipped += lost
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                "E-BLOCKLIST-UNREADABLE",
                f"{path} cannot be read: {error}",
                rule="a block list is a text file, plain or gzip",
                fix="fetch the list again, or remove it from blocklist.files of the recipe",
                path=str(path),
            ) from error
    return Lists(_sorted(domains), _sorted(urls), skipped)


def _sorted(parts: list[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)


def _parse(piece: bytes) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (hashes of domains, hashes of URLs, number of lines that are neither) for the lines in `piece`."""
    if _PLAIN_LINES.fullmatch(piece):  # only names, one per line
        names = (name.strip(b".") for name in piece.split())
        return np.fromiter(map(_HASH, names), np.uint64), np.zeros(0, np.uint64), 0
    domains, urls, skipped = [], [], 0
    for line in io.StringIO(piece.decode("utf-8", "replace"), newline=None):
        entries = list(entries_of(line))
        skipped += entries == [""]
        for entry in filter(None, entries):
            (urls if "/" in entry else domains).append(_HASH(entry.encode("utf-8", "surrogatepass")))
    return np.array(domains, np.uint64), np.array(urls, np.uint64), skipped


def entries_of(line: str) -> Iterator[str]:
    """Yield the entries of one line: domain names in lower case, URLs without scheme; "" for a line of unknown form.

    Comments (#, !), headers ([Adblock Plus]) and exceptions (@@) yield nothing.
    """
    line = line.strip()
    if not line or line[0] in "#![" or line.startswith("@@"):
        return
    if adblock := _ADBLOCK.fullmatch(line):
        yield _name(adblock[1])
        return
    words = line.partition(" #")[0].split()
    if len(words) > 1 and words[0] in _NULL_ADDRESSES:
        yield from (
            _name(word) for word in words[1:] if word.lower() not in _LOCAL_NAMES and word not in _NULL_ADDRESSES
        )
        return
    if len(words) != 1:
        yield ""
        return
    entry = words[0].lower().removeprefix("*.").removeprefix(".")
    if "/" not in entry:
        yield _name(entry)
        return
    key = url_key(words[0])
    yield key if _name(key.partition("/")[0].partition(":")[0]) and not set(entry) & set("^|*") else ""


def _name(text: str) -> str:
    """Return a domain name in the form that is hashed, or "" if `text` is not a domain name."""
    text = text.lower().rstrip(".")
    if not text.isascii():
        try:
            text = text.encode("idna").decode("ascii")
        except UnicodeError:
            return ""
    return text if "." in text and _DOMAIN.fullmatch(text) else ""


def url_key(url: str) -> str:
    """Return `url`, with or without a scheme, in the form that lists use: canonical, without the scheme and "www."."""
    # A "://" further on belongs to another address in the path or query of this one.
    canonical = canonical_url(url if _SCHEME.match(url) else f"http://{url}")
    return canonical.partition("://")[2].removeprefix("www.")


@functools.cache
def url_words() -> dict[str, float]:
    """Return the score of each word in the list that comes with ingot."""
    text = files("ingot.data.filters").joinpath("blocklist_words.txt").read_text(encoding="utf-8")
    pairs = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return {word: float(score) for word, score in pairs}


class Blocklist:
    """Stage with the rules blocklist.domain (the listed name), blocklist.url, blocklist.words ("2.5 >= 2: xxx porn").

    A listed domain blocks its subdomains. The stage reads only document.url, so it can run before extraction.
    """

    name = "blocklist"

    def __init__(self, rules: BlocklistRules | None = None):
        self.rules = rules or BlocklistRules()
        self.lists = load_lists(self.rules.files)

    @property
    def ran(self) -> str:
        lists = self.lists
        if self.rules.files:
            listed = f"{len(lists.domains):,} domains and {len(lists.urls):,} URLs of {len(self.rules.files)} lists"
            listed += f" ({lists.skipped:,} lines not understood)" if lists.skipped else ""
        else:
            listed = "no lists"
        words = f"score of {len(url_words())} words < {self.rules.words:g}" if self.rules.words else "no words"
        return f"{listed}; {words}"

    def __call__(self, document: Document) -> Drop | None:
        key = url_key(document.url)
        host = key.partition("/")[0].partition(":")[0]
        if len(self.lists.domains):
            labels = host.split(".")
            names = [".".join(labels[first:]) for first in range(max(len(labels) - 8, 0), len(labels) - 1)]
            for name, found in zip(names, self._listed(self.lists.domains, names), strict=True):
                if found:
                    return Drop(self.name, "blocklist.domain", name)
        if len(self.lists.urls) and self._listed(self.lists.urls, [key])[0]:
            return Drop(self.name, "blocklist.url", key[:200])
        if self.rules.words:
            score, words = url_score(document.url)
            if score >= self.rules.words:
                return Drop(self.name, "blocklist.words", f"{score:g} >= {self.rules.words:g}: {' '.join(words)}")
        return None

    @staticmethod
    def _listed(hashes: np.ndarray, names: list[str]) -> list[bool]:
        wanted = np.array([_HASH(name.encode("utf-8", "surrogatepass")) for name in names], np.uint64)
        rows = np.minimum(hashes.searchsorted(wanted), len(hashes) - 1)
        return (hashes[rows] == wanted).tolist()


def url_score(url: str) -> tuple[float, list[str]]:
    """Return (sum of the scores of the listed words in `url`, these words); each word counts once."""
    scores = url_words()
    words = sorted(set(_WORD.findall(url.lower())) & scores.keys())
    return sum(scores[word] for word in words), words
