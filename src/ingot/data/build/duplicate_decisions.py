"""The decisions of tasks that compare documents of all inputs, and the documents that these decisions leave."""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from ingot.data.build.corpus import EXCERPT_CHARACTERS
from ingot.data.build.process_input import InputResult
from ingot.data.build.stages import DUPLICATES, NEAR_DUPLICATES, URL
from ingot.data.tasks.task import TaskRef
from ingot.schema.corpus import Drop

# A dropped document: row `row` of input `input`, dropped because it repeats the document whose id is `like`.
DECISION_DTYPE = np.dtype([("input", "<u4"), ("row", "<u4"), ("kind", "u1"), ("similarity", "<f4"), ("like", "V16")])
SAME_URL, SAME_TEXT, SIMILAR = 0, 1, 2
_OPEN_FILES = 64


@dataclass(frozen=True)
class DuplicateDecisions:
    """The result of a task that drops documents: the number of dropped documents.

    The task's folder holds decisions.npy: DECISION_DTYPE rows, ascending by input and row.
    """

    documents: int


class DroppedRows:
    """The rows that finished tasks dropped. A document is dropped at most once."""

    def __init__(self, decisions: Sequence[TaskRef[DuplicateDecisions]] = ()):
        self._rows = [np.load(one.folder / "decisions.npy", mmap_mode="r") for one in decisions]

    def of(self, number: int) -> np.ndarray:
        """Return the DECISION_DTYPE rows of input `number`, ascending by row."""
        # bisect reads a few rows; numpy's searchsorted would read and copy the whole column.
        columns = [rows["input"] for rows in self._rows]
        mine = [
            rows[bisect_left(column, number) : bisect_right(column, number)]
            for rows, column in zip(self._rows, columns, strict=True)
        ]
        together = np.concatenate([np.empty(0, DECISION_DTYPE), *mine])
        return together[np.argsort(together["row"], kind="stable")]


def drop_of(decision: np.void, url: str) -> Drop:
    """Return the Drop that funnel and lineage report for `decision`. url: the canonical URL of the dropped document."""
    like = bytes(decision["like"]).hex()
    if decision["kind"] == SAME_URL:
        return URL.drop("duplicate", url[:EXCERPT_CHARACTERS])
    if decision["kind"] == SAME_TEXT:
        return DUPLICATES.drop("same_text", f"as {like}")
    return NEAR_DUPLICATES.drop("similar", f"{decision['similarity']:.3f} with {like}")


class ProcessedInputs:
    """The processed inputs by number, without the documents that earlier decisions dropped."""

    def __init__(
        self,
        inputs: Sequence[TaskRef[InputResult]] | Mapping[int, TaskRef[InputResult]],
        dropped: DroppedRows | None = None,
    ):
        self._inputs, self._dropped = inputs, dropped or DroppedRows()

    def folder(self, number: int) -> Path:
        return self._inputs[number].folder

    def index(self, number: int) -> np.ndarray:
        """Return the INDEX_DTYPE rows of input `number`, mapped into memory."""
        return np.load(self.folder(number) / "index.npy", mmap_mode="r")

    def reached_url(self, number: int) -> np.ndarray:
        """Return the row numbers of the documents that reached the stage `url`: one per row of urls.npy."""
        return np.flatnonzero(self.index(number)["reached_url"])

    def passed(self, number: int) -> np.ndarray:
        """Return the row numbers of documents that passed every stage: one per row of texts.npy and signatures.npy."""
        return np.flatnonzero(self.index(number)["passed"])

    def left(self, number: int) -> np.ndarray:
        """Return the positions in `passed(number)` of the documents that no decision dropped."""
        return np.flatnonzero(~np.isin(self.passed(number), self._dropped.of(number)["row"]))

    def rows_left(self, number: int) -> np.ndarray:
        """Return the row numbers of the documents that passed every stage and that no decision dropped."""
        return self.passed(number)[self.left(number)]

    def texts_left(self, number: int) -> Iterator[str]:
        """Yield the texts of the documents in `rows_left(number)`."""
        index = self.index(number)
        with (self.folder(number) / "rows.jsonl").open("rb") as file:
            for row in self.rows_left(number).tolist():
                file.seek(int(index["start"][row]))
                yield json.loads(file.read(int(index["bytes"][row])))["text"]


class TextsByNumber:
    """The texts of the remaining documents of all inputs, by document number.

    rows: for each input, the .npy file with the row numbers of its documents. starts: the number of the first document
    of each input.
    """

    def __init__(self, inputs: ProcessedInputs, rows: Sequence[Path], starts: np.ndarray):
        self._inputs, self._rows, self._starts = inputs, rows, starts
        self._open = lru_cache(_OPEN_FILES)(self._files)

    def _files(self, number: int):
        lines = (self._inputs.folder(number) / "rows.jsonl").open("rb")
        return np.load(self._rows[number], mmap_mode="r"), self._inputs.index(number), lines

    def __getitem__(self, document: int) -> str:
        number = int(np.searchsorted(self._starts, document, side="right")) - 1
        rows, index, file = self._open(number)
        entry = index[rows[document - int(self._starts[number])]]
        file.seek(int(entry["start"]))
        return json.loads(file.read(int(entry["bytes"])))["text"]
