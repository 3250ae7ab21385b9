"""Common Crawl by name: cc:CC-MAIN-2024-10, its WET files with /wet, its first ten WARC files with #0-9.

A crawl is a list of some 90,000 paths, published as crawl-data/NAME/warc.paths.gz; the files never change.
"""

import re
from collections.abc import Callable
from pathlib import Path

from ingot.data.sources.limits import Limits
from ingot.data.sources.unpack import BadStream, Unpacked, lines
from ingot.errors import ConfigError, DataError

_NAME = re.compile(
    r"cc:(?P<crawl>CC-MAIN-\d{4}(?:-\d{2}|-\d{4})?|CC-NEWS/\d{4}/\d{2})(?:/(?P<kind>warc|wet))?"
    r"(?:#(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?)?"
)
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]*(?:/[A-Za-z0-9_][A-Za-z0-9._=+-]*)*")
_MAX_PATHS = 2_000_000
_MAX_PATH_BYTES = 1000


def is_name(word: str) -> bool:
    return word.startswith("cc:")


def locations(word: str, base: str, fetched: Callable[[str], Path]) -> list[str]:
    """The files that `word` names, below `base`. fetched: URL -> local copy. Raises ConfigError, DataError."""
    match = _NAME.fullmatch(word)
    if not match:
        raise ConfigError(
            f"{word!r} names no crawl",
            rule="cc:CRAWL, cc:CRAWL/wet, cc:CRAWL#FIRST-LAST; crawls are called CC-MAIN-2024-10 or CC-NEWS/2024/01",
            fix="see commoncrawl.org for the names of crawls",
        )
    crawl, kind = match["crawl"], match["kind"] or "warc"
    base = base.rstrip("/")
    paths = read_paths(fetched(f"{base}/crawl-data/{crawl}/{kind}.paths.gz"))
    if match["first"]:
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if not first <= last < len(paths):
            raise ConfigError(
                f"{word}: {crawl} has the files 0 to {len(paths) - 1}",
                rule="#FIRST-LAST counts from 0, and LAST is the last one taken",
            )
        paths = paths[first : last + 1]
    return [f"{base}/{path}" for path in paths]


def read_paths(path: Path) -> list[str]:
    """The lines of a path list, plain or packed. Raises DataError for a line that is no relative path."""
    paths = []
    try:
        with Unpacked(path, Limits()) as stream:
            for number, (line, size) in enumerate(lines(stream, _MAX_PATH_BYTES), 1):
                text = line.decode("utf-8", "replace").strip()
                if size > _MAX_PATH_BYTES or (text and not _PATH.fullmatch(text)):
                    raise _bad_list(path, f"line {number} is {text[:80]!r}")
                paths += [text] if text else []
                if len(paths) > _MAX_PATHS:
                    raise _bad_list(path, f"more than {_MAX_PATHS} lines")
    except BadStream as bad:
        raise _bad_list(path, bad.value) from None
    if not paths:
        raise _bad_list(path, "no lines")
    return paths


def _bad_list(path: Path, found: str) -> DataError:
    return DataError(
        f"{path} is no list of paths: {found}",
        rule="one relative path per line",
        fix="remove that file to have it fetched again, or check the name",
    )
