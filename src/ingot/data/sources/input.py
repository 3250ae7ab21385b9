"""Inputs: what a build reads, wherever it lies and whatever its format.

`expand` turns the words of a command into inputs, `identity` says what decides their content, `read` gives their
documents. A file somewhere else is fetched into a cache first, so that every reader works on a local file, can go back
behind damage, and a lost connection costs no documents.
"""

import glob
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ingot.data.sources import commoncrawl, fetch, s3
from ingot.data.sources.code import read_code_tar, read_folder, walk
from ingot.data.sources.limits import Limits
from ingot.data.sources.parquet import read_parquet
from ingot.data.sources.remote import RemoteRules, Version
from ingot.data.sources.rows import Fields
from ingot.data.sources.text import read_jsonl, read_text
from ingot.data.sources.unpack import BadStream, Unpacked, foreign
from ingot.data.sources.warc import read_warc
from ingot.errors import ConfigError, DataError
from ingot.schema.document import Document, Drop
from ingot.storage import sha256_bytes, sha256_file

FORMATS = ("warc", "wet", "text", "jsonl", "parquet", "tar", "folder")
_SUFFIXES = {
    "warc": "warc", "wet": "wet", "wat": "warc", "txt": "text", "text": "text", "jsonl": "jsonl",
    "json": "jsonl", "ndjson": "jsonl", "parquet": "parquet", "tar": "tar", "tgz": "tar",
}  # fmt: skip
_PACKED = frozenset({"gz", "zst"})
_HEAD_BYTES = 4096
_MAX_NAME = 160
_NO_REMOTE = RemoteRules()


