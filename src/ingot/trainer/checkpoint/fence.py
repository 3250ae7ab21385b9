"""The fence of a run: which attempt may publish checkpoints in a place, and which checkpoints came too late. No torch.

    lease/epoch-00000003.json    who began the third attempt, and the checkpoints that it found there
    lease/alive-00000003         changes while that attempt lives

The first file is written only if no object has its name, so that of two attempts exactly one gets a number. Before it
publishes, an attempt looks whether its number is still the newest. That look and the commit are two operations, between
which a process can be suspended for hours; so every manifest has the number of its attempt, and readers ignore a
checkpoint that an earlier attempt published after the newest one had begun. This needs no locks, and no clocks that
agree: it works in a folder that hosts share, and in an object store.
"""

import contextlib
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ingot.config import from_dict
from ingot.errors import ConfigError, RunBusyError
from ingot.schema.checkpoint import FULL, CheckpointManifest, SaveKind
from ingot.schema.sealed import HASH, sealed, unsealed
from ingot.stores.local import LocalStore
from ingot.stores.store import BlobStore, NotStored, ObjectTooLarge, read_object
from ingot.trainer.checkpoint.headers import most_text, takes_too_much

LEASE = "lease"
_RECORD = re.compile(rf"{LEASE}/epoch-(\d{{8,}})\.json")
_MOST_DIGITS = 18  # of a step
TOO_LATE = "an attempt published it after another one had taken over the run"


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """The record of one attempt to train a run in one place.

    epoch: 1, 2, ... run: the id of the run; holder: of this attempt. host, pid: of its launcher, with `process`
    (machine/processes.py), by which a process on the same machine finds out whether it lives. folder: its run folder;
    "" if an earlier version of ingot wrote the record. started: Unix seconds, for people. seconds: without a sign of
    life for this time, the attempt counts as gone. adopted: the step of each checkpoint that the attempt found -> hash
    of its manifest, "" if unknown; None if the record is damaged. weights: the same of saves of the weights alone.
    """

    epoch: int
    run: str = ""
    holder: str = ""
    host: str = ""
    pid: int = 0
    process: str = ""
    folder: str = ""
    started: float = 0.0
    seconds: float = 0.0
    adopted: dict[str, str] | None = None
    weights: dict[str, str] | None = None

    @property
    def owner(self) -> str:
        return f"{self.host}:{self.pid}" if self.host else "an unknown process"

    @property
    def is_damaged(self) -> bool:
        """True if nothing but the number is known, from the name of the record."""
        return self == Epoch(epoch=self.epoch)

    def ignores(self, step: int, epoch: int, sha256: str, kind: SaveKind = FULL) -> bool:
        """Return whether a checkpoint was published too late: by an earlier attempt, after this one had begun.

        epoch: 0 for a checkpoint that no attempt saved, like one of an earlier version of ingot. sha256: the hash of
        its manifest. A checkpoint older than the newest one that this attempt found may be missing in its record: it
        was removed, and somebody restored a copy.
        """
        adopted = self.adopted if kind == FULL else self.weights
        if not 0 < epoch < self.epoch or adopted is None:
            return False
        known = adopted.get(str(step))
        if known is None:
            return step > max(map(int, adopted), default=0)
        return known not in ("", sha256)


def record_name(epoch: int) -> str:
    return f"{LEASE}/epoch-{epoch:08d}.json"


def alive_name(epoch: int) -> str:
    return f"{LEASE}/alive-{epoch:08d}"


def to_bytes(record: Epoch) -> bytes:
    """Return the content of the record's object."""
    return json.dumps(sealed(asdict(record)), indent=1).encode() + b"\n"


def newest_epoch(place: BlobStore) -> Epoch | None:
    """Return the record of the newest attempt in `place`; None if there was none.

    A record that is damaged still counts: its name has the number.
    """
    numbers = [int(match[1]) for one in place.list(LEASE) if (match := _RECORD.fullmatch(one.name))]
    for number in sorted(numbers, reverse=True):  # a listing may be old, and have what is gone
        with contextlib.suppress(NotStored):
            return _read_epoch(place, number)
    return None


def read_epoch(place: BlobStore, number: int) -> Epoch:
    """Return the record of the attempt `number` in `place`; one with nothing but its number if it is damaged, or not
    there."""
    with contextlib.suppress(NotStored):
        return _read_epoch(place, number)
    return Epoch(epoch=number)


def _read_epoch(place: BlobStore, number: int) -> Epoch:
    with contextlib.suppress(ObjectTooLarge, ConfigError, ValueError, TypeError, AttributeError, RecursionError):
        text = read_object(place, record_name(number), most_text(0))
        if takes_too_much(text, 0):  # the limit of the smallest checkpoint's manifest
            return Epoch(epoch=number)
        values = json.loads(text)
        if HASH in values:  # records of earlier versions of ingot have none
            values = unsealed(values, values.keys() - {HASH})
        record = from_dict(Epoch, values)
        steps = [*(record.adopted or ()), *(record.weights or ())]
        if record.epoch == number and all(step.isdecimal() and len(step) <= _MOST_DIGITS for step in steps):
            return record
    return Epoch(epoch=number)


def newest_local_epoch(run: Path) -> Epoch | None:
    """Return the record of the newest attempt in the run folder `run`; None if there was none."""
    return newest_epoch(LocalStore(run))


def require_newest(place: BlobStore, epoch: int) -> None:
    """Raise RunBusyError if an attempt after `epoch` has begun in `place`. 0: an attempt without a number, as in
    programs that save checkpoints outside of a run, of which none is refused."""
    newest = newest_epoch(place) if epoch else None
    if newest is not None and newest.epoch > epoch:
        raise lease_lost(place.url, newest, epoch)


def adopt(run: Path, fetched: CheckpointManifest, sha256: str, attempt: int) -> None:
    """Let readers of the run folder `run` count a save that comes from the store, before it is put there.

    An earlier attempt may have saved it: without this it would count as late where the newest attempt did not find it
    when it began, as on an empty disk, or while the store did not answer. sha256: the hash of its manifest. attempt:
    the number of the attempt that fetches it; 0: none has begun yet. Raises RunBusyError if one after it has begun.
    """
    place = LocalStore(run)
    require_newest(place, attempt)
    record = newest_epoch(place)
    if record is None or not record.ignores(fetched.step, fetched.epoch, sha256, fetched.kind):
        return
    own = {str(fetched.step): sha256}
    if fetched.kind == FULL:
        record = replace(record, adopted=(record.adopted or {}) | own)
    else:
        record = replace(record, weights=(record.weights or {}) | own)
    place.write(record_name(record.epoch), [to_bytes(record)])


def lease_lost(url: str, newest: Epoch, epoch: int) -> RunBusyError:
    """Return the error of the attempt `epoch`, in whose place `newest` has begun in `url`."""
    why = "this one had given no sign of life" if newest.epoch >= epoch else "the record of this one had been removed"
    return RunBusyError(
        "E-LEASE-LOST",
        f"{newest.owner} has taken over the run in {url} (attempt {newest.epoch}), because {why}",
        rule="only the newest attempt publishes checkpoints; what this one trained since its last one is lost",
        fix="none is needed: the other attempt goes on. If this machine was suspended or cut off, look at the cause",
        store=url,
        epoch=newest.epoch,
        owner=newest.owner,
    )
