"""Object stores (S3 and compatible ones, Google Cloud Storage, Azure), by obstore (the object_store crate of Apache
Arrow).

Credentials, region and endpoint come from the usual environment variables; ingot neither reads nor stores them. Large
objects go up in parts, several at once. An upload that is killed leaves no object, but its parts stay in the bucket and
cost money until a lifecycle rule of the bucket removes them.
"""

import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ingot.errors import ConfigError, require
from ingot.stores.store import (
    Chunk,
    NotStored,
    StoredObject,
    StoreRefused,
    StoreUnreachable,
    already_stored,
    check_name,
    not_stored,
)

# Variables that name a server of one's own, by scheme, the first that is set counts; and how obstore calls the setting.
_ENDPOINTS = {
    "s3": ("endpoint", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("base_url", "GOOGLE_BASE_URL"),
    "az": ("endpoint", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
SCHEMES = tuple(_ENDPOINTS)
_PART_BYTES = 16 << 20
_PARTS_AT_ONCE = 4  # memory of an upload: this many parts
_PRIVATE = re.compile(
    r"(?i)\b([\w-]*(?:authorization|credential|signature|key|secret|token)[\w-]*)(\s*[=:]\s*)[^\s&,;]+"
)
_NO_BUCKET = re.compile(r"<Code>(NoSuchBucket|ContainerNotFound)</Code>")
_DENIED = re.compile(r"\b40[13] (Forbidden|Unauthorized)")
_NO_CREDENTIALS = re.compile(r"169\.254\.169\.254|metadata\.google|CredentialsNotLoaded|(?i:missing credentials)")


@dataclass(frozen=True)
class Patience:
    """The repetitions of one request, after pauses from 0.1 s that double, before it counts as failed. The uploader of
    a run repeats what failed, for longer.

    retries: at most, within `retry_seconds`. timeout_seconds: of one attempt.
    """

    retries: int = 4
    retry_seconds: float = 30.0
    timeout_seconds: float = 60.0


_PATIENCE = Patience()


class ObjectStore:
    """The objects of a bucket below a prefix."""

    def __init__(self, url: str, store: Any = None, patience: Patience = _PATIENCE):
        """Open `url`, as in "s3://bucket/prefix". store: the obstore store to use instead of one made for the URL."""
        self._url = url.rstrip("/")
        self._store = store or _open(self._url, patience)
        self._obstore = require("obstore", "train")

    @property
    def url(self) -> str:
        return self._url

    def write(self, name: str, data: Iterable[Chunk], *, new: bool = False) -> None:
        hashes = _SentHashes()
        parts = _in_parts(data, hashes)
        with self._answer_lost(name), self._translated(name):
            first = next(parts)
            second = None if new else next(parts, None)
            if second is None:
                whole = b"".join((first, *parts)) if new else first
                mode = "create" if new else "overwrite"
                self._obstore.put(self._store, check_name(name), whole, mode=mode, use_multipart=False)
            else:
                self._obstore.put(
                    self._store,
                    check_name(name),
                    itertools.chain((first, second), parts),
                    chunk_size=_PART_BYTES,
                    max_concurrency=_PARTS_AT_ONCE,
                )
        with self._answer_lost(name):
            self._check(name, hashes, new=new)

    @contextlib.contextmanager
    def _answer_lost(self, name: str) -> Iterator[None]:
        """Turn "no such object", raised by a write, into StoreUnreachable: another attempt may succeed.

        A store answers so if the end of a multipart upload is repeated because its answer was lost."""
        try:
            yield
        except NotStored:
            raise StoreUnreachable(
                "E-STORE-UNREACHABLE",
                f"{self._url}/{name} was sent, but the store does not know whether it has it",
                rule="what a store holds is compared with what was sent before it counts as stored",
                fix="none is needed: the upload is repeated",
                store=self._url,
            ) from None

    def _check(self, name: str, hashes: "_SentHashes", *, new: bool) -> None:
        """Compare what the store holds with what was sent: by the object's tag if that is its MD5, as in most stores
        that speak S3, else by reading."""
        with self._translated(name):
            tag = (self._obstore.head(self._store, name).get("e_tag") or "").strip('"')
        if tag in hashes.tags():
            return
        stored = hashlib.sha256()
        for chunk in self.stream(name):
            stored.update(chunk)
        if stored.hexdigest() != hashes.sha256.hexdigest():
            if new:
                self.remove(name)  # this write made it; left there, it would refuse every further attempt
            raise StoreUnreachable(
                "E-STORE-CONTENT",
                f"{self._url}/{name} holds other bytes than were sent",
                rule="what a store holds is compared with what was sent before it counts as stored",
                fix="none is needed after one such error: the upload is repeated. If it happens again, do not trust "
                "this store",
                store=self._url,
                name=name,
            )

    def stream(self, name: str) -> Iterator[bytes]:
        with self._translated(name):
            found = self._obstore.get(self._store, check_name(name))
            for chunk in found.stream(min_chunk_size=_PART_BYTES // 2):
                yield bytes(chunk)

    def list(self, prefix: str = "") -> list[StoredObject]:
        with self._translated(prefix):
            pages = self._obstore.list(self._store, prefix=check_name(prefix) if prefix else None)
            found = [
                StoredObject(entry["path"], int(entry["size"]), entry["last_modified"].timestamp())
                for page in pages
                for entry in page
            ]
        return sorted(found, key=lambda one: one.name)

    def remove(self, name: str) -> None:
        with contextlib.suppress(NotStored), self._translated(name):
            self._obstore.delete(self._store, check_name(name))

    def _translated(self, name: str) -> "_Translated":
        return _Translated(self, name)


class _SentHashes:
    """The hashes of what was sent: SHA-256 of all, and MD5 in the form of the tags that S3 gives objects."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()
        self._parts: list[bytes] = []

    def add_part(self, part: Chunk) -> None:
        self.sha256.update(part)
        self._parts.append(hashlib.md5(part, usedforsecurity=False).digest())

    @property
    def has_parts(self) -> bool:
        return bool(self._parts)

    def tags(self) -> tuple[str, ...]:
        """Return the tags that an object of these parts may have: of a multipart upload, and of a single request."""
        of_parts = hashlib.md5(b"".join(self._parts), usedforsecurity=False).hexdigest()
        whole = (self._parts[0].hex(),) if len(self._parts) == 1 else ()
        return (f"{of_parts}-{len(self._parts)}", *whole)


def _in_parts(data: Iterable[Chunk], hashes: _SentHashes) -> Iterator[bytes]:
    """Yield the data in parts of _PART_BYTES, the last one shorter, and hash each."""
    waiting = bytearray()
    for chunk in data:
        waiting += chunk
        while len(waiting) >= _PART_BYTES:
            part = bytes(memoryview(waiting)[:_PART_BYTES])
            del waiting[:_PART_BYTES]
            hashes.add_part(part)
            yield part
    if waiting or not hashes.has_parts:
        hashes.add_part(part := bytes(waiting))
        yield part


class _Translated:
    """A context manager that turns exceptions of obstore into those of stores."""

    def __init__(self, store: ObjectStore, name: str):
        self._store, self._name = store, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, _) -> None:
        if not isinstance(error, Exception):
            return
        exceptions = require("obstore.exceptions", "train")
        if _NO_BUCKET.search(str(error)):
            raise _refused(self._store.url, "there is no such bucket") from None
        if isinstance(error, exceptions.NotFoundError | FileNotFoundError):
            raise not_stored(self._store, self._name) from None
        if isinstance(error, exceptions.AlreadyExistsError):
            raise already_stored(self._store, self._name) from None
        if not isinstance(error, exceptions.BaseError | OSError):
            return
        found = _without_credentials(str(error))
        if _NO_CREDENTIALS.search(found):  # the library asked the machine for them, as in a cloud
            raise _refused(self._store.url, "there are no credentials in the environment") from None
        denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
        if denied or _DENIED.search(found):
            raise _refused(self._store.url, "the store denies access with these credentials") from None
        raise StoreUnreachable(
            "E-STORE-UNREACHABLE",
            f"{self._store.url} does not answer as it should: {found}",
            rule="a store must be reachable",
            fix="none is needed if it comes back: uploads are repeated. Else check the network, region and endpoint "
            "(AWS_ENDPOINT_URL)",
            store=self._store.url,
        ) from None


def _refused(url: str, found: str) -> StoreRefused:
    return StoreRefused(
        "E-STORE-REFUSED",
        f"{url}: {found}",
        rule="the bucket must exist, and the credentials of the environment must allow to list, read, write and "
        "remove objects below this prefix",
        fix="check the URL and the environment variables of the store (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, "
        "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, ...)",
        store=url,
    )


def _without_credentials(text: str, most: int = 300) -> str:
    """Return one line of an error of the library, without what may be a credential and without its debug output."""
    line = " ".join(text.split("Debug source:")[0].split())
    return _PRIVATE.sub(r"\1\2***", line)[:most]


def _open(url: str, patience: Patience) -> Any:
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES or not rest.partition("/")[0] or any(mark in rest for mark in "@?#") or ":" in rest:
        raise ConfigError(
            "E-STORE-URL",
            f"{url.partition('?')[0].rpartition('@')[2]!r} is not the place of a store",
            rule="a place is s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder, without "
            "credentials and without a query",
            fix="check the place; give credentials in environment variables",
        )
    store = require("obstore.store", "train")
    setting, *variables = _ENDPOINTS[scheme]
    endpoint = next((os.environ[name] for name in variables if os.environ.get(name)), "")
    config: dict[str, Any] = {setting: endpoint} if endpoint else {}
    return store.from_url(
        url,
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=20),
            "timeout": timedelta(seconds=patience.timeout_seconds),
        },
        retry_config={
            "max_retries": patience.retries,
            "retry_timeout": timedelta(seconds=patience.retry_seconds),
        },
        **config,
    )
