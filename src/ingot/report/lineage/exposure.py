"""Which runs saw a document: the samples that held its tokens, by the ledger, and the checkpoints made after the first.

What was consumed is read from the ledger, not computed: it is the truth, it names the samples whatever changed in
between, and it is read several times faster than the order gives them. The order is asked for what is still to come.
"""

import fcntl
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from ingot.data.lineage.purge.history import TokenLayout, find_layout
from ingot.errors import ConfigError, DataError, UsageError
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import TokenManifest, read_token_manifest
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.manifest import ListedCheckpoint, list_checkpoints
from ingot.trainer.loader.ledger import read_ledger
from ingot.trainer.loader.order import Order, earlier_weights
from ingot.trainer.loader.reader import Windows

_DATA = "data.tokens"  # the key under which a change of the token stream is accepted (launch/continuity.py)
_CHUNK_SAMPLES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """What a run saw of some documents, up to its newest checkpoint.

    documents, samples: how many of them it saw, in how many samples; first_step, last_step: of these, 0 if none.
    trained_steps: of the newest checkpoint. checkpoints: steps of those that may hold what was learned from them.
    unknown_steps: up to this step it trained on tokens that are not known any more: of these it cannot be told, and
    their checkpoints count. training_now: a process holds the run and reads the shards.
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
    """Sample `sample` of optimizer step `step` holds tokens of `document`. to_come: the step is not trained yet."""

    step: int
    sample: int
    document: str
    to_come: bool = False


def runs_on(data: Path, named: Sequence[Path] = ()) -> list[Path]:
    """The runs that train on tokens of the folder `data`: the `named` ones, and those that lie beside it.

    Looked at are folders up to two levels below the one that holds `data`. Raises UsageError for a named folder that
    is no run.
    """
    for run in named:
        if not RunFolder(run).config.is_file():
            raise UsageError(f"{run} is no run", rule="a run folder has a run.toml", fix="--runs takes run folders")
    beside = sorted(path.parent for level in ("*", "*/*") for path in data.absolute().parent.glob(f"{level}/run.toml"))
    found = {}
    for run in (*named, *beside):
        tokens = _tokens_of(run)
        if tokens and data.resolve() in tokens.parents:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _tokens_of(run: Path) -> Path | None:
    try:
        return (run / load_run(RunFolder(run).config).data.tokens).resolve()
    except (ConfigError, OSError):  # a run file of another version, or one that is being written
        return None


def data_of(run: Path) -> Path:
    """The folder of `data build --out` that a run trains on. Raises UsageError when `run` is no run."""
    if tokens := _tokens_of(run):
        return tokens.parent.parent
    raise UsageError(f"{run} is no run", rule="a run folder has a run.toml", fix="give --data DIR")


def exposure(run: Path, documents: Collection[str]) -> Exposure:
    """What the run in folder `run` saw of these documents (ids)."""
    reader = RunTokens(run)
    seen = list(reader.consumed(documents))
    first = min((use.step for use in seen), default=0)
    saved = sorted(listed.step for listed in reader.checkpoints)
    tainted = (step for step in saved if (first and step >= first) or (reader.unknown_steps and documents))
    return Exposure(
        run=str(run),
        name=reader.config.name,
        documents=len({use.document for use in seen}),
        samples=len({(use.step, use.sample) for use in seen}),
        first_step=first,
        last_step=max((use.step for use in seen), default=0),
        trained_steps=reader.trained_steps,
        checkpoints=tuple(tainted),
        unknown_steps=reader.unknown_steps,
        training_now=_is_held(reader.folder.lock),
    )


def uses(run: Path, documents: Collection[str], limit: int = 1000) -> list[Use]:
    """The first `limit` samples of the run that hold tokens of these documents, those to come included, in order."""
    reader = RunTokens(run)
    return list(islice(chain(reader.consumed(documents), reader.to_come(documents)), limit))


@dataclass(frozen=True)
class Stretch:
    """Steps first..last of a run, trained on one token stream; layout is None when that is not known any more."""

    first: int
    last: int
    layout: TokenLayout | None


class RunTokens:
    """A run, and the token streams that its steps were trained on."""

    def __init__(self, run: Path):
        self.folder = RunFolder(run)
        self.config = load_run(self.folder.config)
        self.tokens = (run / self.config.data.tokens).resolve()
        self.manifest: TokenManifest = read_token_manifest(self.tokens)
        self.checkpoints: list[ListedCheckpoint] = list_checkpoints(self.folder.checkpoints)
        newest = next((c.manifest for c in self.checkpoints if c.manifest), None)
        self.ledger = newest.ledger if newest else ()
        self.trained_steps = newest.step if newest else 0
        self.stretches = self._stretches(newest.data_fingerprint) if newest else []

    def _stretches(self, fingerprint: str) -> list[Stretch]:
        """From the newest back to the first, over the changes of tokens that led to it (as loader/history.py does)."""
        found, last = [], self.trained_steps
        for step, before, after in reversed(_accepted_tokens(self.folder)):
            if fingerprint.startswith(after) and step < last:
                found.append(Stretch(step + 1, last, find_layout(self.tokens, fingerprint)))
                fingerprint, last = before, step
        found.append(Stretch(1, last, find_layout(self.tokens, fingerprint)))
        return found[::-1]

    @property
    def unknown_steps(self) -> int:
        """The last step that was trained on tokens of which nothing is known any more, 0 if there is none."""
        return max((stretch.last for stretch in self.stretches if stretch.layout is None), default=0)

    def layout_at(self, step: int) -> TokenLayout | None:
        """What step `step` was, or will be, trained on; None if it is not known any more."""
        for stretch in self.stretches:
            if stretch.first <= step <= stretch.last:
                return stretch.layout
        return TokenLayout(self.manifest, (self.tokens,), True)

    def order(self, layout: TokenLayout) -> Order:
        """The order of the run's samples over a layout, with every mixture it had."""
        train, weights = self.config.train, self.config.data.weights
        earlier = [(last * train.global_batch, own) for last, own in earlier_weights(self.folder, weights)]
        return Order(layout.manifest, train.seq_len, self.config.seed, weights, earlier=earlier)

    def consumed(self, documents: Collection[str]) -> Iterator[Use]:
        """What the newest checkpoint's ledger says was trained on."""
        for stretch in self.stretches:
            wanted = self._windows(stretch.layout, documents) if stretch.layout else {}
            if not wanted:
                continue
            windows = np.array(sorted(wanted), np.int64)
            touching = [s for s in self.ledger if s.first_step <= stretch.last and s.last_step >= stretch.first]
            for step, ids in read_ledger(self.folder.ledger, touching):
                if stretch.first <= step <= stretch.last:
                    for sample in _where(ids, windows):
                        yield from (Use(step, sample, one) for one in wanted[int(ids[sample])])

    def to_come(self, documents: Collection[str]) -> Iterator[Use]:
        """What the order will give after the newest checkpoint, up to the last step of the run file."""
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
        """Window id -> the documents that have tokens in it. A window is seq_len inputs and one more target."""
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
    """The places in `ids` of any of `windows` (sorted, at least one). np.isin sorts every time: 10 times slower."""
    at = np.searchsorted(windows, ids)
    at[at == len(windows)] = 0
    return np.flatnonzero(windows[at] == ids).tolist()


def _accepted_tokens(folder: RunFolder) -> list[tuple[int, str, str]]:
    """(step after which, beginning of the fingerprint before, and after) of accepted changes of tokens, in order."""
    try:
        accepted = json.loads(folder.accepted.read_bytes())
        return [(int(one["step"]), *one["changes"][_DATA]) for one in accepted if _DATA in one["changes"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder.accepted} cannot be read ({error})",
            rule="it says which tokens the steps of this run were trained on",
            fix="restore it from a copy of the run folder",
        ) from None


def _is_held(lock: Path) -> bool:
    """Whether a process holds this lock now; it is not taken."""
    if not lock.exists():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
    return False
