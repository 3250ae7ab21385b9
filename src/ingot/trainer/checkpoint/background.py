"""Save checkpoints while training goes on: training waits for a copy of the state in memory, and for nothing else.

A thread of the rank asks its writer process (writer.py) to write the copy, and agrees with the other ranks through a
process group of its own, because collectives of two threads in one group mix. At most one save is in flight.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ingot.errors import IngotError, ResourceError
from ingot.schema.checkpoint import FULL, LedgerSegment, SaveKind
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.agree import from_all_ranks, rank
from ingot.trainer.checkpoint.files import CheckpointFacts, CheckpointFiles, FileContents, PublishedSave
from ingot.trainer.checkpoint.nodes import discard_files, sweep_disks
from ingot.trainer.checkpoint.replicas import Copied, Copying, Replicas, summary
from ingot.trainer.checkpoint.save import file_contents
from ingot.trainer.checkpoint.snapshot import Snapshot
from ingot.trainer.checkpoint.state import TrainingState
from ingot.trainer.checkpoint.tensor_file import header_of
from ingot.trainer.checkpoint.writer import WriterProcess

# Errors of a disk or a process, after which the next save may be whole. After any other error the state itself, or the
# run, is broken.
_PASSING = ("E-CKPT-WRITE", "E-CKPT-READ-BACK", "E-CKPT-WRITER", "E-DISK-SPACE")


class SaveInFlight:
    """A save that a thread carries out. kind, step: what is saved, of which step. segment: the ledger segment that a
    full checkpoint adds.

    stall_seconds: how long training waited on this rank. snapshot_seconds: of these, for the copy of its state.
    work: writes the checkpoint. keep: begins to keep the snapshot in memory, and returns a function that waits for
    that. withdraw: is called if the state is not fit to continue from, also in memory.

    After `ended`: bytes of all tensor files, write_seconds from the copy to the published checkpoint, verify_seconds
    (see PublishedSave), the error, which is the same on every rank, and how the snapshot was kept in memory (copied);
    None if it was not.
    """

    def __init__(
        self,
        kind: SaveKind,
        step: int,
        segment: LedgerSegment | None,
        stall_seconds: float,
        snapshot_seconds: float,
        work: Callable[[], PublishedSave],
        keep: Callable[[], Callable[[], Copied]] | None = None,
        withdraw: Callable[[], None] = lambda: None,
    ):
        self.kind: SaveKind = kind
        self.step, self.segment = step, segment
        self.stall_seconds, self.snapshot_seconds = stall_seconds, snapshot_seconds
        self.bytes, self.write_seconds, self.verify_seconds = 0, 0.0, 0.0
        self.error: Exception | None = None
        self.copied: Copied | None = None
        self._began = time.monotonic()
        self._work, self._keep, self._withdraw = work, keep, withdraw
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def age(self) -> float:
        """The seconds since the copy of the state, for a save that has not ended."""
        return time.monotonic() - self._began

    @property
    def is_fatal(self) -> bool:
        """True if a later save would fail as well."""
        passing = isinstance(self.error, OSError) or getattr(self.error, "code", "") in _PASSING
        return self.error is not None and not passing

    def wait(self) -> None:
        """Wait until the save has ended."""
        self._thread.join()

    def _run(self) -> None:
        started, kept = time.perf_counter(), self._keep() if self._keep else None
        try:
            published = self._work()
            self.bytes, self.verify_seconds = published.bytes, published.verify_seconds
        except Exception as error:
            self.error = error
        self.write_seconds = time.perf_counter() - started
        if kept is not None:
            try:
                self.copied = kept()
            except Exception as error:  # the ranks cannot agree any more
                self.error = self.error or error
        if self.is_fatal:
            self._withdraw()


@dataclass(frozen=True)
class _Image:
    """A snapshot: `size` bytes of the memory `fd`, of which tensors begin at `begin`. failure: why there is none."""

    contents: FileContents | None
    fd: int
    size: int
    begin: int
    failure: Exception | None


class BackgroundSaver:
    """Saves of this rank in the background.

    group: all ranks, used by nothing else; None without a process group. replicas: where snapshots of full checkpoints
    are kept in memory, if anywhere. attempt: the number of this start of the ranks. in_flight: the newest save, until
    it was reported. broken: the error of a save after which no later one can succeed.
    """

    def __init__(
        self,
        folder: RunFolder,
        device: torch.device,
        group: dist.ProcessGroup | None,
        replicas: Replicas | None = None,
        attempt: int = 0,
    ):
        self._folder, self._group, self._replicas, self._attempt = folder, group, replicas, attempt
        self._snapshot = Snapshot(device)
        # The keeper has the memory of the last full snapshot, which a save of the weights alone must not change.
        self._weights = Snapshot(device) if replicas else self._snapshot
        self._writer = WriterProcess(folder, rank(), [self._snapshot.fd, self._weights.fd])
        with contextlib.suppress(ResourceError):  # tried again at the first save, which reports it
            self._writer.begin()  # now, because its start must not count for the first save
        self._refusal_is_known = False
        self.in_flight: SaveInFlight | None = None
        self.broken: Exception | None = None

    @property
    def writer_pid(self) -> int | None:
        """The id of the writer process; None before the first save."""
        return self._writer.pid

    @property
    def is_writing(self) -> bool:
        """True if a save of this rank is in flight."""
        return self.in_flight is not None and not self.in_flight.ended

    def new_refusal(self) -> int:
        """Return the error code with which the CUDA runtime refused to page-lock the memory of a snapshot; 0 if it did
        not, or if it is known from an earlier call."""
        refusal = self._snapshot.refusal or self._weights.refusal
        if not refusal or self._refusal_is_known:
            return 0
        self._refusal_is_known = True
        return refusal

    def start(
        self,
        facts: CheckpointFacts,
        state: TrainingState,
        ledger: tuple[LedgerSegment, ...],
        segment: bytes,
        keep: int,
        keep_every: int,
        began: float,
        require_unchanged: Callable[[], None] | None = None,
    ) -> SaveInFlight:
        """Copy the state of this rank, and begin to save it as the checkpoint of `facts.step`, or its weights alone if
        that is `facts.kind`. Collective.

        The arguments are those of `save_checkpoint`; the previous save must have ended. began: time.monotonic() at
        which training began to wait. An error of this rank ends the save on every rank.
        """
        contents, header, size, failure, copied_in = None, b"", 0, None, 0.0
        replicas = self._replicas if facts.kind == FULL else None
        snapshot = self._snapshot if facts.kind == FULL else self._weights
        try:
            if replicas is not None:
                replicas.begin()  # first, so that all ranks count the same saves
            contents, tensors = file_contents(state, facts.kind)
            if replicas is not None:
                header = header_of(contents.parts)  # what is kept in memory is a whole checkpoint file
            copying = time.monotonic()
            size = snapshot.take(tensors, header)
            copied_in = time.monotonic() - copying
            if require_unchanged is not None:
                require_unchanged()
            self._writer.begin(size)
        except (IngotError, OSError, RuntimeError) as error:  # the other ranks have to hear of it
            failure = error
        image = _Image(contents, snapshot.fd, size, len(header), failure)

        def work() -> PublishedSave:
            return self._save(facts, image, ledger, segment, keep, keep_every)

        def keep_in_memory() -> Callable[[], Copied]:
            copying, failed = None, failure
            if replicas is not None and contents is not None and failure is None:
                try:
                    copying = replicas.keep(snapshot.fd, size, self._attempt, facts, contents, ledger, segment)
                except Exception as error:  # the other ranks have to hear of it
                    failed = error
            return lambda: self._copied(facts.step, copying, failed)

        added, stall = ledger[-1] if ledger else None, time.monotonic() - began
        in_memory = keep_in_memory if replicas is not None else None
        self.in_flight = SaveInFlight(
            facts.kind, facts.step, added, stall, copied_in, work, in_memory, lambda: self.forget(facts.step - 1)
        )
        return self.in_flight

    def _copied(self, step: int, copying: Copying | None, failure: Exception | None) -> Copied:
        """Wait until the snapshot is in memory on all nodes. The same on every rank. Collective."""

        def own() -> dict[str, Any]:
            if copying is not None:
                return copying.wait()
            return {"nodes": 0, "bytes": 0, "seconds": 0.0, "failures": [f"rank {rank()}: {failure}"]}

        copied = Copied(**from_all_ranks(own, lambda ranks: vars(summary(step, ranks)), group=self._group))
        if self._replicas is not None and copying is not None and not copied.failures:
            self._replicas.retain(copying.snapshot)
        return copied

    def forget(self, after: int) -> None:
        """Let go of snapshots in memory of steps beyond `after`: the run went back."""
        if self._replicas is not None:
            self._replicas.forget(after)

    def _save(
        self,
        facts: CheckpointFacts,
        image: "_Image",
        ledger: tuple[LedgerSegment, ...],
        segment: bytes,
        keep: int,
        keep_every: int,
    ) -> PublishedSave:
        def own_bytes() -> int:
            if image.failure is not None:
                raise image.failure
            return image.size

        def write() -> bytes:
            assert image.contents is not None
            return self._writer.write(facts, image.contents, image.fd, image.size, image.begin)

        try:
            from_all_ranks(own_bytes, lambda sizes: self._writer.make_folder(facts, sizes), group=self._group)
            saved = from_all_ranks(
                write,
                lambda parts: vars(self._writer.finish(facts, parts, ledger, segment, keep, keep_every)),
                bytes,
                bytes,
                group=self._group,
            )
        except Exception:  # the writers of all ranks have answered or ended
            discard_files(CheckpointFiles(self._folder.of(facts.kind), facts.step, facts.epoch), self._group)
            raise
        sweep_disks(self._folder, self._group)
        return PublishedSave(**saved)

    def close(self) -> None:
        """End the writer process, and a save that is in flight with it, and free the snapshot."""
        self._writer.close()
        self._snapshot.close()
        self._weights.close()
