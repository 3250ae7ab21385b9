"""From the URL of a place to its store."""

from pathlib import Path

from ingot.stores.local import LocalStore
from ingot.stores.objects import ObjectStore
from ingot.stores.store import BlobStore


def open_store(url: str) -> BlobStore:
    """Open the store at `url`: "file:///folder", or a bucket and prefix of an object store ("s3://bucket/prefix").

    Nothing is read or written yet. A folder must exist: otherwise every method of its store raises StoreRefused. Raises
    ConfigError for a URL that is not such a place, MissingPartError without the library for object stores.
    """
    folder = url.removeprefix("file://")
    if folder != url and folder.startswith("/"):
        return LocalStore(Path(folder), must_exist=True)
    return ObjectStore(url)
