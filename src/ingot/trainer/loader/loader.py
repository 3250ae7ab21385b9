"""Batches for one rank: a thread reads them some steps ahead, and a separate CUDA stream copies them to the device."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from ingot.errors import ConfigError, DataError, ResourceError
from ingot.schema.quarantine_record import Quarantined
from ingot.schema.step_ranges import StepSpan, among
from ingot.schema.tokens import read_token_manifest
from ingot.trainer.loader.order import Order, quarantine_from
from ingot.trainer.loader.reader import DamagedTokens, TokenReader, document_numbers, of_damage
from ingot.trainer.loader.retry import DataTrouble, Retries
from ingot.trainer.loader.transport import DeviceTransport, HostTransport
from ingot.trainer.loader.window_filter import WindowFilter

_POLL_SECONDS = 0.1  # how often the thread checks for a request to stop
_CLOSE_SECONDS = 10.0
DEADLINE_SECONDS = 300.0


@dataclass(frozen=True)
class Batch:
    """This rank's part of one optimizer step: A micro-batches of B sequences of T tokens, on the loader's device.

    inputs, targets: int64 [A, B, T], views of one buffer (not contiguous: use reshape, not view).
    document_ids: int32 [A, B, T], the number of the document within its sequence; None unless documents are masked. On
    the host, where attention is planned.
    sample_ids: int64 [A * B], window ids for the ledger. wait_seconds: how long the trainer waited for this batch.
    troubles: with reading, before it could be read. passed: the step's data are passed: the tensors are empty.
    """

    step: int
    sample_ids: np.ndarray
    inputs: torch.Tensor
    targets: torch.Tensor
    document_ids: torch.Tensor | None
    wait_seconds: float
    troubles: tuple[DataTrouble, ...] = ()
    passed: bool = False


@dataclass
class _Prepared:
    step: int
    sample_ids: np.ndarray
    tokens: torch.Tensor  # [A * B, T + 1]
    documents: torch.Tensor | None  # [A * B, T], on the host
    ready: "torch.cuda.Event | None"  # recorded after the copy to the device
    troubles: tuple[DataTrouble, ...]
    passed: bool = False


@dataclass(frozen=True)
class _Damaged:
    """A batch that may not be used. found: all damage of the shard in which it was found, or what the filter found in
    the batch."""

    found: Sequence[DamagedTokens]
    error: DataError


_Read = _Prepared | _Damaged | BaseException


class Loader:
    """The batches of the steps first_step..last_step (inclusive, counted from 1), as an iterator.

    Rank r of `ranks` reads the r-th equal part of each step's global batch, so all ranks together read exactly the
    samples that one rank would. Raises ConfigError if the batch cannot be divided equally; next() raises DataError for
    damaged data. Close the loader, or use it as a context manager, to end its thread.

    prefetch: the number of batches read ahead. earlier: the earlier mixture weights as (last step, weights), oldest
    first (loader/order.py). deadline_seconds: the longest wait for a batch. read_seconds: without a batch for this
    time, another thread reads it, and the next one after twice that; a read that fails is tried again for half of it.
    passed: steps whose batches are not read: the ids of their samples are known, and their tensors are empty.
    quarantine: the tokens that are left out (loader/quarantine.py). finds_damage: damaged data end the batches until
    they are in quarantine, as `read_until` and `damage` report; otherwise next() raises. window_filter: its findings
    end the batches in the same way.

    next_step: of the next batch. agreed: the last step whose batches all ranks can read, as they agreed
    (trainer/damaged_data.py).
    """

    def __init__(
        self,
        folder: Path,
        *,
        seq_len: int,
        global_batch: int,
        micro_batch: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
        earlier: Sequence[tuple[int, Mapping[str, float]]] = (),
        rank: int = 0,
        ranks: int = 1,
        first_step: int = 1,
        last_step: int,
        device: torch.device | str = "cpu",
        mask_documents: bool = False,
        prefetch: int = 2,
        deadline_seconds: float = DEADLINE_SECONDS,
        read_seconds: float = 60.0,
        passed: Sequence[StepSpan] = (),
        quarantine: Sequence[Quarantined] = (),
        finds_damage: bool = False,
        window_filter: WindowFilter | None = None,
    ):
        if global_batch % (ranks * micro_batch):
            raise ConfigError(
                "E-BATCH-DIVIDE",
                f"global_batch {global_batch} is not micro_batch {micro_batch} x accumulation x {ranks} ranks",
                rule="every rank reads the same number of micro-batches",
                fix="set train.global_batch to a multiple of train.micro_batch x the number of data-parallel ranks",
                global_batch=global_batch,
                micro_batch=micro_batch,
                ranks=ranks,
            )
        self.manifest = read_token_manifest(folder)
        mixes = [(step * global_batch, own) for step, own in earlier]
        self.order_with: Callable[[Sequence[Quarantined]], Order] = lambda records: Order(
            self.manifest, seq_len, seed, weights, earlier=mixes, quarantine=quarantine_from(records, global_batch)
        )
        self._records, self.order = quarantine, self.order_with(quarantine)
        self.device = _with_index(torch.device(device))
        self.micro_batch, self.deadline_seconds, self._read_seconds = micro_batch, deadline_seconds, read_seconds
        self._folder, self._seq_len = folder, seq_len
        self._global_batch, self._mask_documents, self._passed = global_batch, mask_documents, tuple(passed)
        per_rank = global_batch // ranks
        self._part = slice(rank * per_rank, (rank + 1) * per_rank)
        self.shape = (per_rank, seq_len + 1)
        self._steps = range(first_step, last_step + 1)
        self.next_step, self.agreed = first_step, first_step - 1
        self.finds_damage, self.window_filter = finds_damage, window_filter
        self._prefetch, self._is_closed = prefetch, False
        self._looked_at: tuple[_Read, tuple[DataTrouble, ...]] | None = None
        self._waited = 0.0
        self._worker = self._started_worker()

    def _started_worker(self) -> "_ReadAhead":
        return _ReadAhead(self, self._reader(), range(self.next_step, self._steps.stop), self._prefetch)

    def _reader(self) -> TokenReader:
        retries = Retries(self._read_seconds / 2)
        return TokenReader(self._folder, self._seq_len, manifest=self.manifest, retries=retries)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        """Return the next step's batch. Raises errors of its thread, and ResourceError after `deadline_seconds`."""
        if self.is_at_end:
            raise StopIteration
        prepared, replaced = self._look()
        if not isinstance(prepared, _Prepared):
            self.next_step = self._steps.stop
            raise prepared.error if isinstance(prepared, _Damaged) else prepared
        self.next_step, self._looked_at = self.next_step + 1, None
        if prepared.ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(prepared.ready)
            prepared.tokens.record_stream(stream)  # allocated on the side stream, freed after this stream has used it
        waited, self._waited = self._waited, 0.0
        return self._batch(prepared, waited, replaced)

    @property
    def leaves_out(self) -> bool:
        """True if what this rank finds in its data has to be left out on all ranks."""
        return self.finds_damage or self.window_filter is not None

    @property
    def is_at_end(self) -> bool:
        """True after the last batch."""
        return self.next_step not in self._steps

    def read_until(self) -> int:
        """Wait for the next batch, and return the last step up to which batches were read; the step before the next one
        if that cannot be read because data are damaged. Raises other errors of the thread."""
        read, _ = self._look()
        if isinstance(read, BaseException):
            raise read
        return self.next_step - 1 if isinstance(read, _Damaged) else self._worker.last_read

    def damage(self) -> Sequence[DamagedTokens]:
        """Return the damage because of which the next batch cannot be read; none if it can."""
        read, _ = self._look()
        return read.found if isinstance(read, _Damaged) else ()

    def leave_out(self, records: Sequence[Quarantined]) -> None:
        """Read again from the next step on, without the tokens of all `records`."""
        self._worker.stop.set()
        self._worker.thread.join(_CLOSE_SECONDS)  # one that hangs in the kernel ends later, and asks for no more steps
        self._looked_at, self._records, self.order = None, records, self.order_with(records)
        self.__dict__.pop("_of_parts", None)
        self._worker = self._started_worker()

    def _look(self) -> tuple[_Read, tuple[DataTrouble, ...]]:
        """Return what the thread has read for the next step, without taking it away."""
        if self._looked_at is None:
            began = time.perf_counter()
            self._looked_at = self._get()
            self._waited += time.perf_counter() - began
        return self._looked_at

    def _batch(self, prepared: _Prepared, wait_seconds: float, replaced: tuple[DataTrouble, ...]) -> Batch:
        shape = (len(prepared.tokens) // self.micro_batch, self.micro_batch, self.shape[1] - 1)
        documents = prepared.documents
        return Batch(
            step=prepared.step,
            sample_ids=prepared.sample_ids,
            inputs=prepared.tokens[:, :-1].unflatten(0, shape[:2]),
            targets=prepared.tokens[:, 1:].unflatten(0, shape[:2]),
            document_ids=None if documents is None else documents.view(shape),
            wait_seconds=wait_seconds,
            troubles=replaced + prepared.troubles,
            passed=prepared.passed,
        )

    def _get(self) -> tuple[_Read, tuple[DataTrouble, ...]]:
        """Wait for what the thread has read. Returns it, and that threads were replaced."""
        if self._is_closed:
            raise ResourceError(
                "E-LOADER-CLOSED",
                "the loader is closed",
                rule="batches are taken before close()",
                fix="this is a bug in ingot or in the program that uses ingot; please report it",
            )
        began, patience, replaced = time.monotonic(), self._read_seconds, 0
        ends = began + self.deadline_seconds
        while True:
            with contextlib.suppress(queue.Empty):
                read = self._worker.queue.get(timeout=max(min(patience, ends - time.monotonic()), 0.0))
                took = time.monotonic() - began
                reason = "a thread that reads it was replaced"
                trouble = DataTrouble(path=str(self._folder), reason=reason, tries=replaced, seconds=took)
                return read, (trouble,) if replaced else ()
            if time.monotonic() >= ends:
                raise ResourceError(
                    "E-LOADER-TIMEOUT",
                    f"no batch for step {self.next_step} was read within {self.deadline_seconds:.0f} s",
                    rule="reading a batch usually takes milliseconds; the disk or mount of the token folder hangs",
                    fix=f"check the storage of {self._folder}, then run the same command again: the run continues",
                    step=self.next_step,
                    seconds=self.deadline_seconds,
                )
            self._worker.stop.set()  # one that hangs in the kernel stays there
            self._worker, replaced, patience = self._started_worker(), replaced + 1, 2 * patience

    def close(self) -> None:
        """End the thread. Raises ResourceError if the thread hangs in a read for more than ten seconds."""
        self._is_closed = True
        self._worker.stop.set()
        self._worker.thread.join(_CLOSE_SECONDS)
        if self._worker.thread.is_alive():
            raise ResourceError(
                "E-LOADER-TIMEOUT",
                f"the loader's thread is still reading after {_CLOSE_SECONDS:.0f} s",
                rule="reading a batch usually takes milliseconds; the disk or mount of the token folder hangs",
                fix="check the storage, then run the same command again: the run continues",
                seconds=_CLOSE_SECONDS,
            )

    def samples(self, step: int) -> np.ndarray:
        """Return the window ids of this rank in a step: int64 [A * B]."""
        return self.order.step(step, self._global_batch)[self._part]

    @cached_property
    def _of_parts(self) -> tuple[Order, TokenReader]:
        """An order and a reader of this thread: the loader's own are those of its thread."""
        return self.order_with(self._records), self._reader()

    def part_of(self, step: int, rank: int) -> Batch:
        """Read the part of the batch of `step` that belongs to rank `rank`, in this thread. Raises DataError."""
        per_rank = self.shape[0]
        order, reader = self._of_parts
        ids = order.step(step, self._global_batch)[rank * per_rank : (rank + 1) * per_rank]
        host = reader.read(ids)
        documents = self.documents(host)
        numbers = None if documents is None else torch.from_numpy(documents)
        return self._batch(_Prepared(step, ids, torch.from_numpy(host).to(self.device), numbers, None, ()), 0.0, ())

    def passes(self, step: int) -> bool:
        """Return whether the data of `step` are passed."""
        return among(step, self._passed)

    def documents(self, tokens: np.ndarray) -> np.ndarray | None:
        """Return the document numbers of the inputs of windows [A * B, T + 1], if documents are masked."""
        return document_numbers(tokens[:, :-1], self.manifest.eot_id) if self._mask_documents else None

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_) -> None:
        self.close()


