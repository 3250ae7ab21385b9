"""Objects in S3 and S3-compatible stores, read by obstore (the object_store crate of Apache Arrow).

An object is read in ranges of one version (If-Match), so that a download can be resumed and no request is large.
Credentials, region and endpoint come from the usual environment variables; ingot neither reads nor stores them.
"""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from ingot.data.sources.remote import (
    Changed,
    RemoteRange,
    RemoteRules,
    Unreachable,
    Version,
    forbidden_error,
    missing_error,
    without_secrets,
)
from ingot.errors import ConfigError, require

_RANGE_BYTES = 16 << 20
_MAX_LISTED = 1_000_000


def split(location: str) -> tuple[str, str]:
    """Split a location: 's3://bucket/some/key' -> ('bucket', 'some/key'). Raises ConfigError.

    A bucket with ":" has a tenant (Ceph), unless an "@" follows: then the location begins with credentials.
    """
    bucket, _, key = location.removeprefix("s3://").partition("/")
    credentials = "@" in bucket or (":" in bucket and "@" in key)
    if not bucket or credentials or any(part in ("", ".", "..") for part in key.rstrip("/").split("/") if key):
        raise ConfigError(
            "E-S3-NAME",
            f"{without_secrets(location)!r} is not the name of an S3 object",
            rule="an object is named s3://bucket/key, without credentials; no part of the key is empty, '.' or '..'",
            fix="check the name; give credentials in environment variables",
            location=without_secrets(location),
        )
    return bucket, key


class S3Object:
    """A remote file in a bucket. Connections are not limited, because object stores serve any number of requests."""

    host = ""

    def __init__(self, location: str, rules: RemoteRules, store: Any = None):
        """Open `location`. store: the obstore store to use instead of one made for the bucket."""
        bucket, self.key = split(location)
        self.shown = without_secrets(location)
        self.store = store or _store(bucket, rules)

    def version(self) -> Version:
        obstore = require("obstore", "data")
        with _translated_errors(self.shown):
            return _version(obstore.head(self.store, self.key))

    def part(self, start: int, version: Version | None) -> RemoteRange:
        found = self.version()
        if version and not version.same(found):
            start = 0
        return RemoteRange(start, found, self._pieces(start, found))

    def _pieces(self, start: int, version: Version) -> Iterator[bytes]:
        obstore = require("obstore", "data")
        while start < version.bytes:
            end = min(start + _RANGE_BYTES, version.bytes)
            options: dict[str, Any] = {"range": (start, end)}
            if version.etag:
                options["if_match"] = version.etag
            with _translated_errors(self.shown):
                piece = bytes(obstore.get(self.store, self.key, options=options).bytes())
            if len(piece) != end - start:
                raise Unreachable(f"{self.shown}: {len(piece)} bytes instead of {end - start}")
            yield piece
            start = end


def listed(location: str, rules: RemoteRules, store: Any = None) -> list[str]:
    """Return the sorted s3:// names of the non-empty objects whose keys begin with the prefix `location`.

    Raises Unreachable, DataError, ConfigError.
    """
    bucket, prefix = split(location)
    obstore = require("obstore", "data")
    keys: list[str] = []
    with _translated_errors(location):
        for page in obstore.list(store or _store(bucket, rules), prefix=prefix.rstrip("/") or None):
            keys += [entry["path"] for entry in page if entry["size"]]
            if len(keys) > _MAX_LISTED:
                raise ConfigError(
                    "E-S3-COUNT",
                    f"{without_secrets(location)} holds more than {_MAX_LISTED} objects",
                    rule=f"a prefix holds at most {_MAX_LISTED} objects",
                    fix="name a longer prefix",
                    location=without_secrets(location),
                )
    return [f"s3://{bucket}/{key}" for key in sorted(keys)]


def _store(bucket: str, rules: RemoteRules) -> Any:
    store = require("obstore.store", "data")
    endpoint = rules.s3_endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    config: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if rules.s3_anonymous:
        config["skip_signature"] = True
    seconds = timedelta(seconds=rules.timeout_seconds)
    return store.S3Store(
        bucket,
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": min(seconds, timedelta(seconds=20)),
            "read_timeout": seconds,
            "timeout": 4 * seconds,
            "user_agent": rules.user_agent,
        },
        # Attempts are counted in fetch.py, for all kinds of remote files.
        retry_config={"max_retries": 0, "retry_timeout": seconds},
        **config,
    )


def _version(meta: Any) -> Version:
    return Version(int(meta["size"]), meta.get("e_tag") or "", meta["last_modified"].isoformat())


class _translated_errors:
    """A context manager that turns exceptions of obstore into the exceptions that fetch.py handles."""

    def __init__(self, location: str):
        self.location = without_secrets(location)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, _) -> None:
        if error is None:
            return
        exceptions = require("obstore.exceptions", "data")
        description = f"{type(error).__name__}: {without_secrets(str(error).strip())[:200]}"
        if isinstance(error, exceptions.NotFoundError | FileNotFoundError):
            raise missing_error(self.location, "there is no such object") from None
        if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
            raise forbidden_error(self.location, description) from None
        if isinstance(error, exceptions.PreconditionError):
            raise Changed(f"{self.location} changed while it was read") from None
        if isinstance(error, exceptions.BaseError | OSError):
            raise Unreachable(f"{self.location}: {description}") from None
