"""The lease of a run: the right of one launcher to write checkpoints, in the run folder and in the run's store.

The lock of the run folder (resilience/lock.py) sees a second launcher on the same machine. The lease also sees one on
another machine, on a shared file system without locks and in an object store, and it passes on if its holder gives no
sign of life. A holder that returns finds a newer record (checkpoint/fence.py), and publishes nothing more. A holder
whose record was removed writes it again, unless another launcher was quicker. No torch.
"""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ingot.errors import ConfigError, IngotError, RunBusyError
from ingot.events import EventLog
from ingot.machine.processes import identity, is_gone, is_running
from ingot.schema import events
from ingot.schema.checkpoint import FULL, KINDS, WEIGHTS, SaveKind
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.storage import remove_unfinished
from ingot.stores.local import LocalStore
from ingot.stores.store import AlreadyStored, BlobStore, NotStored, StoreRefused, StoreUnreachable, read_object
from ingot.trainer.checkpoint.fence import (
    LEASE,
    Epoch,
    alive_name,
    lease_lost,
    newest_epoch,
    newest_local_epoch,
    read_epoch,
    record_name,
    to_bytes,
)
from ingot.trainer.checkpoint.manifest import adopted_hashes
from ingot.trainer.checkpoint.remote import RemoteTier, open_tier
from ingot.trainer.checkpoint.stored import StoredCheckpoints
from ingot.units import format_seconds

_BEATS = 6  # signs of life per lease
_POLLS = 24  # looks of a launcher that waits, per lease
_RELEASED = b"released"
_MOST_BYTES = 1000


def open_lease(folder: RunFolder, config: RunConfig) -> "RunLease":
    """Return the lease of a run, not yet taken. Raises ConfigError, MissingPartError."""
    return RunLease(folder, open_tier(folder, config.checkpoint), config.launch.lease_seconds)


