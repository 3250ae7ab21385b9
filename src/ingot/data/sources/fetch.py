"""Remote files into a local folder: resumed where they stopped, of one version, of the length that was announced.

    CACHE/KEY/part          the bytes so far
    CACHE/KEY/whole         all of it; only ever whole
    CACHE/KEY/version.json  the version that they belong to
    CACHE/.hosts/           one lock per connection to a host, shared by all workers

What is in CACHE can be deleted at any time; the caller does so for a file that was read.
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

from ingot.data.sources.remote import Changed, NoSuchHost, Remote, RemoteRules, Throttled, Unreachable, Version
from ingot.data.sources.s3 import S3Object
from ingot.data.sources.web import WebFile
from ingot.errors import DataError, ResourceError
from ingot.storage import sha256_bytes, write_json

_LONGEST_WAIT_SECONDS = 300.0
_ATTEMPTS_AT_A_NAME = 3  # that nobody knows
_PROGRESS_BYTES = 1 << 20  # so much more makes an attempt one that brought something
_POLL_SECONDS = 0.05
_sleep = time.sleep

Result = TypeVar("Result")


def is_remote(location: str) -> bool:
    return location.startswith(("http://", "https://", "s3://"))


def remote(location: str, rules: RemoteRules) -> Remote:
    return S3Object(location, rules) if location.startswith("s3://") else WebFile(location, rules)


def fetch(location: str, cache: Path, rules: RemoteRules, *, expected: Version | None = None) -> Path:
    """The whole file, at a place below `cache`. expected: the version it has to be, when that is known.

    Raises DataError for what cannot be had, is another version, or is larger than rules.max_bytes.
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


def forget(location: str, cache: Path) -> None:
    """Remove what `fetch` brought."""
    shutil.rmtree(_folder(location, cache), ignore_errors=True)


def version(location: str, cache: Path, rules: RemoteRules) -> Version:
    """What the server says of the file. Raises DataError."""
    source = remote(location, rules)
    with polite(source.host, cache, rules):
        return persistent(source.version, location, rules)


class _Download:
    def __init__(self, source: Remote, folder: Path, rules: RemoteRules, location: str, expected: Version | None):
        self.source, self.folder, self.rules, self.location, self.expected = source, folder, rules, location, expected
        self.part, self.facts = folder / "part", folder / "version.json"

    def run(self, cache: Path) -> None:
        # The connection stays taken while this file waits for its next attempt: others would disturb as much.
        with polite(self.source.host, cache, self.rules):
            persistent(self._attempt, self.location, self.rules, self._have)
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
                f"{self.location} is another version than when the build began ({self.expected} and {found})",
                rule="inputs stay as they are during a build",
                fix="start the build again",
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
            f"{self.location} has {found} bytes or more",
            rule=f"one remote file has at most {self.rules.max_bytes} bytes",
            fix="raise max_bytes, or leave the file out",
        )


def _disk(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"cannot write {path}: {error.strerror or error}",
        rule="a remote file is read from a local copy",
        fix="free some space, or use another folder; what was fetched is kept",
    )


def persistent(
    action: Callable[[], Result], location: str, rules: RemoteRules, progress: Callable[[], int] = lambda: 0
) -> Result:
    """What `action` returns, tried again while it raises Unreachable. progress: bytes so far; more of them is success
    enough to go on. Raises DataError when rules.attempts brought nothing."""
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
                raise DataError(
                    f"{location.partition('?')[0]} cannot be fetched: {error}",
                    rule=f"it was tried {failures} times with growing pauses",
                    fix="try again later: what was fetched is kept, and the same command goes on there",
                ) from None
            wait = min(rules.backoff_seconds * 2 ** (failures - 1), _LONGEST_WAIT_SECONDS) * random.uniform(0.5, 1.0)
            _sleep(max(wait, error.retry_after if isinstance(error, Throttled) else 0))


@contextlib.contextmanager
def polite(host: str, cache: Path, rules: RemoteRules) -> Iterator[None]:
    """Hold one of the connections to `host`, rules.delay_seconds after it was last used. Workers share them by locks,
    which the kernel takes back from one that dies."""
    if not host:
        yield
        return
    folder = cache / ".hosts"
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9.-]", "_", host)[:200]
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
    """A descriptor that holds the lock of `path`, or -1."""
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
