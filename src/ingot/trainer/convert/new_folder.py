"""A folder that is written under a temporary name, and gets its own name when it is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ingot.errors import UsageError
from ingot.storage import fsync_dir


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder beside `out` that becomes `out` at the end; after an error or Ctrl-C nothing is left of it.

    Raises UsageError if `out` exists and is not an empty folder.
    """
    require_new(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    fsync_dir(out.parent)


def require_new(out: Path) -> None:
    """Raise UsageError if `out` exists and is not an empty folder."""
    if out.name in ("", "..") or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise UsageError(
            "E-CONVERT-FOLDER",
            f"{out} exists and is not an empty folder" if out.name not in ("", "..") else f"{out} cannot be written",
            rule="what was converted is written to a new folder, and nothing is overwritten",
            fix="name a folder that does not exist",
            path=str(out),
        )
