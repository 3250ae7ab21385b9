"""Named objects in one place, a folder or an object store: what the remote tier of checkpoints needs of such a place.

An object is written completely or not at all, and never changed in part. A write with `new` separates two
writers: of several writers of one name exactly one succeeds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ingot.errors import ConfigError, DataMissing, ResourceError

Chunk = bytes | memoryview
_MAX_READ = 1 << 30


@dataclass(frozen=True)
class StoredObject:
    """An object in a listing. modified: Unix seconds of the last write."""

    name: str
    bytes: int
    modified: float


class BlobStore(Protocol):
    """A place of named objects. Names have parts divided by "/". url: the place, without credentials.

    Every method raises StoreRefused if another attempt would fail as well (no permission, no such bucket), and
    StoreUnreachable if it might succeed.
    """

    @property
    def url(self) -> str: ...

    def write(self, name: str, data: Iterable[Chunk], *, new: bool = False) -> None:
        """Write the object `name`, durably, and check that the store holds these bytes.

        new: raise AlreadyStored, and change nothing, if the object exists. The data is then held in memory.
        """
        ...

    def stream(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of an object in chunks. Raises NotStored, also after the first chunks."""
        ...

    def list(self, prefix: str = "") -> list[StoredObject]:
        """Return the objects below the folder `prefix`, at any depth, sorted by name; "" means all."""
        ...

    def remove(self, name: str) -> None:
        """Remove an object. An object that does not exist counts as removed."""
        ...


class NotStored(DataMissing):
    """There is no object of this name."""


class AlreadyStored(ResourceError):
    """A write with `new` found an object of this name."""


class StoreRefused(ResourceError):
    """The store cannot be used in this way: another attempt would fail as well."""


class ObjectTooLarge(StoreRefused):
    """An object has more bytes than its reader takes."""


class StoreUnreachable(ResourceError):
    """A request failed, but another attempt may succeed."""


def read_object(store: BlobStore, name: str, most: int = _MAX_READ) -> bytes:
    """Return the bytes of the object `name`. Raises ObjectTooLarge if it has more than `most` bytes, of which it reads
    one chunk more, whatever a listing says of its size."""
    chunks: list[bytes] = []
    size = 0
    for chunk in store.stream(name):
        chunks.append(chunk)
        size += len(chunk)
        if size > most:
            chunks.clear()  # the error may live long, and has this frame
            del chunk
            raise ObjectTooLarge(
                "E-STORE-SIZE",
                f"{store.url}/{name} has more than {most} bytes",
                rule="an object that is read as a whole must fit in memory",
                fix="check what wrote this object",
                name=name,
            )
    return b"".join(chunks)


def check_name(name: str) -> str:
    """Return `name`. Raises ConfigError for a name that could leave the place of a store."""
    if not name or "\\" in name or not name.isprintable() or any(part in ("", ".", "..") for part in name.split("/")):
        raise ConfigError(
            "E-STORE-NAME",
            f"{name!r} is not the name of an object in a store",
            rule="a name has printable parts divided by '/', none of them empty, '.' or '..'",
            fix="check where this name comes from",
            name=name,
        )
    return name


def not_stored(store: BlobStore, name: str) -> NotStored:
    return NotStored(
        "E-STORE-MISSING",
        f"{store.url} has no object {name!r}",
        rule="an object must exist to be read",
        fix="check the name and the listing of the store",
        store=store.url,
        name=name,
    )


def already_stored(store: BlobStore, name: str) -> AlreadyStored:
    return AlreadyStored(
        "E-STORE-EXISTS",
        f"{store.url} already has an object {name!r}",
        rule="an object that is written once is never replaced",
        fix="find out which run wrote it, and give every run a place of its own",
        store=store.url,
        name=name,
    )
