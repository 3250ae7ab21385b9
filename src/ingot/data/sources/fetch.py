"""Download remote files into a local folder. A stopped download is resumed; version and length are verified.

    CACHE/KEY/part          the bytes fetched so far
    CACHE/KEY/whole         the complete file
    CACHE/KEY/version.json  the version to which the bytes belong
    CACHE/.hosts/           one lock per connection to a host, shared by all workers

CACHE can be deleted at any time; the caller deletes a file after reading it.
"""

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ingot.data.sources.bounded import Limits
from ingot.data.sources.remote import (
    Changed,
    NoSuchHost,
    Remote,
    RemoteRules,
    Throttled,
    Unreachable,
    Version,
    without_secrets,
)
from ingot.data.sources.s3 import S3Object
from ingot.data.sources.unpack import BadStream, Unpacked, lines
from ingot.data.sources.web import WebFile
from ingot.errors import DataError, ResourceError
from ingot.storage import sha256_bytes, write_json

_LONGEST_WAIT_SECONDS = 300.0
_ATTEMPTS_AT_A_NAME = 3  # attempts if the host name cannot be resolved
_PROGRESS_BYTES = 1 << 20  # attempts that fetched at least this many bytes count as progress
_POLL_SECONDS = 0.05
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]*(?:/[A-Za-z0-9_][A-Za-z0-9._=+-]*)*")
_MAX_PATHS = 2_000_000
_MAX_PATH_BYTES = 1000
_sleep = time.sleep

Result = TypeVar("Result")


def is_remote(location: str) -> bool:
    return location.startswith(("http://", "https://", "s3://"))


def remote(location: str, rules: RemoteRules) -> Remote:
    return S3Object(location, rules) if location.startswith("s3://") else WebFile(location, rules)


def fetch(location: str, cache: Path, rules: RemoteRules, *, expected: Version | None = None) -> Path:
    """Download the file `location` and return its path in `cache`. expected: the required version, if known.

    Raises DataError if the file cannot be fetched, has another version, or is larger than rules.max_bytes.
    """
    folder = _folder(location, cache)
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "whole"
    with _locked(folder / "lock"):
        download = _Download(remote(location, rules), folder, rules, location, expected)
        if not whole.exists() or not download.is_expected():
            whole.unlink(missing_ok=True)
            download.run(cache)
    return whole


def fetch_paths(location: str, cache: Path, rules: RemoteRules) -> list[str]:
    """Download a list of paths, plain or compressed, and return its lines without blank ones.

    Raises DataError for a line that is not a relative path.
    """
    path, paths = fetch(location, cache, rules), []
    try:
        with Unpacked(path, Limits()) as stream:
            for number, (line, size) in enumerate(lines(stream, _MAX_PATH_BYTES), 1):
                text = line.decode("utf-8", "replace").strip()
                if size > _MAX_PATH_BYTES or (text and not _PATH.fullmatch(text)):
                    raise _bad_list(path, f"line {number} is {text[:80]!r}", number)
                paths += [text] if text else []
                if len(paths) > _MAX_PATHS:
                    raise _bad_list(path, f"more than {_MAX_PATHS} lines")
    except BadStream as bad:
        raise _bad_list(path, bad.value) from None
    if not paths:
        raise _bad_list(path, "no lines")
    return paths


def _bad_list(path: Path, found: str, line: int = 0) -> DataError:
    return DataError(
        "E-CRAWL-LIST",
        f"{path} is not a list of paths: {found}",
        rule="a list of paths has one relative path per line",
        fix="remove this file, so that the list is fetched again, or check the name",
        path=str(path),
        line=line,
    )


def forget(location: str, cache: Path) -> None:
    """Remove the copy that `fetch` made."""
    shutil.rmtree(_folder(location, cache), ignore_errors=True)


def version(location: str, cache: Path, rules: RemoteRules) -> Version:
    """Return the current version of the file, from its server. Raises DataError."""
    source = remote(location, rules)
    with host_connection(source.host, cache, rules):
        return retry(source.version, location, rules)


