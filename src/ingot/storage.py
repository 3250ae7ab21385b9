"""Atomic writing of files, locks of folders, and hashes of contents.

Everything that ingot saves goes through `write_atomic` or `atomic_file`: the data is written under a temporary name,
flushed to disk, then renamed. A reader sees the old file or the new file, never a partly written file.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ingot.errors import ResourceError, RunBusyError

_CHUNK = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNFINISHED = ".tmp"  # the end of the names of files that are being written


def sha256_bytes(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path, on_bytes: Callable[[int], object] | None = None) -> str:
    """Return the SHA-256 of a file, in hex. on_bytes: called with the size of each chunk that was read."""
    with path.open("rb") as file:
        if on_bytes is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            on_bytes(len(chunk))
        return digest.hexdigest()


def canonical_json(value) -> str:
    """Return a value as JSON with sorted keys and no spaces: equal values give equal text, which fingerprints hash."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def fsync_dir(path: Path) -> None:
    """Flush the folder `path` to disk, so that a rename inside it survives a power loss."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "wb", *, make_folder: bool = True):
    """Yield a file that appears at `path`, flushed to disk, when the block ends without an error.

    make_folder: make its folder if it is not there; False: raise FileNotFoundError.
    """
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_UNFINISHED}")
    encoding = None if "b" in mode else "utf-8"
    try:
        with temporary.open(mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def unfinished_files(folder: Path, of: str = "*") -> list[Path]:
    """Return the files that processes are writing into `folder` with `atomic_file`, or were when they were killed.

    of: the name that such a file would get.
    """
    return sorted(folder.glob(f".{of}.*{_UNFINISHED}"))


def remove_unfinished(folder: Path) -> list[str]:
    """Remove the files that killed processes were writing into `folder` with `atomic_file`, and return their names.

    No other process may be writing into the folder.
    """
    left = unfinished_files(folder)
    for path in left:
        path.unlink()
    return [path.name for path in left]


def write_atomic(path: Path, data: bytes | str, *, make_folder: bool = True) -> None:
    with atomic_file(path, make_folder=make_folder) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, value) -> None:
    """Write `value` as JSON, indented and sorted, so that people can read and diff it."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def closing_lock(fd: int):
    """Unlock and close the file descriptor `fd` at the end of the block.

    A child that is forked meanwhile has a copy of the descriptor: the end of the block in this process unlocks the file
    all the same, its end in the child does not. If this process dies, the kernel releases the lock as soon as no such
    child is left.
    """
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_UN)  # to close is not enough while a child has a copy of the descriptor
        os.close(fd)


@contextlib.contextmanager
def exclusive(folder: Path, doing: str):
    """Lock `folder` while the block runs, see closing_lock.

    doing: what the holder of the lock does, for the message of the RunBusyError that is raised if another process
    holds the lock.
    """
    fd = os.open(folder, os.O_RDONLY)
    with closing_lock(fd):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusyError(
                "E-FOLDER-BUSY",
                f"another process is {doing}",
                rule="only one process at a time may work in a folder",
                fix="wait for that process, or write to another folder (--out)",
                folder=str(folder),
            ) from None
        yield


def require_free(path: Path, needed_bytes: int, purpose: str, fix: str = "write to another disk (--out)") -> None:
    """Raise ResourceError if the disk that holds `path` has less than `needed_bytes` left.

    purpose: of these bytes. fix: the way out besides freeing some space.
    """
    from ingot.units import format_bytes

    place = path
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise ResourceError(
            "E-DISK-SPACE",
            f"{purpose}: {format_bytes(needed_bytes)} of room needed, {format_bytes(free)} free on the disk of {place}",
            rule="the disk must have room for everything before ingot starts to write",
            fix=f"free some space, or {fix}",
            purpose=purpose,
            path=str(place),
            needed_bytes=needed_bytes,
            free_bytes=free,
        )


def is_full(error: BaseException) -> bool:
    """Return whether the operating system refused to write because a disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def disk_full(place: Path | str, error: Exception, doing: str = "") -> ResourceError:
    """Return the error to raise for a full disk.

    place: a folder or file on it; "" if nobody knows it. error: the cause. doing: what could not be finished.
    """
    disk = f"the disk of {place}" if place else "a disk"
    return ResourceError(
        "E-DISK-FULL",
        f"{disk} is full, or its quota is reached ({getattr(error, 'strerror', None) or error})"
        + (f": {doing} could not be finished" if doing else ""),
        rule="finished work is kept, and incomplete files are removed",
        fix="free some space and run the same command again: it continues",
        path=str(place),
    )


@contextlib.contextmanager
def full_disk_named(place: Path):
    """Raise ResourceError instead of an error of the operating system that a full disk causes in the block."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise disk_full(error.filename or place, error) from error
        raise
