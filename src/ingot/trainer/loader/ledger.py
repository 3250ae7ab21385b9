"""The ledger: the samples that a run consumed, and the proof that they follow the order.

Ranks keep the sample ids of their steps; at a checkpoint these are joined and written as a segment. The checkpoint
lists the segments with their hashes, so a run that was killed, resumed or moved to another number of ranks can prove
that no sample was lost or repeated. The samples of a step that changed no weights, because its update
was skipped or its data were passed, are written as ~id.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ingot.errors import DataError
from ingot.schema.checkpoint import LedgerSegment, segment_file
from ingot.storage import sha256_bytes, write_atomic
from ingot.trainer.loader.order import Order

# A segment is a pure function of the run's settings and tokens, so its samples are not lost with its file.
_FIX = "ingot ckpt repair RUN writes the segment again from the order of samples; or restore the file from a copy"


class Ledger:
    """The samples that one rank consumed since the last checkpoint, for consecutive steps."""

    def __init__(self):
        self._first_step = 0
        self._ids: list[np.ndarray] = []

    def record(self, step: int, sample_ids: np.ndarray) -> None:
        """Record this rank's samples (int64 [n]) of a trained step. Raises DataError if a step was left out."""
        expected = self._first_step + len(self._ids)
        if self._ids and step != expected:
            raise DataError(
                "E-LEDGER-GAP",
                f"step {step} was recorded after step {expected - 1}",
                rule="steps are recorded one by one, in order",
                fix="this is a bug in ingot: please report it with the run's events.jsonl",
                step=step,
                expected=expected,
            )
        if not self._ids:
            self._first_step = step
        self._ids.append(np.asarray(sample_ids, np.int64))

    def mark_untrained(self, step: int) -> None:
        """Mark the samples of a recorded step, which changed no weights: in the ledger they are ~id."""
        at = step - self._first_step
        self._ids[at] = np.where(self._ids[at] < 0, self._ids[at], ~self._ids[at])

    def segment(self, first_step: int, last_step: int) -> np.ndarray:
        """Return this rank's samples of steps first..last: int64 [steps, n]. Raises DataError if a step is missing."""
        begin, end = first_step - self._first_step, last_step - self._first_step + 1
        if not 0 <= begin < end <= len(self._ids):
            held = f"{self._first_step} to {self._first_step + len(self._ids) - 1}" if self._ids else "none"
            raise DataError(
                "E-LEDGER-GAP",
                f"steps {first_step} to {last_step} are requested, but the recorded steps are: {held}",
                rule="a segment holds steps that were recorded and not yet dropped",
                fix="this is a bug in ingot: please report it with the run's events.jsonl",
                step=first_step,
            )
        return np.stack(self._ids[begin:end])

    def forget(self, last_step: int) -> None:
        """Drop the steps up to `last_step`, which are in a verified checkpoint."""
        count = max(last_step - self._first_step + 1, 0)
        self._ids = self._ids[count:]
        self._first_step += count


def segment_of(first_step: int, last_step: int, ids_by_step: np.ndarray) -> tuple[LedgerSegment, bytes]:
    """Return the samples of these steps (inclusive) of all ranks, in rank order, as a file of the ledger: its entry and
    its content.

    ids_by_step: int64 [steps, global_batch], ~id in rows of untrained steps. The file has these numbers, little-endian,
    row by row.
    """
    if ids_by_step.ndim != 2 or len(ids_by_step) != last_step - first_step + 1:
        raise DataError(
            "E-LEDGER-SHAPE",
            f"the sample ids of the steps {first_step} to {last_step} have the shape {ids_by_step.shape}",
            rule="a segment has one row of samples per step",
            fix="this is a bug in ingot: please report it with the run's events.jsonl",
            shape=list(ids_by_step.shape),
        )
    data = np.ascontiguousarray(ids_by_step, "<i8").tobytes()
    untrained = tuple((first_step + np.flatnonzero((ids_by_step < 0).all(axis=1))).tolist())
    segment = LedgerSegment(
        file=segment_file(first_step, last_step),
        first_step=first_step,
        last_step=last_step,
        sha256=sha256_bytes(data),
        untrained=untrained,
    )
    return segment, data


def of_step(ids: np.ndarray) -> np.ndarray:
    """Return the samples of a step, int64 [n], whether or not it was trained: ~id becomes id."""
    return np.where(ids < 0, ~ids, ids)


