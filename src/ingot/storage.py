"""Files that are either whole or absent, and hashes of their contents.

Everything that ingot saves goes through `write_atomic` or `atomic_file`: it is written under a temporary name, flushed
to disk, then renamed. A reader sees the old file or the new one, never a torn one.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

from ingot.errors import ResourceError, RunBusyError

_CHUNK = 1 << 20


def sha256_bytes(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value) -> str:
    """Return the one JSON text of a value (sorted keys, no spaces), on which fingerprints are computed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def fsync_dir(path: Path) -> None:
    """Make a rename inside `path` survive a power loss."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "wb"):
    """Yield a file that appears at `path`, flushed to disk, when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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


def write_atomic(path: Path, data: bytes | str) -> None:
    with atomic_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, value) -> None:
    """Write `value` as JSON, indented and sorted, so that people can read and diff it."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def exclusive(folder: Path, doing: str):
    """Lock `folder` while the block runs. The kernel releases the lock when this process dies.

    Raises RunBusyError if another process holds the lock.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusyError(
                "E-FOLDER-BUSY",
                f"another process is {doing}",
                rule="one process at a time works in a folder",
                fix="wait for that process, or write to another folder (--out)",
                folder=str(folder),
            ) from None
        yield
    finally:
        os.close(fd)


def require_free(path: Path, needed_bytes: int, purpose: str) -> None:
    """Raise ResourceError when the disk that holds `path` has less than `needed_bytes` left."""
    from ingot.units import format_bytes

    place = path
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise ResourceError(
            "E-DISK-SPACE",
            f"{purpose} needs {format_bytes(needed_bytes)}, but {format_bytes(free)} are free on the disk of {place}",
            rule="ingot checks space before it starts, so that nothing is half written",
            fix="free some space, or write to another disk (--out)",
            purpose=purpose,
            path=str(place),
            needed_bytes=needed_bytes,
            free_bytes=free,
        )
