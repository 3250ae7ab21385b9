"""Which runs saw a document: the samples that held its tokens, by the ledger, and the checkpoints made after the first.

What was consumed is read from the ledger, not computed: it is the truth, it names the samples whatever changed in
between, and it is read 20 times faster than the order gives them. The order is asked for what is still to come.
"""

import fcntl
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.checkpoint.manifest import Listed, list_checkpoints
from ingot.config import load
from ingot.data.find import Place
from ingot.errors import ConfigError, UsageError
from ingot.loader.history import earlier_weights
from ingot.loader.ledger import read_ledger
from ingot.loader.order import Order
from ingot.loader.windows import Windows
from ingot.schema.layout import RunFolder
from ingot.schema.run import RunConfig
from ingot.schema.tokens import TokenManifest, read_token_manifest

_DATA = "data.tokens"  # the key under which a change of the token stream is accepted (launch/continuity.py)
_CHUNK_SAMPLES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """What a run saw of some documents, up to its newest checkpoint.

    documents, samples: how many of them it saw, in how many samples; first_step, last_step: of these, 0 if none.
    trained_steps: of the newest checkpoint. checkpoints: steps of those that may hold what was learned from them.
    unknown_steps: the first so many steps were trained on other tokens (before an earlier purge, say): of these it
    cannot be told, and their checkpoints count. training_now: a process holds the run and reads the shards.
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
        return (run / load(RunConfig, RunFolder(run).config).data.tokens).resolve()
    except (ConfigError, OSError):  # a run file of another version, or one that is being written
        return None


def data_of(run: Path) -> Path:
    """The folder of `data build --out` that a run trains on. Raises UsageError when `run` is no run."""
    if tokens := _tokens_of(run):
        return tokens.parent.parent
    raise UsageError(f"{run} is no run", rule="a run folder has a run.toml", fix="give --data DIR")


def exposure(run: Path, places: Sequence[Place]) -> Exposure:
    """What the run in folder `run` saw of the documents at `places`, of which those in its token folder count."""
    reader = _Run(run)
    seen = list(reader.consumed(places))
    steps = [use.step for use in seen]
    first = min(steps, default=0)
    saved = sorted(listed.step for listed in reader.checkpoints)
    tainted = (step for step in saved if (first and step >= first) or (reader.unknown_steps and places))
    return Exposure(
        run=str(run),
        name=reader.config.name,
        documents=len({use.document for use in seen}),
        samples=len({(use.step, use.sample) for use in seen}),
        first_step=first,
        last_step=max(steps, default=0),
        trained_steps=reader.trained_steps,
        checkpoints=tuple(tainted),
        unknown_steps=reader.unknown_steps,
        training_now=_is_held(reader.folder.lock),
    )


def uses(run: Path, places: Sequence[Place], limit: int = 1000) -> list[Use]:
    """The first `limit` samples of the run that hold tokens of the documents, those to come included, in order."""
    reader, found = _Run(run), []
    for source in (reader.consumed(places), reader.to_come(places)):
        for use in source:
            if len(found) == limit:
                return found
            found.append(use)
    return found


class _Run:
    """A run and the token folder that it trains on now."""

    def __init__(self, run: Path):
        self.folder = RunFolder(run)
        self.config = load(RunConfig, self.folder.config)
        self.tokens = (run / self.config.data.tokens).resolve()
        self.manifest: TokenManifest = read_token_manifest(self.tokens)
        self.checkpoints: list[Listed] = list_checkpoints(self.folder.checkpoints)
        newest = next((c.manifest for c in self.checkpoints if c.manifest), None)
        self.ledger = newest.ledger if newest else ()
        self.trained_steps = newest.step if newest else 0
        self.unknown_steps = data_changed_at(self.folder)
        if newest and newest.data_fingerprint != self.manifest.fingerprint():
            self.unknown_steps = self.trained_steps

    def consumed(self, places: Sequence[Place]) -> Iterator[Use]:
        """What checkpoints say was trained on, of the steps whose tokens are those that are there now."""
        wanted = self._windows(places)
        if self.unknown_steps >= self.trained_steps or not wanted:
            return
        windows = np.array(sorted(wanted), np.int64)
        segments = [segment for segment in self.ledger if segment.last_step > self.unknown_steps]
        for step, ids in read_ledger(self.folder.ledger, segments):
            if step > self.unknown_steps:
                for sample in np.flatnonzero(np.isin(ids, windows)).tolist():
                    yield from (Use(step, sample, one) for one in wanted[int(ids[sample])])

    def to_come(self, places: Sequence[Place]) -> Iterator[Use]:
        """What the order will give after the newest checkpoint, up to the last step of the run file."""
        wanted = self._windows(places)
        if not wanted:
            return
        windows = np.array(sorted(wanted), np.int64)
        train = self.config.train
        order = order_of(self.folder, self.config, self.manifest)
        batch, end = train.global_batch, train.steps * train.global_batch
        for first in range(self.trained_steps * batch, end, _CHUNK_SAMPLES):
            ids = order.samples(first, min(_CHUNK_SAMPLES, end - first))
            for hit in np.flatnonzero(np.isin(ids, windows)).tolist():
                step, sample = divmod(first + hit, batch)
                yield from (Use(step + 1, sample, one, True) for one in wanted[int(ids[hit])])

    def _windows(self, places: Sequence[Place]) -> dict[int, list[str]]:
        """Window id -> the documents that have tokens in it. A window is seq_len inputs and one more target."""
        windows = Windows(self.manifest, self.config.train.seq_len)
        numbers = {shard.name: number for number, shard in enumerate(self.manifest.shards)}
        found: dict[int, list[str]] = defaultdict(list)
        for place in places:
            if place.split != self.manifest.split or place.shard not in numbers:
                continue
            number, seq_len = numbers[place.shard], windows.seq_len
            count = int(windows.counts[number])
            first = max(-(-place.start // seq_len) - 1, 0)
            last = min((place.start + place.tokens - 1) // seq_len, count - 1)
            for window in range(first, last + 1):
                found[int(windows.ends[number]) - count + window].append(place.id)
        return found


def order_of(folder: RunFolder, config: RunConfig, manifest: TokenManifest) -> Order:
    """The order of the run's samples over its tokens, with every mixture it had."""
    batch, weights = config.train.global_batch, config.data.weights
    earlier = [(last * batch, own) for last, own in earlier_weights(folder, weights)]
    return Order(manifest, config.train.seq_len, config.seed, weights, earlier=earlier)


def data_changed_at(folder: RunFolder) -> int:
    """The step after which the run went on with other tokens (--accept-change data.tokens) for the last time, or 0."""
    try:
        accepted = json.loads(folder.accepted.read_bytes())
    except FileNotFoundError:
        return 0
    return max((one["step"] for one in accepted if _DATA in one["changes"]), default=0)


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
