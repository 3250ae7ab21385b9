"""Many files changed as one: new files are staged, a journal says where they go, and whoever comes next finishes.

    DIR/.purge/new/PATH       what is to stand at DIR/PATH
    DIR/.purge/journal.json   written last: from here on the change is made, whatever happens

A kill before the journal leaves the old state (and a staging folder that the next call removes). A kill after it leaves
a folder whose manifests do not fit its files until `finish` has put the rest in place.
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
    """New versions of files of `data`, and files that go. Nothing outside its own folder changes before `commit`."""

    data: Path

    def __post_init__(self) -> None:
        self.drop()  # what a purge left that was killed before its journal
        self._replace: list[str] = []
        self._delete: list[str] = []

    def path(self, relative: str) -> Path:
        """Where to write the new DIR/relative."""
        self._replace.append(relative)
        path = self.staged(relative)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, relative: str, data: bytes | str) -> None:
        write_atomic(self.path(relative), data)

    def staged(self, relative: str) -> Path:
        """Where the new DIR/relative was written."""
        return self.data / FOLDER / "new" / relative

    def delete(self, relative: str) -> None:
        """DIR/relative goes, and what was staged for it."""
        if relative in self._replace:
            self._replace.remove(relative)
            self.staged(relative).unlink(missing_ok=True)
        self._delete.append(relative)

    def scratch(self) -> Path:
        """A new folder for what is made on the way."""
        path = self.data / FOLDER / "scratch"
        path.mkdir(parents=True)
        return path

    def drop(self) -> None:
        """Leave everything as it was."""
        shutil.rmtree(self.data / FOLDER, ignore_errors=True)

    def commit(self, facts: dict[str, Any]) -> None:
        """Decide for the new state, and put it in place. facts: JSON that `finish` gives back."""
        values = {"replace": self._replace, "delete": self._delete, "facts": facts}
        write_json(self.data / FOLDER / _JOURNAL, values)
        finish(self.data)


def is_unfinished(data: Path) -> bool:
    """Whether a purge of this folder was decided and not finished: its files and manifests do not fit each other."""
    return (data / FOLDER / _JOURNAL).exists()


def finish(data: Path) -> dict[str, Any] | None:
    """Put in place what a journal promises; returns its facts, None without a journal. Can be repeated at any point."""
    path = data / FOLDER / _JOURNAL
    try:
        journal = json.loads(path.read_bytes())
        replace, delete, facts = journal["replace"], journal["delete"], journal["facts"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} cannot be read ({error})", rule="it is written whole, then followed", fix="restore the folder"
        ) from None
    touched = set()
    for relative in replace:
        new, place = data / FOLDER / "new" / relative, data / relative
        if new.exists():  # else an earlier call moved it
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
