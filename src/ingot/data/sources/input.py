"""The inputs of a build, in any location and any format.

`expand` turns the arguments of a command into inputs, `identity` describes the content of an input, and `read` yields
its documents. A remote file is first fetched into a cache. So every reader works on a local file and can seek, and a
lost connection loses no documents.

A Common Crawl archive is named by its crawl: cc:CC-MAIN-2024-10; /wet selects its WET files, #0-9 its first ten files.
A crawl is a list of about 90,000 paths, published as crawl-data/NAME/warc.paths.gz; its files never change.
"""

import glob
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from ingot.data.parts import Table, module_of
from ingot.data.sources import fetch, s3
from ingot.data.sources.bounded import Limits
from ingot.data.sources.code import walk
from ingot.data.sources.custom import failed, read_checked
from ingot.data.sources.remote import RemoteRules, Version, split_url, without_secrets
from ingot.data.sources.sniff import format_by_name, format_of
from ingot.data.sources.text import Fields
from ingot.errors import ConfigError, DataError
from ingot.plugins.registry import INGOT, resolve
from ingot.plugins.source import FORMATS
from ingot.schema.corpus import Document, Drop
from ingot.storage import sha256_bytes, sha256_file

_MAX_NAME = 160
_WITH_FIELDS = ("jsonl", "parquet")
_PLAIN_HOST = re.compile(r"[a-z0-9]+://(?:\[[^]@]*\]|[^:@/?#]*)(?::\d*)?(?:[/?#]|$)")  # or bucket, without a user
_NO_REMOTE = RemoteRules()