class RunLease:
    """The lease of `folder`, and of its store if it has one, from `take` to the end of a with block.

    seconds: without a sign of life for this time, the holder counts as gone. epoch: the number of this attempt, 0
    before `take`.
    """

    def __init__(self, folder: RunFolder, tier: RemoteTier | None, seconds: float):
        self._folder, self._seconds = folder, seconds
        self._store = tier.store if tier else None
        self._here = LocalStore(folder.root)
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._begun: set[str] = set()  # the urls of the places that got the record of this attempt
        self._written: dict[str, Epoch] = {}  # their urls -> that record
        self._before: dict[str, str] = {}  # their urls -> the holder of the attempt before
        self._judged: dict[str, int] = {}  # url -> the attempt whose holder `wait` found gone, 0 for none
        self._refusals: dict[str, str] = {}  # url -> why the place refused the record, which was reported
        self._say: Callable[[str], None] = lambda line: None
        self._lost: IngotError | None = None
        self.epoch = 0

    def wait(self, say: Callable[[str], None]) -> None:
        """Wait until no other launcher holds the lease: it released it, has ended, or gives no sign of life.

        say: called with the line that says why it waits; later, from another thread, if the record of this attempt
        vanishes from a place.

        Of a holder on this machine it finds out at once whether it lives. Raises RunBusyError if it does or gives a
        sign of life, and the errors of the store, except that a store that does not answer is left for later.
        """
        self._say = say
        for place in self._places():
            with self._later(place):
                holder = newest_epoch(place)
                self._judged[place.url] = holder.epoch if holder else 0
                if holder and holder.is_damaged:
                    done = "no checkpoint counts as late, and who wrote it is unknown"
                    self._report_damage(place, holder.epoch, done)
                if holder and place is self._store:
                    self._say_shared(place, holder)
                if holder is None or (sign := _sign(place, holder)) == _RELEASED or is_gone(holder.process):
                    continue
                if self._is_copied(place, holder):
                    continue
                if _runs_here(holder):
                    raise _busy(place, holder)
                patience = holder.seconds or self._seconds
                say(
                    f"lease     {holder.owner} trained this run last, and did not end it; waiting "
                    f"{format_seconds(patience)} for a sign of life"
                )
                self._require_silence(place, holder, sign, patience)

    def _is_copied(self, place: BlobStore, holder: Epoch) -> bool:
        """Return whether the record of a living launcher came here with a copy of its run folder. The lock of this
        folder proves that no launcher of this machine trains it."""
        own = str(self._folder.root.resolve())
        return place is self._here and holder.folder not in ("", own) and _runs_here(holder)

    def _say_shared(self, store: BlobStore, holder: Epoch) -> None:
        """Report that another folder with the history of this run used the store last: a copy of it, or its original.
        A folder without a history is new."""
        here = newest_epoch(self._here)
        if here is None or not here.run == holder.run != "" or not self._is_other_folder(here, holder):
            return
        self._say(
            f"store     {store.url} was used last by {holder.owner} with the run folder {holder.folder}, of the "
            "same run; two copies of a run folder replace each other's checkpoints there: give one of them a store "
            "of its own (--set checkpoint.remote.url=NEW_PLACE)"
        )

    def _is_other_folder(self, here: Epoch, holder: Epoch) -> bool:
        """Return whether the `holder` of the store trained another folder of this run, whose own record is `here`.

        On this machine a folder that was moved is none: its old place is empty. On another machine the same path may be
        the same folder, which both machines share, or a copy: a copy has other records, except at its first start.
        """
        is_elsewhere = holder.folder not in ("", str(self._folder.root.resolve()))
        if holder.host == socket.gethostname():
            return is_elsewhere and _has_run(Path(holder.folder), holder.run)
        return is_elsewhere or here.holder != holder.holder

    def _require_silence(self, place: BlobStore, holder: Epoch, before: bytes, patience: float) -> None:
        ends = time.monotonic() + patience
        while time.monotonic() < ends:
            time.sleep(patience / _POLLS)
            sign = _sign(place, holder)
            if sign == _RELEASED:
                return
            if sign != before:
                raise _busy(place, holder)

    def require_same_run(self) -> None:
        """Raise ConfigError if the store, which holds a checkpoint, belongs to another run than the folder."""
        here, there = newest_epoch(self._here), newest_epoch(self._store) if self._store else None
        if self._store and here and there and here.run and there.run not in ("", here.run):
            raise _other_run(self._folder, there, self._store.url)

    def take(self) -> None:
        """Begin an attempt that adopts the checkpoints of the folder and of the store, and give signs of life.

        Raises RunBusyError if another launcher was quicker, ConfigError if the store belongs to another run.
        """
        newest = {}
        for place in self._places():
            with self._later(place):
                if holder := newest_epoch(place):
                    newest[place.url] = holder
                    if holder.epoch > self._judged.get(place.url, holder.epoch):  # it began since `wait`, and lives
                        raise _busy(place, holder)
        if (before := newest.get(self._here.url)) and is_gone(before.process):
            remove_unfinished(self._folder.root / LEASE)  # it may have been killed while it gave a sign of life
        self.epoch = 1 + max((holder.epoch for holder in newest.values()), default=0)
        place = next((place for place in self._places() if place.url in newest), None)  # the folder before the store
        self._record = Epoch(
            epoch=self.epoch,
            run=(newest[place.url].run if place else "") or uuid.uuid4().hex,
            holder=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            process=identity(),
            folder=str(self._folder.root.resolve()),
            started=time.time(),
            seconds=self._seconds,
        )
        for place in reversed(self._places()):  # the store first: it is what launchers on two machines share
            with self._later(place):
                self._begin(place)
        self._thread = threading.Thread(target=self._live, name="lease", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Raise RunBusyError if another launcher has begun an attempt since `take`; ConfigError if the store, which did
        not answer then, belongs to another run."""
        if self._lost is None and self.epoch:
            self._look(self._here)
        if self._lost is not None:
            raise self._lost

    @property
    def lost(self) -> IngotError | None:
        """The error of `require`, as of the last sign of life."""
        return self._lost

    def __enter__(self) -> "RunLease":
        return self

    def __exit__(self, *_: object) -> None:
        """End the signs of life, and say so, so that the next launcher does not wait."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        for place in self._places():
            if place.url in self._begun and self._lost is None and not (place is self._here and self._is_folder_lost()):
                with contextlib.suppress(IngotError):
                    place.write(alive_name(self.epoch), [_RELEASED])

    def _places(self) -> list[BlobStore]:
        return [self._here, *([self._store] if self._store else [])]

    def _later(self, place: BlobStore) -> contextlib.AbstractContextManager[None]:
        """Leave a store that does not answer for the next sign of life; a folder has to answer."""
        return contextlib.nullcontext() if place is self._here else contextlib.suppress(StoreUnreachable)

    def _begin(self, place: BlobStore) -> bool:
        """Write the record of this attempt to `place`. Returns False if it was there already.

        Raises RunBusyError if another attempt was quicker, ConfigError if the place belongs to another run.
        """
        before = newest_epoch(place)
        adopted = self._found(place, before)
        record, is_written = replace(self._record, adopted=adopted[FULL], weights=adopted[WEIGHTS]), True
        try:
            place.write(record_name(self.epoch), [to_bytes(record)], new=True)
        except AlreadyStored:
            newest = read_epoch(place, self.epoch)
            if newest.holder != record.holder:  # or it is this one's, and only the answer was lost
                raise _busy(place, newest) from None
            is_written = False
        if before is None or before.holder != record.holder:
            self._before[place.url] = before.holder if before else ""
        self._begun.add(place.url)
        self._written[place.url] = record
        place.write(alive_name(self.epoch), [b"0"])
        _remove_older(place, self.epoch - 1)
        return is_written

    def _found(self, place: BlobStore, before: Epoch | None) -> dict[SaveKind, dict[str, str]]:
        """Return the saves in `place` by kind, as a record lists them. Raises ConfigError if another run saved them."""
        kinds = [self._folder.of(kind) for kind in KINDS]
        if place is self._here:
            return {one.kind: adopted_hashes(one.checkpoints) for one in kinds}
        steps: dict[SaveKind, list[int]] = {one.kind: StoredCheckpoints(one, place).steps() for one in kinds}
        # A record without saves is nobody's.
        if any(steps.values()) and before and before.run not in ("", self._record.run):
            raise _other_run(self._folder, before, place.url)
        return {kind: dict.fromkeys(map(str, found), "") for kind, found in steps.items()}

    def _live(self) -> None:
        """Give signs of life, look for another attempt, and write the record of this one where it is missing."""
        beat = 0
        while not self._ends.wait(self._seconds / _BEATS):
            beat += 1
            for place in self._places():
                if place is self._here and self._is_folder_lost():
                    continue
                with contextlib.suppress(IngotError):  # it does not answer, or has no room: the next beat tries again
                    if not self._look(place) and self._lost is None:
                        self._begin_again(place)
                    if self._lost is not None:
                        return
                    place.write(alive_name(self.epoch), [str(beat).encode()])

    def _is_folder_lost(self) -> bool:
        """Return whether the run folder was removed, or is on a mount that is gone: the path shows nothing to write
        to."""
        try:
            return not self._folder.config.exists()
        except OSError:
            return True

    def _look(self, place: BlobStore) -> bool:
        """Find out whether another attempt has begun in `place`. Returns whether the newest record is that of this
        one."""
        newest = newest_epoch(place)
        if newest and newest.is_damaged and newest.epoch == self.epoch and place.url in self._written:
            # Nobody else writes a record with this number where this attempt has begun.
            place.write(record_name(self.epoch), [to_bytes(self._repaired(place))])
            self._report_damage(place, self.epoch, "this launcher, which lives, wrote it again")
            return True
        if newest is None or newest.holder == self._record.holder:
            return newest is not None
        # Where the record was removed, that of the attempt before may have stayed.
        is_new = place.url in self._begun and newest.holder != self._before.get(place.url, "")
        if newest.epoch >= self.epoch or is_new:
            self._lost = lease_lost(place.url, newest, self.epoch)
        return False

    def _repaired(self, place: BlobStore) -> Epoch:
        """Return the record that belongs in `place` instead of a damaged one: that of the start, with the saves that
        came from the store since then (fence.adopt)."""
        record = self._written[place.url]
        if place is not self._here or self._store is None:
            return record
        found, stored = self._found(place, None), self._written.get(self._store.url)
        if stored is not None:  # what the store did not have came too late
            in_store = {FULL: stored.adopted or {}, WEIGHTS: stored.weights or {}}
            found = {kind: {step: each[step] for step in each.keys() & in_store[kind]} for kind, each in found.items()}
        full, weights = (record.adopted or {}) | found[FULL], (record.weights or {}) | found[WEIGHTS]
        return replace(record, adopted=full, weights=weights)

    def _begin_again(self, place: BlobStore) -> None:
        """Write the record of this attempt to `place`, which did not answer at the start or lost it, and report that.

        Raises what the place raises.
        """
        was_there, url = place.url in self._begun, place.url
        try:
            is_written = self._begin(place)
        except (ConfigError, RunBusyError) as error:  # the place belongs to another run, or another attempt was quicker
            self._lost = error
        except StoreRefused as error:
            if self._refusals.get(url) != error.found:
                self._refusals[url] = error.found
                line = (
                    f"WARNING   {url} has no record of this attempt, and refuses it: {error.found}; until then, nothing"
                )
                facts = {"store": url, "epoch": self.epoch, "code": error.code, "reason": error.found}
                self._report(f"{line} is uploaded", events.LEASE_NOT_RECORDED, **facts)
            raise
        else:
            self._refusals.pop(url, None)
            if is_written:  # otherwise the listing was late
                found = "lost the record of this attempt" if was_there else "did not answer when the run was started"
                line = f"lease     {url} {found}; it has the record now"
                self._report(line, events.LEASE_RECORDED, store=url, epoch=self.epoch)

    def _report_damage(self, place: BlobStore, epoch: int, done: str) -> None:
        name, reason = record_name(epoch), "it is not the record that was written"
        line = f"WARNING   {name} in {place.url} is damaged: {done}"
        self._report(line, events.RECORD_DAMAGED, file=name, reason=reason, done=done)

    def _report(self, line: str, kind: str, **facts: object) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._say(line)
        with contextlib.suppress(OSError, IngotError), EventLog(self._folder.events) as log:
            log.write(kind, **facts)


def _sign(place: BlobStore, holder: Epoch) -> bytes:
    with contextlib.suppress(NotStored):
        return read_object(place, alive_name(holder.epoch), _MOST_BYTES)
    return b""


def _has_run(folder: Path, run: str) -> bool:
    """Return whether the folder has records of the run with the id `run`, or cannot be read."""
    with contextlib.suppress(IngotError, OSError):
        found = newest_local_epoch(folder)
        return found is not None and found.run == run
    return True


def _runs_here(holder: Epoch) -> bool:
    """Return whether another process of this machine holds the lease."""
    return holder.process != identity() and is_running(holder.process)


def _remove_older(place: BlobStore, than: int) -> None:
    """Remove the records of the attempts before `than`: the newest one and the one before stay."""
    with contextlib.suppress(IngotError):
        for one in place.list(LEASE):
            number = one.name.rpartition("-")[2].removesuffix(".json")
            if number.isdecimal() and int(number) < than:
                place.remove(one.name)


def _busy(place: BlobStore, holder: Epoch) -> RunBusyError:
    age = format_seconds(max(time.time() - holder.started, 0.0))
    folder = f" with the run folder {holder.folder}" if holder.folder else ""
    command = f" (kill -INT {holder.pid})" if _runs_here(holder) else ""
    return RunBusyError(
        "E-RUN-BUSY",
        f"{place.url} is in use by {holder.owner}{folder} (started {age} ago)",
        rule="only one launcher at a time trains a run, on whichever machine",
        fix=f"stop that one first{command}, or train into another folder (--out DIR) and another store",
        run=place.url,
        owner=holder.owner,
        folder=holder.folder,
    )


def _other_run(folder: RunFolder, there: Epoch, url: str) -> ConfigError:
    return ConfigError(
        "E-LEASE-OTHER-RUN",
        f"{url} holds the checkpoints of another run than {folder.root} (last trained by {there.owner})",
        rule="a place in a store holds the checkpoints of one run",
        fix="set checkpoint.remote.url to a place of its own",
        run=str(folder.root),
        store=url,
    )
