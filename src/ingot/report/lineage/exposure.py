"""The runs that were trained on a document: its samples, and the checkpoints saved after the first of them.

Trained samples are read from the ledger, which is right even if settings changed during the run; reading it is several
times faster than computing the sample order. Samples of future steps are computed from the order.
"""

import fcntl
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from ingot.data.lineage.purge.history import TokenLayout, find_layout
from ingot.errors import ConfigError
from ingot.report.facts import no_run_folder
from ingot.schema.accepted import AcceptedChanges, records_for
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.quarantine_record import continued, read_quarantine
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import TokenManifest, read_token_manifest
from ingot.theory.rules import recorded_run
from ingot.trainer.checkpoint.accepted import DATA
from ingot.trainer.checkpoint.manifest import ListedCheckpoint, list_checkpoints
from ingot.trainer.loader.ledger import is_untrained, read_ledger
from ingot.trainer.loader.order import Order, earlier_weights, quarantine_from
from ingot.trainer.loader.reader import Windows

_CHUNK_SAMPLES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """The use of some documents in a run, up to its newest checkpoint.

    documents: the number of these documents that were used. samples: the number of samples that contain one.
    first_step, last_step: the first and last step with such a sample, 0 if there is none. trained_steps: the step of
    the newest checkpoint. checkpoints: the steps of checkpoints that may contain what was learned from the documents.
    unknown_steps: up to this step the tokens are no longer known, so all checkpoints count as affected. training_now:
    a process trains the run now and reads the shards.
    """

    run: str
    name: str
    documents: int
    samples: int
    first_step: int
    last_step: int
    trained_steps: int
    checkpoints: tuple[int, ...]
    unknown_steps: int
    training_now: bool


@dataclass(frozen=True)
class Use:
    """A sample of an optimizer step that contains tokens of a document. to_come: the step is in the future."""

    step: int
    sample: int
    document: str
    to_come: bool = False


def runs_on(data: Path, named: Sequence[Path] = ()) -> list[Path]:
    """Return the runs that train on tokens of the folder `data`, among the `named` runs and runs near `data`.

    The search covers folders up to two levels below the parent of `data`. Raises UsageError if a named folder is not a
    run folder.
    """
    for run in named:
        if not RunFolder(run).config.is_file():
            raise no_run_folder(run)
    beside = sorted(path.parent for level in ("*", "*/*") for path in data.absolute().parent.glob(f"{level}/run.toml"))
    found = {}
    for run in (*named, *beside):
        tokens = _tokens_of(run)
        if tokens and data.resolve() in tokens.parents:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _tokens_of(run: Path) -> Path | None:
    try:
        return (run / recorded_run(RunFolder(run).config).data.tokens).resolve()
    except (ConfigError, OSError):  # a run file of another version, or a run file that is being written
        return None


def data_of(run: Path) -> Path:
    """Return the `data build` output folder on which a run trains. Raises UsageError if `run` is not a run folder."""
    if tokens := _tokens_of(run):
        return tokens.parent.parent
    raise no_run_folder(run)


def exposure(run: Path, documents: Collection[str]) -> Exposure:
    """Return the use of `documents` (ids) in the run folder `run`."""
    reader = RunTokens(run)
    seen = list(reader.consumed(documents))
    first = min((use.step for use in seen), default=0)
    saved = sorted(listed.step for listed in reader.checkpoints)
    affected = (step for step in saved if (first and step >= first) or (reader.unknown_steps and documents))
    return Exposure(
        run=str(run),
        name=reader.config.name,
        documents=len({use.document for use in seen}),
        samples=len({(use.step, use.sample) for use in seen}),
        first_step=first,
        last_step=max((use.step for use in seen), default=0),
        trained_steps=reader.trained_steps,
        checkpoints=tuple(affected),
        unknown_steps=reader.unknown_steps,
        training_now=_is_held(reader.folder.lock),
    )


def uses(run: Path, documents: Collection[str], limit: int = 1000) -> list[Use]:
    """Return the first `limit` samples with tokens of `documents` (ids), in order of steps, future steps included."""
    reader = RunTokens(run)
    return list(islice(chain(reader.consumed(documents), reader.to_come(documents)), limit))


@dataclass(frozen=True)
class StepRange:
    """Steps first..last of a run, trained on one token stream. layout: the layout of this token stream, None if it is
    no longer known."""

    first: int
    last: int
    layout: TokenLayout | None


