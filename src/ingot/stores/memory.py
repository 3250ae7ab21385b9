"""A store in the memory of this process, for programs that test what they do with a store."""

import time
from collections.abc import Iterable, Iterator

from ingot.stores.store import Chunk, StoredObject, already_stored, check_name, not_stored


class MemoryStore:
    """Objects in a dictionary: name -> (bytes, time of the write)."""

    def __init__(self, name: str = "store"):
        self._name = name
        self._objects: dict[str, tuple[bytes, float]] = {}

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def write(self, name: str, data: Iterable[Chunk], *, new: bool = False) -> None:
        check_name(name)
        entry = (b"".join(data), time.time())
        # One operation on the dictionary, so that exactly one of several threads writes.
        if new and self._objects.setdefault(name, entry) is not entry:
            raise already_stored(self, name)
        self._objects[name] = entry

    def stream(self, name: str) -> Iterator[bytes]:
        if check_name(name) not in self._objects:
            raise not_stored(self, name)
        yield self._objects[name][0]

    def list(self, prefix: str = "") -> list[StoredObject]:
        below = f"{check_name(prefix)}/" if prefix else ""
        return [
            StoredObject(name, len(content), written)
            for name, (content, written) in sorted(self._objects.items())
            if name.startswith(below)
        ]

    def remove(self, name: str) -> None:
        self._objects.pop(check_name(name), None)
