"""The loss of a run folder while the run trains: its mount is gone, is read-only, or fails. No torch."""

import errno
import os
from pathlib import Path

from ingot.errors import ResourceError
from ingot.schema.run_folder import RunFolder

MAY_PASS = (errno.EIO, errno.ETIMEDOUT)  # as of a network file system that is mounted soft
# What a file system answers that is gone, or has become read-only. Lack of space and permissions are other errors.
_LOST = {
    errno.EIO,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENODEV,
    errno.ENXIO,
    errno.EROFS,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ECONNABORTED,
    errno.ESHUTDOWN,
    errno.EREMOTEIO,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
}


def is_loss(root: Path, error: OSError) -> bool:
    """Return whether an error of the operating system shows that the run folder `root` is lost."""
    place = error.filename
    is_inside = place is None or (isinstance(place, str | os.PathLike) and Path(place).is_relative_to(root))
    return error.errno in _LOST and is_inside


def require_folder(folder: RunFolder) -> None:
    """Raise ResourceError if the folder of a run that trains has no run file, or cannot be read; OSError if that may
    pass."""
    try:
        folder.config.stat()
    except OSError as error:
        if error.errno in MAY_PASS:  # the launcher decides whether it stays
            raise
        missing = isinstance(error, FileNotFoundError)
        raise folder_lost(folder.root, "its run file is not there" if missing else str(error.strerror)) from error


def folder_lost(root: Path, why: str) -> ResourceError:
    """Return the error of a run whose folder `root` is lost. why: what was found there."""
    return ResourceError(
        "E-RUN-FOLDER-LOST",
        f"the run folder {root} was lost while the run trained: {why}",
        rule="a run reads and writes one folder as long as it trains; its ranks are ended, and saved steps are kept",
        fix="mount the folder again, writable, then run the same command: it continues from the last saved step",
        run=str(root),
        why=why,
    )