class BadInput(DataError):
    """An input that is at hand but is not what it should be: no WARC, an archive of another kind, nothing."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """One thing to read, and the name under which weights and evaluation know what comes from it.

    location: a local path, s3://bucket/key, or http(s)://...
    format: one of FORMATS, or "auto": by its name, then by its first bytes. A folder of source code has to be named.
    fields: of JSON lines and Parquet. label: its name, where the last part of `location` would not be unique.
    """

    location: str
    source: str = "web"
    format: str = "auto"
    fields: Fields = field(default_factory=Fields)
    label: str = ""

    @property
    def name(self) -> str:
        """What ids of documents and names of files are made from. The same file has to keep it."""
        if self.label:
            return self.label
        if not self.is_remote:
            return Path(self.location).absolute().name
        path, _, query = self.location.partition("://")[2].partition("?")
        base = _safe(unquote(path.rstrip("/").rpartition("/")[2]))
        return f"{sha256_bytes(query.encode())[:8]}-{base}" if query else base

    @property
    def is_remote(self) -> bool:
        return fetch.is_remote(self.location)


def expand(
    words: Sequence[str],
    source: str = "web",
    *,
    cache: Path,
    format: str = "auto",
    fields: Fields | None = None,
    rules: RemoteRules = _NO_REMOTE,
) -> list[Input]:
    """The inputs that `words` name, in their order; those of one word are sorted.

    A word is a file; a pattern with * or ?; a folder, whose crawl files, tables and archives at any depth are meant,
    or with format="folder" its source code; s3://bucket/key, or a prefix of keys that ends in "/" or has a *;
    an http(s) URL, or one of a list of paths (.paths, .paths.gz) relative to its host; or a crawl of Common Crawl,
    see commoncrawl.py. Lists are kept in `cache`.

    Raises ConfigError for what names nothing, and for two inputs of one name; DataError for what cannot be fetched.
    """
    _check_settings(format, rules)
    fields = fields or Fields()
    found: list[Input] = []
    for word in words:
        if not word or "\0" in word:
            raise ConfigError(f"{word!r} names no input", rule="an input is a path, a URL or cc:CRAWL")
        found += [
            Input(location=location, source=source, format=format, fields=fields, label=label)
            for location, label in _expanded(word, format, cache, rules)
        ]
    _check_names(found)
    return found


def identity(one: Input, cache: Path, rules: RemoteRules = _NO_REMOTE) -> dict:
    """What decides every byte that `read` will give: name, bytes, and sha256 of a local file; of a remote one what its
    server calls the version. Files of Common Crawl never change: their path is enough, and nobody is asked.

    Raises DataError for what is not there.
    """
    if not one.is_remote:
        path = Path(one.location)
        if path.is_dir():
            return {"name": one.name} | _folder_identity(path)
        try:
            return {"name": one.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
        except OSError as error:
            raise _unreadable(path, error) from None
    base = rules.common_crawl.rstrip("/") + "/crawl-data/"
    if one.location.startswith(base):
        return {"name": one.name, "bytes": 0, "common_crawl": one.location.removeprefix(base)}
    return {"name": one.name, **fetch.version(one.location, cache, rules).to_dict()}


def read(
    one: Input,
    cache: Path,
    limits: Limits | None = None,
    rules: RemoteRules = _NO_REMOTE,
    *,
    known: dict | None = None,
) -> Iterator[tuple[Document, Drop | None]]:
    """Pairs (document, why it has to go or None) in the order of the input, in constant memory.

    A remote file is fetched into `cache` and left there: `forget` removes it. known: its `identity`; another version
    is refused. Raises BadInput for what is not of its format at all, DataError for what cannot be had.
    """
    limits = limits or Limits()
    path = Path(one.location)
    if one.is_remote:
        expected = None
        if known and "etag" in known:
            expected = Version(known["bytes"], known["etag"], known["last_modified"])
        path = fetch.fetch(one.location, cache, rules, expected=expected)
    try:
        kind = one.format if one.format != "auto" else format_of(path, one.name, limits)
        if (kind == "folder") != path.is_dir():
            raise DataError(
                f"{path} is {'a' if path.is_dir() else 'no'} folder, read as {kind}",
                rule='a folder is read as source code, with format "folder"; other formats are files',
                fix="name its files, or another format",
            )
        yield from _reader(kind, path, one, limits)
    except OSError as error:
        raise _unreadable(Path(one.location), error) from None
    except DataError as error:
        # Nobody knows the name that a remote file has in the cache.
        found = error.found.replace(str(path), one.location.partition("?")[0]) if one.is_remote else error.found
        raise BadInput(found, rule=error.rule, fix=error.fix) from None


def forget(one: Input, cache: Path) -> None:
    """Remove what `read` fetched of `one`, also half-fetched."""
    if one.is_remote:
        fetch.forget(one.location, cache)


def format_of(path: Path, name: str, limits: Limits) -> str:
    """The format of the local file `path` that is called `name`: by suffix, else by its first bytes.

    Raises DataError for what is none of FORMATS.
    """
    if path.is_dir():
        return "folder"
    if by_name := _by_name(name):
        return by_name
    with path.open("rb") as file:
        start = file.read(16)
    try:
        with Unpacked(path, limits) as stream:
            head = stream.exactly(_HEAD_BYTES)
    except BadStream:
        head = b""
    if head.lstrip().startswith(b"WARC/"):
        return "warc"
    if head.startswith(b"PAR1"):
        return "parquet"
    if head[257:262] == b"ustar":
        return "tar"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return "jsonl"
    raise DataError(
        f"{name} is in no known format: it starts with {start!r}{foreign(start)}",
        rule=f"known are {', '.join(FORMATS)}; warc, wet, text, jsonl and tar also as .gz and .zst",
        fix="unpack zip, bzip2, xz and lz4 first; name the format of a file whose name does not say it",
    )


def _by_name(name: str) -> str:
    *_, last = parts = name.lower().split(".")
    if last in _PACKED and len(parts) > 2:
        return _SUFFIXES.get(parts[-2], "")
    return _SUFFIXES.get(last, "") if len(parts) > 1 else ""


def _reader(kind: str, path: Path, one: Input, limits: Limits) -> Iterator[tuple[Document, Drop | None]]:
    if kind in ("warc", "wet"):
        return read_warc(path, one.source, limits, name=one.name)
    if kind == "text":
        return read_text(path, one.name, one.source, limits)
    if kind == "jsonl":
        return read_jsonl(path, one.name, one.source, one.fields, limits)
    if kind == "parquet":
        return read_parquet(path, one.name, one.source, one.fields, limits)
    if kind == "tar":
        return read_code_tar(path, one.name, one.source, limits)
    return read_folder(path, one.name, one.source, limits)


def _expanded(word: str, format: str, cache: Path, rules: RemoteRules) -> list[tuple[str, str]]:
    """(location, label or "") of what `word` names."""

    def fetched(location: str) -> Path:
        return fetch.fetch(location, cache, rules)

    if commoncrawl.is_name(word):
        return [(location, "") for location in commoncrawl.locations(word, rules.common_crawl, fetched)]
    if word.startswith("s3://"):
        return _in_bucket(word, cache, rules)
    if word.startswith(("http://", "https://")):
        path = urlsplit(word).path
        if path.endswith((".paths", ".paths.gz")):
            root = word[: word.index("/", len("https://"))]
            return [(f"{root}/{line}", "") for line in commoncrawl.read_paths(fetched(word))]
        return [(word, "")]
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", word):
        raise ConfigError(
            f"{word!r} cannot be read", rule="inputs are local paths, s3://, http(s)://, and cc: for Common Crawl"
        )
    return _on_disk(word, format)


def _in_bucket(word: str, cache: Path, rules: RemoteRules) -> list[tuple[str, str]]:
    if not word.endswith("/") and "*" not in word:
        return [(word, "")]
    prefix = word.partition("*")[0]
    folder = prefix[: prefix.rindex("/") + 1]
    pattern = re.compile(re.escape(word).replace(r"\*", "[^/]*")) if "*" in word else None
    locations = fetch.persistent(lambda: s3.listed(folder, rules), word, rules)
    found = [place for place in locations if (pattern.fullmatch(place) if pattern else _by_name(place))]
    if not found:
        raise _nothing(word, "holds no crawl files, tables or archives")
    return [(place, _label(_safe(place.removeprefix(folder), "/"))) for place in found]


def _on_disk(word: str, format: str) -> list[tuple[str, str]]:
    path = Path(word)
    if path.is_dir():
        if format == "folder":
            return [(word, "")]
        found = [(name, other) for name, other in walk(path) if _by_name(name)]
        if not found:
            raise _nothing(word, "is a folder without crawl files, tables or archives; source code is read as a folder")
        if closed := next((f"{name}, {other}" for name, other in found if other), ""):
            raise ConfigError(
                f"{word} holds {closed}",
                rule="links in a folder are not followed, and nothing is left out in silence",
                fix=f"name the files themselves: {word.rstrip('/')}/*",
            )
        return [(str(path / name), _label(name)) for name, _ in found]
    if path.exists() or not glob.has_magic(word):
        if not path.is_file():
            raise _nothing(word, "is no file" if path.exists() else "does not exist")
        return [(word, "")]
    found = sorted(place for place in glob.glob(word, recursive=True) if Path(place).is_file())  # noqa: PTH207
    if not found:
        raise _nothing(word, "matches no file")
    return [(place, "") for place in found]


def _label(relative: str) -> str:
    """A name for a file deeper in a folder that was named: en/part-0.jsonl and de/part-0.jsonl are two."""
    if "/" not in relative:
        return ""
    label = relative.replace("/", "__")
    digest = sha256_bytes(relative.encode("utf-8", "surrogateescape"))[:8]
    return label if len(label) <= _MAX_NAME else f"{digest}-{label[-_MAX_NAME:]}"


def _safe(name: str, also: str = "") -> str:
    """A name that somebody else chose, as one for files and messages here."""
    return re.sub(rf"[^A-Za-z0-9._{also}-]", "_", name)[-1000 if also else -_MAX_NAME :] or "index"


def _nothing(word: str, found: str) -> ConfigError:
    return ConfigError(
        f"{word} {found}",
        rule="inputs end in .warc .wet .txt .jsonl .json .ndjson .parquet .tar, or these with .gz or .zst",
        fix='check the name; source code in a folder is read with format "folder"',
    )


def _check_settings(format: str, rules: RemoteRules) -> None:
    problems = [f"{name} {text}" for name, text in rules.problems()]
    if format not in (*FORMATS, "auto"):
        problems.append(f"format is {format!r}, must be auto or one of {', '.join(FORMATS)}")
    if problems:
        raise ConfigError("\n".join(problems), rule="settings of sources have to make sense")


def _check_names(inputs: list[Input]) -> None:
    name, count = next(iter(Counter(one.name for one in inputs).most_common(1)), ("", 0))
    if count > 1:
        raise ConfigError(
            f"{count} inputs are called {name}",
            rule="document ids are made from the base name, so it must be unique",
            fix="give each file once, rename one, or name the folder that holds both",
        )


def _folder_identity(path: Path) -> dict:
    """bytes, and the sha256 of a list of all files with theirs."""
    total, digest = 0, hashlib.sha256()
    for relative, other in walk(path):
        place = path / relative
        sha256 = "" if other else sha256_file(place)
        total += 0 if other else place.stat().st_size
        digest.update(os.fsencode(relative) + f"\0{other}{sha256}\n".encode())
    return {"bytes": total, "sha256": digest.hexdigest()}


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read {path}: {error.strerror or error}",
        rule="what is named as an input can be read",
        fix="check the path and its permissions",
    )