class RunTokens:
    """A run with the token streams on which its steps were trained.

    manifest: that of the checkpoint up to which the steps are known; by default the newest that can be read.
    """

    def __init__(self, run: Path, manifest: CheckpointManifest | None = None):
        self.folder = RunFolder(run)
        self.config = recorded_run(self.folder.config)
        self.tokens = (run / self.config.data.tokens).resolve()
        self.manifest: TokenManifest = read_token_manifest(self.tokens)
        self.checkpoints: list[ListedCheckpoint] = list_checkpoints(self.folder.checkpoints)
        newest = manifest or next((c.manifest for c in self.checkpoints if c.manifest), None)
        self.ledger = newest.ledger if newest else ()
        self.trained_steps = newest.step if newest else 0
        recorded = read_quarantine(self.folder.quarantine)
        self.quarantine = continued(recorded, newest.quarantine, newest.step) if newest else recorded
        accepted = newest and newest.accepted
        self.records = records_for(accepted, self.trained_steps, self.folder.accepted)
        self.ranges = self._ranges(newest.data_fingerprint) if newest else []

    def _ranges(self, fingerprint: str) -> list[StepRange]:
        """Return the ranges of steps, in order, split where a change of the token stream was accepted.
        fingerprint: the fingerprint of the newest checkpoint's token stream."""
        found, last = [], self.trained_steps
        for step, before, after in reversed(_accepted_tokens(self.records)):
            if fingerprint.startswith(after) and step < last:
                found.append(StepRange(step + 1, last, find_layout(self.tokens, fingerprint)))
                fingerprint, last = before, step
        found.append(StepRange(1, last, find_layout(self.tokens, fingerprint)))
        return found[::-1]

    @property
    def unknown_steps(self) -> int:
        """The last step that was trained on a token stream that is no longer known, 0 if there is none."""
        return max((steps.last for steps in self.ranges if steps.layout is None), default=0)

    def layout_at(self, step: int) -> TokenLayout | None:
        """Return the token layout on which `step` was or will be trained, None if it is no longer known."""
        for steps in self.ranges:
            if steps.first <= step <= steps.last:
                return steps.layout
        return TokenLayout(self.manifest, (self.tokens,), True)

    def order(self, layout: TokenLayout) -> Order:
        """Return the sample order of the run on the token stream of `layout`, with all mixtures that the run had."""
        train, weights = self.config.train, self.config.data.weights
        earlier = [(last * train.global_batch, own) for last, own in earlier_weights(self.records, weights)]
        left_out = quarantine_from(self.quarantine, train.global_batch)
        return Order(layout.manifest, train.seq_len, self.config.seed, weights, earlier=earlier, quarantine=left_out)

    def consumed(self, documents: Collection[str]) -> Iterator[Use]:
        """Yield the uses of `documents` (ids) that the ledger of the newest checkpoint records, without those in steps
        that changed no weights."""
        for steps in self.ranges:
            wanted = self._windows(steps.layout, documents) if steps.layout else {}
            if not wanted:
                continue
            windows = np.array(sorted(wanted), np.int64)
            touching = [s for s in self.ledger if s.first_step <= steps.last and s.last_step >= steps.first]
            for step, ids in read_ledger(self.folder.ledger, touching):
                if steps.first <= step <= steps.last and not is_untrained(ids):
                    for sample in _where(ids, windows):
                        yield from (Use(step, sample, one) for one in wanted[int(ids[sample])])

    def to_come(self, documents: Collection[str]) -> Iterator[Use]:
        """Yield the uses of `documents` (ids) after the newest checkpoint, up to the last step of the run file."""
        layout = TokenLayout(self.manifest, (self.tokens,), True)
        if not (wanted := self._windows(layout, documents)):
            return
        windows = np.array(sorted(wanted), np.int64)
        order, batch = self.order(layout), self.config.train.global_batch
        end = self.config.train.steps * batch
        for first in range(self.trained_steps * batch, end, _CHUNK_SAMPLES):
            ids = order.samples(first, min(_CHUNK_SAMPLES, end - first))
            for hit in _where(ids, windows):
                step, sample = divmod(first + hit, batch)
                yield from (Use(step + 1, sample, one, True) for one in wanted[int(ids[hit])])

    def _windows(self, layout: TokenLayout, documents: Collection[str]) -> dict[int, list[str]]:
        """Return, for each window id, those of `documents` with tokens in the window. A window has seq_len inputs and
        the last target."""
        windows = Windows(layout.manifest, self.config.train.seq_len)
        seq_len, found = windows.seq_len, defaultdict(list)
        ids = np.array([bytes.fromhex(one) for one in documents], "S16")
        for number, shard in enumerate(layout.manifest.shards):
            index, count = layout.index(shard), int(windows.counts[number])
            for row in index[np.isin(index["id"].view("S16"), ids)]:
                start, end = int(row["start"]), int(row["start"] + row["tokens"])
                first, last = max(-(-start // seq_len) - 1, 0), min((end - 1) // seq_len, count - 1)
                for window in range(first, last + 1):
                    found[int(windows.ends[number]) - count + window].append(bytes(row["id"]).hex())
        return found


def _where(ids: np.ndarray, windows: np.ndarray) -> list[int]:
    """Return the positions in `ids` of values that are in `windows` (sorted, not empty); 10 times faster than
    np.isin."""
    at = np.searchsorted(windows, ids)
    at[at == len(windows)] = 0
    return np.flatnonzero(windows[at] == ids).tolist()


def _accepted_tokens(records: Sequence[AcceptedChanges]) -> list[tuple[int, str, str]]:
    """Return the accepted changes of the token stream, in order: (last step before the change, prefix of the
    fingerprint before the change, prefix of the fingerprint after the change)."""
    return [(one.step, *one.changes[DATA]) for one in records if DATA in one.changes]


def _is_held(lock: Path) -> bool:
    """Check whether a process now holds the lock of a run, without waiting for it."""
    if not lock.exists():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
    return False