class _Download:
    def __init__(self, source: Remote, folder: Path, rules: RemoteRules, location: str, expected: Version | None):
        self.source, self.folder, self.rules, self.location, self.expected = source, folder, rules, location, expected
        self.part, self.facts = folder / "part", folder / "version.json"

    def run(self, cache: Path) -> None:
        # The connection stays reserved while this file waits for its next attempt, so that no other worker takes it.
        with host_connection(self.source.host, cache, self.rules):
            retry(self._attempt, self.location, self.rules, self._have)
        self.part.replace(self.folder / "whole")

    def is_expected(self) -> bool:
        known = self._known()
        return known is not None and (self.expected is None or self.expected.same(known))

    def _have(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _known(self) -> Version | None:
        try:
            return Version(**json.loads(self.facts.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def _attempt(self) -> None:
        have, known = self._have(), self._known()
        if known is None:
            have = 0
        elif have and have == known.bytes:
            return
        try:
            part = self.source.part(have, known if have else None)
            self._check(part.version)
            if part.start == 0:
                self.part.unlink(missing_ok=True)
                write_json(self.facts, part.version.to_dict())
            self._write(part.pieces, part.start, part.version.bytes)
        except Changed:
            self.part.unlink(missing_ok=True)
            self.facts.unlink(missing_ok=True)
            raise

    def _check(self, found: Version) -> None:
        if found.bytes > self.rules.max_bytes:
            raise self._too_large(found.bytes)
        if self.expected and not self.expected.same(found):
            raise DataError(
                "E-REMOTE-CHANGED",
                f"{without_secrets(self.location)} has changed since the build began "
                f"({self.expected} before, {found} now)",
                rule="inputs stay as they are during a build",
                fix="start the build again",
                location=without_secrets(self.location),
            )

    def _write(self, pieces: Iterator[bytes], size: int, total: int) -> None:
        with self.part.open("ab") as file:
            for piece in pieces:
                size += len(piece)
                if 0 <= total < size:
                    raise Changed(f"more than the {total} bytes that were announced")
                if size > self.rules.max_bytes:
                    raise self._too_large(size)
                try:
                    file.write(piece)
                except OSError as error:
                    raise _disk(self.part, error) from None
            file.flush()
            os.fsync(file.fileno())
        if size < total:
            raise Unreachable(f"{size} of {total} bytes")

    def _too_large(self, found: int) -> DataError:
        return DataError(
            "E-REMOTE-SIZE",
            f"{without_secrets(self.location)} has {found} bytes or more",
            rule=f"one remote file has at most {self.rules.max_bytes} bytes",
            fix="raise remote.max_bytes, or leave the file out",
            location=without_secrets(self.location),
            bytes=found,
            max_bytes=self.rules.max_bytes,
        )


def _disk(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        "E-CACHE-WRITE",
        f"cannot write {path}: {error.strerror or error}",
        rule="a remote file is copied to the disk before it is read",
        fix="free some space, or use another folder; the bytes fetched so far are kept",
        path=str(path),
    )


def retry(
    action: Callable[[], Result], location: str, rules: RemoteRules, progress: Callable[[], int] = lambda: 0
) -> Result:
    """Call `action` until it does not raise Unreachable, and return its result.

    progress(): returns the bytes fetched so far; a megabyte more starts the count of failed attempts again.
    Raises DataError after rules.attempts attempts without progress.
    """
    failures, before = 0, progress()
    while True:
        try:
            return action()
        except Unreachable as error:
            failures += 1
            if (now := progress()) >= before + _PROGRESS_BYTES:
                failures, before = 1, now
            most = min(rules.attempts, _ATTEMPTS_AT_A_NAME) if isinstance(error, NoSuchHost) else rules.attempts
            if failures >= most:
                shown = without_secrets(location)
                # The location is replaced first, because it may hold spaces, at which a URL within a text ends.
                reason = without_secrets(str(error).replace(location, shown))
                raise DataError(
                    "E-REMOTE-UNREACHABLE",
                    f"{shown} cannot be fetched: {reason}",
                    rule=f"a download is given up after {failures} attempts without progress, with growing pauses",
                    fix="run the same command again later: it continues after the bytes fetched so far",
                    location=shown,
                    attempts=failures,
                ) from None
            wait = min(rules.backoff_seconds * 2 ** (failures - 1), _LONGEST_WAIT_SECONDS) * random.uniform(0.5, 1.0)
            _sleep(max(wait, error.retry_after if isinstance(error, Throttled) else 0))


@contextlib.contextmanager
def host_connection(host: str, cache: Path, rules: RemoteRules) -> Iterator[None]:
    """Reserve one of the allowed connections to `host`, at least rules.delay_seconds after its last use.

    Workers share the connections through file locks, which the kernel releases when a worker dies.
    """
    if not host:
        yield
        return
    folder = cache / ".hosts"
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9.-]", "_", host.rpartition("@")[2])[:200]
    fd = -1
    while fd < 0:
        fd = next((fd for slot in range(rules.connections) if (fd := _try_lock(folder / f"{name}.{slot}")) >= 0), -1)
        if fd < 0:
            _sleep(_POLL_SECONDS)
    try:
        since = time.time() - os.fstat(fd).st_mtime
        if os.fstat(fd).st_size and since < rules.delay_seconds:
            _sleep(min(rules.delay_seconds - since, rules.delay_seconds))
        yield
    finally:
        os.pwrite(fd, b"used", 0)
        os.close(fd)


def _try_lock(path: Path) -> int:
    """Return a file descriptor that holds the lock of `path`, or -1 if another process holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return -1
    return fd


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _folder(location: str, cache: Path) -> Path:
    return cache / sha256_bytes(location.encode("utf-8", "surrogateescape"))[:32]
