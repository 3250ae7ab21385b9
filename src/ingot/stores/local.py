"""A folder as a store, for disks and shared file systems. No locks: two hosts may use the same folder."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from ingot.storage import fsync_dir
from ingot.stores.store import Chunk, StoredObject, StoreRefused, already_stored, check_name, not_stored

_CHUNK = 8 << 20
_TEMPORARY = ".tmp"


class LocalStore:
    """The files below `folder`.

    must_exist: raise StoreRefused from every method if the folder does not exist, instead of making it with the first
    write and showing no object before: it may be on a disk that is not mounted.
    """

    def __init__(self, folder: Path, *, must_exist: bool = False):
        self._folder, self._must_exist = folder, must_exist

    @property
    def url(self) -> str:
        return f"file://{self._folder.absolute()}"

    def write(self, name: str, data: Iterable[Chunk], *, new: bool = False) -> None:
        path = self._path(name)
        writer = f"{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}"
        temporary = path.with_name(f".{path.name}.{writer}{_TEMPORARY}")
        self._require_folder()
        try:
            self._make_folder(path.parent)
            with temporary.open("wb") as file:
                for chunk in data:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            if new:
                self._link(temporary, path, name)
            else:
                temporary.replace(path)
            fsync_dir(path.parent)
        except OSError as error:
            raise self._refused(path, error) from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _link(self, temporary: Path, path: Path, name: str) -> None:
        try:
            os.link(temporary, path)  # fails if the name exists, also between hosts
        except FileExistsError:
            raise already_stored(self, name) from None

    def stream(self, name: str) -> Iterator[bytes]:
        path = self._path(name)
        self._require_folder()
        try:
            with path.open("rb") as file:
                most = min(_CHUNK, os.fstat(file.fileno()).st_size + 1)  # a read takes memory for all that it asks for
                while chunk := file.read(most):
                    yield chunk
        except FileNotFoundError:
            raise not_stored(self, name) from None
        except OSError as error:
            raise self._refused(path, error) from None

    def list(self, prefix: str = "") -> list[StoredObject]:
        top = self._path(prefix) if prefix else self._folder
        found = []
        self._require_folder()
        try:
            for folder, _, names in os.walk(top, onerror=self._raise_if_unreadable):
                for name in names:
                    path = Path(folder, name)
                    if name.startswith(".") and name.endswith(_TEMPORARY):
                        continue
                    with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                        status = path.stat()
                        found.append(StoredObject(str(path.relative_to(self._folder)), status.st_size, status.st_mtime))
        except OSError as error:
            raise self._refused(top, error) from None
        return sorted(found, key=lambda one: one.name)

    def remove(self, name: str) -> None:
        path = self._path(name)
        self._require_folder()
        try:
            path.unlink(missing_ok=True)
            folder = path.parent
            while folder != self._folder and not any(folder.iterdir()):
                folder.rmdir()
                folder = folder.parent
        except FileNotFoundError:
            return  # removed by another process
        except OSError as error:
            raise self._refused(path, error) from None

    def _path(self, name: str) -> Path:
        return self._folder / check_name(name)

    def _require_folder(self) -> None:
        if not self._must_exist:
            return
        try:
            is_there = self._folder.exists()  # a file in its place has an error of its own
        except OSError as error:  # a folder above it cannot be searched
            raise self._refused(self._folder, error) from None
        if is_there:
            return
        raise StoreRefused(
            "E-STORE-NO-FOLDER",
            f"{self.url} does not exist",
            rule="the folder of a file:// store must exist, as a bucket must: without this rule, a disk that is not "
            "mounted would look like an empty store",
            fix=f"mount its disk; or, for a new store, make the folder: mkdir -p {self._folder.absolute()}",
            store=self.url,
            path=str(self._folder.absolute()),
        )

    def _make_folder(self, folder: Path) -> None:
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for one in reversed(missing):
            one.mkdir(exist_ok=True)
            fsync_dir(one.parent)

    def _raise_if_unreadable(self, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    def _refused(self, path: Path, error: OSError) -> StoreRefused:
        return StoreRefused(
            "E-STORE-FOLDER",
            f"{path} cannot be used ({error.strerror})",
            rule="the folder of a store must be readable and writable, on a disk with free space",
            fix="free space on that disk, or correct the permissions of the folder",
            path=str(path),
            cause=error.strerror,
        )
