"""The marks of pinned checkpoints, which stay for ever: files of the run folder and objects of its store. No torch.

    checkpoints/pinned/step-00000400      pinned
    checkpoints/removing/step-00000400    in a store only: a process is removing this checkpoint, unless it is pinned

A mark has a file of its own: it is not in the manifest, whose hash covers every byte, and two commands never write to
one file. A run that trains looks for the marks at every removal.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ingot.schema.run_folder import CHECKPOINTS, RunFolder
from ingot.storage import fsync_dir, write_atomic
from ingot.stores.store import BlobStore
from ingot.trainer.checkpoint.rules import FOLDER

REMOVED = ".removed-"  # a local folder with this prefix is not a checkpoint any more
_PINNED, _REMOVING = "pinned", "removing"
_MARK = b"\n"  # the content of marks: some stores take an object without bytes for a folder
_PATIENCE_SECONDS = 5.0  # until a removal that has begun notices a mark
_PAUSE_SECONDS = 0.02


def pinned_steps(folder: RunFolder) -> set[int]:
    """Return the steps that are pinned in the run `folder`."""
    marks = folder.checkpoints / _PINNED
    return _steps_of(path.name for path in marks.iterdir()) if marks.is_dir() else set()


def pin(folder: RunFolder, step: int) -> bool:
    """Mark the checkpoint of `step` as pinned. Returns whether it is there; the mark stays in any case.

    The run may be training. A writer that removes this checkpoint looks for the mark between the two steps of a
    removal: so the folder is back before this function gives up, or it is gone for good.
    """
    write_atomic(_mark(folder, step), _MARK)
    path = folder.checkpoint(step)
    return _settled(path.exists, path.with_name(REMOVED + path.name).exists)


def unpin(folder: RunFolder, step: int) -> bool:
    """Remove the mark of `step`. Returns whether there was one."""
    mark = _mark(folder, step)
    try:
        mark.unlink()
    except FileNotFoundError:
        return False
    fsync_dir(mark.parent)
    return True


class StoredPins:
    """The marks in `store`, in the place of a run. The errors of the store pass through every method.

    saves: the folder of the saves that the marks are for, as in RunFolder. Saves of the weights alone cannot be pinned,
    but have marks of their removal.
    """

    def __init__(self, store: BlobStore, saves: str = CHECKPOINTS):
        self._store, self._saves = store, saves

    def pinned(self) -> set[int]:
        """Return the steps that are pinned in the store."""
        return self._marked(_PINNED)

    def mark(self, step: int) -> None:
        self._store.write(self._name(_PINNED, step), [_MARK])

    def pin(self, step: int, is_there: Callable[[], bool]) -> bool:
        """Mark the checkpoint of `step` as pinned. Returns whether it is there; the mark stays in any case.

        Another process may remove checkpoints: it looks for this mark after it has written its own, and this method
        looks for that one after it has written this, so at least one of them sees the other.
        """
        self.mark(step)
        return _settled(is_there, lambda: step in self._marked(_REMOVING))

    def unpin(self, step: int) -> bool:
        """Remove the mark of `step`. Returns whether there was one."""
        there = step in self.pinned()
        self._store.remove(self._name(_PINNED, step))
        return there

    def begin_removal(self, step: int) -> bool:
        """Return whether the checkpoint of `step` can be removed: it is not pinned, and a pin from now on will wait."""
        self._store.write(self._name(_REMOVING, step), [_MARK])
        return step not in self.pinned()

    def end_removals(self) -> None:
        """Declare all removals as ended, also those of processes that were killed."""
        for step in self._marked(_REMOVING):
            self._store.remove(self._name(_REMOVING, step))

    def _marked(self, kind: str) -> set[int]:
        return _steps_of(one.name.rpartition("/")[2] for one in self._store.list(f"{self._saves}/{kind}"))

    def _name(self, kind: str, step: int) -> str:
        return f"{self._saves}/{kind}/step-{step:08d}"


def _settled(is_there: Callable[[], bool], is_going: Callable[[], bool]) -> bool:
    """Return whether a checkpoint is there, after a removal of it that is under way has ended or was taken back."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while is_going() and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
    return is_there()


def _steps_of(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := FOLDER.fullmatch(name))}


def _mark(folder: RunFolder, step: int) -> Path:
    return folder.checkpoints / _PINNED / folder.checkpoint(step).name
