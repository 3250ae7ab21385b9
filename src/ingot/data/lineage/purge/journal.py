"""Replace many files as one transaction: new versions are staged, then a journal commits the change.

    DIR/.purge/new/PATH       the new version of DIR/PATH
    DIR/.purge/journal.json   the files to replace and to delete; written last, and commits the change

A kill before the journal is written leaves the old state, and a staging folder that the next call removes. After a
later kill, the manifests may not match the files until `finish` has moved the remaining files; the next call does this.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.errors import DataError
from ingot.storage import fsync_dir, write_atomic, write_json

FOLDER = ".purge"
_JOURNAL = "journal.json"


@dataclass
class Staging:
    """New versions of files in the folder `data`, and files to delete. Only DIR/.purge changes before `commit`."""

    data: Path

    def __post_init__(self) -> None:
        self.discard()  # the files of a purge that was killed before it wrote its journal
        self._replace: list[str] = []
        self._delete: list[str] = []

    def path(self, relative: str) -> Path:
        """Return the path at which to write the new version of DIR/relative, and note the file for the journal."""
        self._replace.append(relative)
        path = self.staged(relative)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, relative: str, data: bytes | str) -> None:
        write_atomic(self.path(relative), data)

    def staged(self, relative: str) -> Path:
        """Return the path of the new version of DIR/relative."""
        return self.data / FOLDER / "new" / relative

    def delete(self, relative: str) -> None:
        """Note DIR/relative for deletion, and remove its staged version if there is one."""
        if relative in self._replace:
            self._replace.remove(relative)
            self.staged(relative).unlink(missing_ok=True)
        self._delete.append(relative)

    def scratch(self) -> Path:
        """Return a new folder for intermediate files."""
        path = self.data / FOLDER / "scratch"
        path.mkdir(parents=True)
        return path

    def discard(self) -> None:
        """Remove the staging folder; the files of `data` remain unchanged."""
        shutil.rmtree(self.data / FOLDER, ignore_errors=True)

    def commit(self, facts: dict[str, Any]) -> None:
        """Write the journal, which commits the change, then move the files. facts: JSON values that `finish`
        returns."""
        values = {"replace": self._replace, "delete": self._delete, "facts": facts}
        write_json(self.data / FOLDER / _JOURNAL, values)
        finish(self.data)


def is_unfinished(data: Path) -> bool:
    """Check whether a purge of this folder was committed but not finished, so that its manifests may not match its
    files."""
    return (data / FOLDER / _JOURNAL).exists()


def finish(data: Path) -> dict[str, Any] | None:
    """Move and delete the files that the journal lists, and return its facts; None if there is no journal.

    A call that was killed at any point can be repeated. Raises DataError if the journal cannot be read.
    """
    path = data / FOLDER / _JOURNAL
    try:
        journal = json.loads(path.read_bytes())
        replace, delete, facts = journal["replace"], journal["delete"], journal["facts"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            "E-PURGE-JOURNAL",
            f"{path} cannot be read ({error})",
            rule="a purge writes its whole journal before it changes files",
            fix="restore the folder from a backup",
            path=str(path),
        ) from None
    touched = set()
    for relative in replace:
        new, place = data / FOLDER / "new" / relative, data / relative
        if new.exists():  # if not, an earlier call moved the file
            place.parent.mkdir(parents=True, exist_ok=True)
            new.replace(place)
            touched.add(place.parent)
    for relative in delete:
        (data / relative).unlink(missing_ok=True)
        touched.add((data / relative).parent)
    for folder in sorted(touched):
        fsync_dir(folder)
    path.unlink()
    fsync_dir(path.parent)
    shutil.rmtree(data / FOLDER)
    return facts