def is_untrained(ids: np.ndarray) -> bool:
    """Return whether the ledger says of a step with these entries that it changed no weights."""
    return bool(len(ids)) and bool((ids < 0).all())


def write_segment(folder: Path, first_step: int, last_step: int, ids_by_step: np.ndarray) -> LedgerSegment:
    """Write a file of the ledger atomically into `folder`. Returns its entry; the other arguments are those of
    `segment_of`."""
    segment, data = segment_of(first_step, last_step, ids_by_step)
    write_atomic(folder / segment.file, data)
    return segment


def read_ledger(folder: Path, segments: Sequence[LedgerSegment]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (step, sample ids int64 [global_batch]) for all steps of the segments, in order.

    Raises DataError for a damaged segment.
    """
    for segment in segments:
        rows, intact = read_segment(folder, segment)
        if not intact:
            raise damaged_segment(folder, segment)
        for row, ids in enumerate(rows):
            yield segment.first_step + row, ids


def read_segment(folder: Path, segment: LedgerSegment) -> tuple[np.ndarray, bool]:
    """Return the samples of a segment, int64 [steps, global_batch], and whether they have the hash of the checkpoint.

    Raises DataError if the file cannot be read, or does not hold rows of equal length.
    """
    path = folder / segment.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            "E-LEDGER-READ",
            f"ledger segment {path} cannot be read ({error.strerror})",
            rule="a checkpoint names the ledger segments of its run",
            fix=_FIX,
            path=str(path),
            step=segment.first_step,
        ) from None
    steps = segment.last_step - segment.first_step + 1
    if steps < 1 or len(data) % (8 * steps):
        raise damaged_segment(folder, segment)
    return np.frombuffer(data, "<i8").reshape(steps, -1), sha256_bytes(data) == segment.sha256


def damaged_segment(folder: Path, segment: LedgerSegment) -> DataError:
    """Return the error for a segment whose file differs from the file that was written."""
    return DataError(
        "E-LEDGER-HASH",
        f"ledger segment {folder / segment.file} differs from the segment that was written",
        rule="the checkpoint holds the SHA-256 of each segment",
        fix=_FIX,
        path=str(folder / segment.file),
        step=segment.first_step,
    )


def prove(ledger: Iterable[tuple[int, np.ndarray]], order: Order, global_batch: int) -> None:
    """Compare the consumed samples, from step 1, with `order`. Raises DataError that names the first difference."""
    expected = 1
    for step, ids in ledger:
        if step != expected:
            what = "was consumed twice" if step < expected else f"is missing: the ledger continues with step {step}"
            raise DataError(
                "E-LEDGER-STEP",
                f"step {min(step, expected)} {what}",
                rule="every step from 1 on is in the ledger exactly once, in order",
                fix="restore the ledger folder of this run from a copy",
                step=min(step, expected),
                found=step,
            )
        compare_step(step, ids, order, global_batch)
        expected = step + 1


def compare_step(step: int, ids: np.ndarray, order: Order, global_batch: int) -> None:
    """Compare the samples `ids` that a step consumed with `order`. Raises DataError that names the first difference.

    A step is trained as a whole, or not at all: then all entries are ~id.
    """
    wanted = order.step(step, global_batch)
    wanted = ~wanted if is_untrained(ids) else wanted
    if len(ids) != global_batch:
        raise DataError(
            "E-LEDGER-BATCH",
            f"step {step} consumed {len(ids)} samples, but train.global_batch is {global_batch}",
            rule="a step consumes one global batch",
            fix="set train.global_batch to the value that the run was trained with; if it has it, the ledger is "
            "damaged: ingot ckpt verify RUN names the file",
            step=step,
            samples=len(ids),
            expected=global_batch,
        )
    if (wrong := np.flatnonzero(ids != wanted)).size:
        at = int(wrong[0])
        raise DataError(
            "E-LEDGER-SAMPLE",
            f"step {step}: sample {at} was window {ids[at]}, but the order has window {wanted[at]} "
            f"({wrong.size} of {global_batch} differ)",
            rule="samples depend only on seed, tokens, weights and step",
            fix="use the seed, tokens and weights that the run was trained with; if they are the same, the ledger is "
            "damaged: ingot ckpt verify RUN names the file",
            step=step,
            sample=at,
            found=int(ids[at]),
            expected=int(wanted[at]),
            differ=int(wrong.size),
        )