class BadInput(DataError):
    """An input could be opened but has the wrong content: it is not a WARC file, another kind of archive, or empty."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """A file or folder to read, and the name of the source to which its documents belong (mixture weights, evaluation).

    location: a local path, s3://bucket/key, or http(s)://...
    format: a registered format (plugins/source.py), or "auto" (by name, then by first bytes; a folder is never read as
    source code).
    fields: the keys or columns of JSON lines and Parquet. label: the name of the input, if the last part of `location`
    is not unique.
    """

    location: str
    source: str = "web"
    format: str = "auto"
    fields: Fields = field(default_factory=Fields)
    label: str = ""

    @property
    def name(self) -> str:
        """The name from which document ids and file names are made. It must stay the same for the same file."""
        if self.label:
            return self.label
        if not self.is_remote:
            return Path(self.location).absolute().name
        # A location with credentials is refused when it is fetched, but its name may be shown before.
        location = self.location
        if "@" in location and not _PLAIN_HOST.match(location):
            location = without_secrets(location)
        path, _, query = location.partition("://")[2].partition("?")
        base = _safe_name(unquote(path.rstrip("/").rpartition("/")[2]))
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
    """Return the inputs that `words` name, in the order of `words`; the inputs of one word are sorted.

    A word is one of: a file; a pattern with * or ?; a folder, for all crawl files, tables and archives in it at any
    depth, or with format="folder" for its source code; s3://bucket/key, or a prefix of keys that ends in "/" or has
    a *; an http(s) URL of a file, or of a list of paths (.paths, .paths.gz) relative to its host; cc:CRAWL. Downloaded
    lists are kept in `cache`.

    Raises ConfigError for a word that names no input, and for two inputs with the same name; DataError for a list that
    cannot be fetched.
    """
    _check_settings(format, rules)
    fields = fields or Fields()
    found: list[Input] = []
    for word in words:
        if not word or "\0" in word:
            raise ConfigError(
                "E-INPUT-NOTHING",
                f"{word!r} is not the name of an input",
                rule="an input is a path, a URL or cc:CRAWL",
                fix="remove this argument, or name a file",
                word=word,
            )
        found += [
            Input(location=location, source=source, format=format, fields=fields, label=label)
            for location, label in _locations_of(word, format, cache, rules)
        ]
    _check_names(found)
    return found


def identity(one: Input, cache: Path, rules: RemoteRules = _NO_REMOTE) -> dict:
    """Return the values that determine every byte that `read` yields.

    The values are name, bytes and sha256 for a local file, and the version that the server reports for a remote file.
    A file of Common Crawl never changes, so its path is enough and no request is made. Raises DataError for a missing
    file.
    """
    if not one.is_remote:
        path = Path(one.location)
        if path.is_dir():
            return {"name": one.name} | _folder_identity(path)
        try:
            return {"name": one.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
        except OSError as error:
            raise _unreadable(str(path), error) from None
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
    tables: Mapping[str, Table] | None = None,
) -> Iterator[tuple[Document, Drop | None]]:
    """Yield pairs (document, drop or None) in the order of the input, in constant memory.

    A remote file is fetched into `cache` and stays there until `forget` removes it. known: the earlier `identity` of
    the input; if the server has another version, DataError is raised. tables: the settings of formats of plug-ins, by
    name. Raises BadInput for a file whose content does not have its format, DataError for a file that cannot be read or
    fetched, and ConfigError for a plug-in that breaks its contract.
    """
    limits = limits or Limits()
    path, kind = Path(one.location), one.format
    if one.is_remote:
        expected = None
        if known and "etag" in known:
            expected = Version(known["bytes"], known["etag"], known["last_modified"])
        path = fetch.fetch(one.location, cache, rules, expected=expected)
    try:
        kind = kind if kind != "auto" else format_of(path, one.name, limits)
        if (kind == "folder") != path.is_dir():
            raise DataError(
                "E-INPUT-FOLDER",
                f"{path} is {'a' if path.is_dir() else 'not a'} folder, but its format is {kind}",
                rule='a folder is read as source code, with format "folder"; the other formats are files',
                fix="name the files in the folder, or another format",
                path=str(path),
                format=kind,
            )
        yield from _reader(kind, path, one, limits, tables or {})
    except OSError as error:
        shown = without_secrets(one.location) if one.is_remote else str(path)
        raise (
            _unreadable(shown, error) if module_of("format", kind) == INGOT else failed(kind, shown, error)
        ) from None
    except DataError as error:
        # The user knows the location of a remote file, not its path in the cache.
        found, fix, facts = error.found, error.fix, error.facts
        if one.is_remote:
            location = without_secrets(one.location)
            found, fix = found.replace(str(path), location), fix.replace(str(path), location)
            facts = facts | ({"path": location} if "path" in facts else {})
        raise BadInput(error.code, found, rule=error.rule, fix=fix, **facts) from None


def forget(one: Input, cache: Path) -> None:
    """Remove the copy of a remote input that `read` fetched, even if the copy is incomplete."""
    if one.is_remote:
        fetch.forget(one.location, cache)


def format_by_input(one: Input) -> str:
    """Return the format of an input as far as its name shows it, "" if only its first bytes do."""
    return one.format if one.format != "auto" else format_by_name(one.name)


def _reader(
    kind: str, path: Path, one: Input, limits: Limits, tables: Mapping[str, Table]
) -> Iterator[tuple[Document, Drop | None]]:
    if module_of("format", kind) == INGOT:
        settings = one.fields if kind in _WITH_FIELDS else None
        return resolve(FORMATS[kind].read)(path, one.name, one.source, limits, settings)
    return read_checked(kind, path, one.name, one.source, limits, tables.get(kind))


def _locations_of(word: str, format: str, cache: Path, rules: RemoteRules) -> list[tuple[str, str]]:
    """Return (Input.location, Input.label) of every input that `word` names."""
    if word.startswith("cc:"):
        return [(location, "") for location in _crawl_locations(word, cache, rules)]
    if word.startswith("s3://"):
        return _in_bucket(word, cache, rules)
    if word.startswith(("http://", "https://")):
        path = split_url(word)[3].partition("?")[0]
        if path.endswith((".paths", ".paths.gz")):
            root = word[: word.index("/", len("https://"))]
            return [(f"{root}/{line}", "") for line in fetch.fetch_paths(word, cache, rules)]
        return [(word, "")]
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", word):
        raise ConfigError(
            "E-INPUT-SCHEME",
            f"{without_secrets(word)!r} has an unknown scheme",
            rule="inputs are local paths, s3://, http(s)://, and cc: for Common Crawl",
            fix="copy the file to a local path, or to a store that speaks S3",
            word=without_secrets(word),
        )
    return _on_disk(word, format)


def _in_bucket(word: str, cache: Path, rules: RemoteRules) -> list[tuple[str, str]]:
    if not word.endswith("/") and "*" not in word:
        return [(word, "")]
    prefix = word.partition("*")[0]
    folder = prefix[: prefix.rindex("/") + 1]
    pattern = re.compile(re.escape(word).replace(r"\*", "[^/]*")) if "*" in word else None
    locations = fetch.retry(lambda: s3.listed(folder, rules), word, rules)
    found = [place for place in locations if (pattern.fullmatch(place) if pattern else format_by_name(place))]
    if not found:
        raise _names_nothing(word, "holds no crawl files, tables or archives")
    return [(place, _label(_safe_name(place.removeprefix(folder), "/"))) for place in found]


def _on_disk(word: str, format: str) -> list[tuple[str, str]]:
    path = Path(word)
    if path.is_dir():
        if format == "folder":
            return [(word, "")]
        found = [(name, other) for name, other in walk(path) if format_by_name(name)]
        if not found:
            raise _names_nothing(word, "is a folder without crawl files, tables or archives")
        if closed := next((f"{name}, {other}" for name, other in found if other), ""):
            raise ConfigError(
                "E-INPUT-LINK",
                f"{word} holds {closed}",
                rule="links in a folder are not followed, and files are never skipped without a message",
                fix=f"name the files: {word.rstrip('/')}/*",
                folder=word,
            )
        return [(str(path / name), _label(name)) for name, _ in found]
    if path.exists() or not glob.has_magic(word):
        if not path.is_file():
            raise _names_nothing(word, "is not a file" if path.exists() else "does not exist")
        return [(word, "")]
    found = sorted(place for place in glob.glob(word, recursive=True) if Path(place).is_file())  # noqa: PTH207
    if not found:
        raise _names_nothing(word, "matches no file")
    return [(place, "") for place in found]


def _label(relative: str) -> str:
    """Return a unique name for a file in a subfolder (en/part-0.jsonl, de/part-0.jsonl), "" if it is in none."""
    if "/" not in relative:
        return ""
    label = relative.replace("/", "__")
    digest = sha256_bytes(relative.encode("utf-8", "surrogateescape"))[:8]
    return label if len(label) <= _MAX_NAME else f"{digest}-{label[-_MAX_NAME:]}"


def _safe_name(name: str, also: str = "") -> str:
    """Return a remote name with "_" for all characters that are unsafe in file names. also: more safe characters."""
    return re.sub(rf"[^A-Za-z0-9._{also}-]", "_", name)[-1000 if also else -_MAX_NAME :] or "index"


def _names_nothing(word: str, found: str) -> ConfigError:
    word = without_secrets(word)
    return ConfigError(
        "E-INPUT-NOTHING",
        f"{word} {found}",
        rule="inputs end in .warc .wet .txt .jsonl .json .ndjson .parquet .tar, or these with .gz or .zst",
        fix='check the name; source code in a folder is read with format "folder"',
        word=word,
    )


def _check_settings(format: str, rules: RemoteRules) -> None:
    problems = [f"{name} {text}" for name, text in rules.problems()]
    if format != "auto" and format not in FORMATS:
        problems.append(f"format is {format!r}, must be auto or a format; {FORMATS.unknown(format)}")
    if problems:
        raise ConfigError(
            "E-INPUT-SETTINGS",
            "\n".join(problems),
            rule="each setting of the sources is within its limits",
            fix="correct these settings of the sources",
            problems=problems,
        )


def _check_names(inputs: list[Input]) -> None:
    name, count = next(iter(Counter(one.name for one in inputs).most_common(1)), ("", 0))
    if count > 1:
        raise ConfigError(
            "E-INPUT-NAME",
            f"{count} inputs have the name {name}",
            rule="document ids are made from the base name, so it must be unique",
            fix="give each file once, rename one, or name the folder that holds both",
            name=name,
            count=count,
        )


def _folder_identity(path: Path) -> dict:
    """Return "bytes", the size of all files, and "sha256", the hash of the list of files with their hashes."""
    total, digest = 0, hashlib.sha256()
    for relative, other in walk(path):
        place = path / relative
        sha256 = "" if other else sha256_file(place)
        total += 0 if other else place.stat().st_size
        digest.update(os.fsencode(relative) + f"\0{other}{sha256}\n".encode())
    return {"bytes": total, "sha256": digest.hexdigest()}


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(
        "E-INPUT-READ-FAILED",
        f"cannot read {path}: {error.strerror or error}",
        rule="an input must be readable",
        fix="check the path and its permissions",
        path=path,
    )


# Common Crawl

_CRAWL = re.compile(
    r"cc:(?P<crawl>CC-MAIN-\d{4}(?:-\d{2}|-\d{4})?|CC-NEWS/\d{4}/\d{2})(?:/(?P<kind>warc|wet))?"
    r"(?:#(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?)?"
)


def _crawl_locations(word: str, cache: Path, rules: RemoteRules) -> list[str]:
    """Return the locations of the files that `word` names. Raises ConfigError, and DataError for a bad list."""
    match = _CRAWL.fullmatch(word)
    if not match:
        raise ConfigError(
            "E-CRAWL-NAME",
            f"{word!r} is not the name of a crawl",
            rule="crawls are cc:CRAWL, cc:CRAWL/wet, cc:CRAWL#FIRST-LAST; CRAWL is CC-MAIN-2024-10 or CC-NEWS/2024/01",
            fix="see commoncrawl.org for the names of crawls",
            word=word,
        )
    crawl, kind = match["crawl"], match["kind"] or "warc"
    base = rules.common_crawl.rstrip("/")
    paths = fetch.fetch_paths(f"{base}/crawl-data/{crawl}/{kind}.paths.gz", cache, rules)
    if match["first"]:
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if not first <= last < len(paths):
            raise ConfigError(
                "E-CRAWL-RANGE",
                f"{word}: {crawl} has only the files 0 to {len(paths) - 1}",
                rule="#FIRST-LAST counts files from 0 and includes the file LAST",
                fix=f"choose FIRST and LAST from 0 to {len(paths) - 1}",
                word=word,
                files=len(paths),
            )
        paths = paths[first : last + 1]
    return [f"{base}/{path}" for path in paths]
