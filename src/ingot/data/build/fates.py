"""What tasks over all inputs decide of single documents, and the curated files as they are behind that."""

import contextlib
import json
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ingot.data.build.corpus import EXCERPT_CHARACTERS
from ingot.data.build.stages import KEPT, URL
from ingot.data.tasks.task import Context
from ingot.schema.document import Drop

# What becomes of a document: `row` of input `part` goes, because of the document `like`. Sorted by part and row.
FATE = np.dtype([("part", "<u4"), ("row", "<u4"), ("kind", "u1"), ("similarity", "<f4"), ("like", "V16")])
SAME_URL, SAME_TEXT, SIMILAR = 0, 1, 2
_BEAT_SECONDS = 5.0


class Fates:
    """What finished tasks decided, each in its folder. No document has two fates."""

    def __init__(self, *folders: Path):
        self._rows = [np.load(folder / "fates.npy", mmap_mode="r") for folder in folders]

    def of(self, part: int) -> np.ndarray:
        """The FATE rows of input number `part`, ascending by row."""
        # Not numpy's searchsorted, which would read and copy the whole column.
        parts = [rows["part"] for rows in self._rows]
        mine = [rows[bisect_left(p, part) : bisect_right(p, part)] for rows, p in zip(self._rows, parts, strict=True)]
        together = np.concatenate([np.empty(0, FATE), *mine])
        return together[np.argsort(together["row"], kind="stable")]


def drop_of(fate: np.void, url: str) -> Drop:
    """`fate` as the funnel and the lineage tell it. url: the document's canonical one."""
    like = bytes(fate["like"]).hex()
    if fate["kind"] == SAME_URL:
        return Drop("url", "url.duplicate", url[:EXCERPT_CHARACTERS])
    if fate["kind"] == SAME_TEXT:
        return Drop("duplicates", "duplicates.same_text", f"as {like}")
    return Drop("near_duplicates", "near_duplicates.similar", f"{fate['similarity']:.3f} with {like}")


class Inputs:
    """The curated files by number, without the documents that earlier fates took away."""

    def __init__(self, folders: Sequence[Path] | Mapping[int, Path], fates: Fates | None = None):
        self.folders, self.fates = folders, fates or Fates()

    def index(self, part: int) -> np.ndarray:
        return np.load(self.folders[part] / "index.npy", mmap_mode="r")

    def reached_url(self, part: int) -> np.ndarray:
        """Rows of the documents whose URL counts."""
        return np.flatnonzero(self.index(part)["stage"] >= URL)

    def passed(self, part: int) -> np.ndarray:
        """Rows of the documents that passed every stage: those with a text hash and a signature."""
        return np.flatnonzero(self.index(part)["stage"] == KEPT)

    def left(self, part: int) -> np.ndarray:
        """Of `passed`, positions in it of the documents that no fate took."""
        return np.flatnonzero(~np.isin(self.passed(part), self.fates.of(part)["row"]))

    def texts_left(self, part: int) -> Iterator[str]:
        index = self.index(part)
        with (self.folders[part] / "rows.jsonl").open("rb") as file:
            for row in self.rows_left(part).tolist():
                file.seek(int(index["start"][row]))
                yield json.loads(file.read(int(index["bytes"][row])))["text"]

    def rows_left(self, part: int) -> np.ndarray:
        return self.passed(part)[self.left(part)]


@contextlib.contextmanager
def beating(context: Context) -> Iterator[None]:
    """Says now and then that a task lives that has no records but much to do."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_BEAT_SECONDS):
            context.at(-1)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