class _ReadAhead:
    """A thread that reads the batches of `steps` for a loader into `queue`, some ahead, until `stop` is set.

    last_read: the last step that it has read. It ends with the first batch that cannot be read.
    """

    def __init__(self, loader: Loader, reader: TokenReader, steps: range, ahead: int):
        self._loader, self._reader, self._steps = loader, reader, steps
        self.queue: queue.Queue[_Read] = queue.Queue(ahead)
        self.last_read = steps.start - 1
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._prepare_all, name="ingot-loader", daemon=True)
        self.thread.start()

    def _prepare_all(self) -> None:
        loader = self._loader
        try:
            place = (
                HostTransport(loader.shape)
                if loader.device.type == "cpu"
                else DeviceTransport(loader.shape, loader.device)
            )
            for step in self._steps:
                ids = loader.samples(step)
                if loader.passes(step):
                    nothing = torch.empty(0, loader.shape[1], dtype=torch.int64, device=loader.device)
                    if not self._put(_Prepared(step, ids, nothing, None, None, (), passed=True)):
                        return
                    continue
                try:
                    host = self._reader.read(ids, out=place.buffer())
                except DataError as error:
                    self._put(self._damaged(error) if loader.finds_damage else error)
                    return
                if loader.window_filter and (found := loader.window_filter.findings(self._reader, ids, host)):
                    self._put(_Damaged(found, found[0].error))
                    return
                documents = loader.documents(host)
                numbers = None if documents is None else torch.from_numpy(documents)
                tokens, ready = place.send()
                if not self._put(_Prepared(step, ids, tokens, numbers, ready, self._reader.retries.take())):
                    return
        except BaseException as error:  # the trainer raises every error of the thread
            self._put(error)

    def _damaged(self, error: DataError) -> _Damaged:
        named = of_damage(error).facts["shard"]
        number = next(i for i, shard in enumerate(self._reader.manifest.shards) if shard.name == named)
        return _Damaged(self._reader.survey(number), error)

    def _put(self, item: _Read) -> bool:
        """Put `item` into the queue. Returns False if the thread has to end before there is room."""
        if isinstance(item, _Prepared):
            self.last_read = item.step
        while not self.stop.is_set():
            try:
                self.queue.put(item, timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False


def _with_index(device: torch.device) -> torch.device:
    """Return `device` with the index of the current GPU, because each thread has a current device of its own."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
