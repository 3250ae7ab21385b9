"""The change of many files as one: new files are staged, then a journal lists where they go.

    DIR/.purge/new/PATH       the new version of DIR/PATH
    DIR/.purge/journal.json   written last; from then on the change is decided

A kill before the journal is written leaves the old state, and a staging folder that the next call removes. A kill after
it leaves a folder whose manifests do not match its files until `finish` has moved the remaining files; the next call
does so.
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
    """New versions of files of `data`, and files to delete. Outside DIR/.purge nothing changes before `commit`."""

    data: Path

    def __post_init__(self) -> None:
        self.discard()  # the files of a purge that was killed before it wrote its journal
        self._replace: list[str] = []
        self._delete: list[str] = []

    def path(self, relative: str) -> Path:
        """Return the path to write the new DIR/relative to, and list this file in the journal."""
        self._replace.append(relative)
        path = self.staged(relative)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, relative: str, data: bytes | str) -> None:
        write_atomic(self.path(relative), data)

    def staged(self, relative: str) -> Path:
        """Return the path of the new DIR/relative."""
        return self.data / FOLDER / "new" / relative

    def delete(self, relative: str) -> None:
        """List DIR/relative for deletion, and remove its staged version."""
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
        """Remove the staging folder, so that nothing changes."""
        shutil.rmtree(self.data / FOLDER, ignore_errors=True)

    def commit(self, facts: dict[str, Any]) -> None:
        """Write the journal, which decides the change, and move the files. facts: JSON that `finish` returns."""
        values = {"replace": self._replace, "delete": self._delete, "facts": facts}
        write_json(self.data / FOLDER / _JOURNAL, values)
        finish(self.data)


def is_unfinished(data: Path) -> bool:
    """Return whether a purge of this folder is decided but unfinished, so that files and manifests do not match."""
    return (data / FOLDER / _JOURNAL).exists()


def finish(data: Path) -> dict[str, Any] | None:
    """Move the files that the journal lists, and return its facts; None without a journal.

    A call that was killed at any point can be repeated. Raises DataError for a journal that cannot be read.
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
            rule="a purge writes its journal as a whole before it changes files",
            fix="restore the folder from a copy",
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
