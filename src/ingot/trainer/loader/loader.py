"""Batches for one rank: a thread reads them some steps ahead, and a separate CUDA stream copies them to the device."""

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

from ingot.errors import ConfigError, ResourceError
from ingot.schema.step_ranges import StepSpan, among
from ingot.schema.tokens import read_token_manifest
from ingot.trainer.loader.order import Order
from ingot.trainer.loader.reader import TokenReader, document_numbers
from ingot.trainer.loader.retry import DataTrouble, Retries

_POLL_SECONDS = 0.1  # how often the thread checks for a request to stop
_CLOSE_SECONDS = 10.0
DEADLINE_SECONDS = 300.0


@dataclass(frozen=True)
class Batch:
    """This rank's part of one optimizer step: A micro-batches of B sequences of T tokens, on the loader's device.

    inputs, targets: int64 [A, B, T], views of one buffer (not contiguous: use reshape, not view).
    document_ids: int32 [A, B, T], the number of the document within its sequence; None unless documents are masked.
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
    documents: torch.Tensor | None  # [A * B, T]
    ready: "torch.cuda.Event | None"  # recorded after the copy to the device
    troubles: tuple[DataTrouble, ...]
    passed: bool = False


class Loader:
    """The batches of the steps first_step..last_step (inclusive, counted from 1), as an iterator.

    Rank r of `ranks` reads the r-th equal part of each step's global batch, so all ranks together read exactly the
    samples that one rank would. Raises ConfigError if the batch cannot be divided equally; next() raises DataError for
    damaged data. Close the loader, or use it as a context manager, to end its thread.

    prefetch: the number of batches read ahead. earlier: the earlier mixture weights as (last step, weights), oldest
    first (loader/order.py). deadline_seconds: the longest wait for a batch. read_seconds: without a batch for this
    time, another thread reads it, and the next one after twice that; a read that fails is tried again for half of it.
    passed: steps whose batches are not read: the ids of their samples are known, and their tensors are empty.
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
        self._new_order = partial(Order, self.manifest, seq_len, seed, weights, earlier=mixes)
        self.order = self._new_order()
        self.device = _with_index(torch.device(device))
        self.micro_batch, self.deadline_seconds, self._read_seconds = micro_batch, deadline_seconds, read_seconds
        self._folder, self._seq_len = folder, seq_len
        self._global_batch, self._mask_documents, self._passed = global_batch, mask_documents, tuple(passed)
        per_rank = global_batch // ranks
        self._part = slice(rank * per_rank, (rank + 1) * per_rank)
        self.shape = (per_rank, seq_len + 1)
        self._steps = range(first_step, last_step + 1)
        self._next_step = first_step
        self._prefetch, self._is_closed = prefetch, False
        self._worker = self._started_worker()

    def _started_worker(self) -> "_ReadAhead":
        return _ReadAhead(self, self._reader(), range(self._next_step, self._steps.stop), self._prefetch)

    def _reader(self) -> TokenReader:
        retries = Retries(self._read_seconds / 2)
        return TokenReader(self._folder, self._seq_len, manifest=self.manifest, retries=retries)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        """Return the next step's batch. Raises errors of its thread, and ResourceError after `deadline_seconds`."""
        if self._next_step not in self._steps:
            raise StopIteration
        started = time.perf_counter()
        prepared, replaced = self._get()
        if isinstance(prepared, BaseException):
            self._next_step = self._steps.stop
            raise prepared
        self._next_step += 1
        if prepared.ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(prepared.ready)
            for tensor in (prepared.tokens, prepared.documents):
                if tensor is not None:
                    tensor.record_stream(stream)  # allocated on the side stream, freed after this stream has used it
        return self._batch(prepared, time.perf_counter() - started, replaced)

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

    def _get(self) -> "tuple[_Prepared | BaseException, tuple[DataTrouble, ...]]":
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
                    f"no batch for step {self._next_step} was read within {self.deadline_seconds:.0f} s",
                    rule="reading a batch usually takes milliseconds; the disk or mount of the token folder hangs",
                    fix=f"check the storage of {self._folder}, then run the same command again: the run continues",
                    step=self._next_step,
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
        return self._new_order(), self._reader()

    def part_of(self, step: int, rank: int) -> Batch:
        """Read the part of the batch of `step` that belongs to rank `rank`, in this thread. Raises DataError."""
        per_rank = self.shape[0]
        order, reader = self._of_parts
        ids = order.step(step, self._global_batch)[rank * per_rank : (rank + 1) * per_rank]
        host = reader.read(ids)
        documents = self.documents(host)
        numbers = None if documents is None else torch.from_numpy(documents).to(self.device)
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
    """A thread that reads the batches of `steps` for a loader into `queue`, some ahead, until `stop` is set."""

    def __init__(self, loader: Loader, reader: TokenReader, steps: range, ahead: int):
        self._loader, self._reader, self._steps = loader, reader, steps
        self.queue: queue.Queue[_Prepared | BaseException] = queue.Queue(ahead)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._prepare_all, name="ingot-loader", daemon=True)
        self.thread.start()

    def _prepare_all(self) -> None:
        loader = self._loader
        try:
            place = _Host(loader.shape) if loader.device.type == "cpu" else _Device(loader.shape, loader.device)
            for step in self._steps:
                ids = loader.samples(step)
                if loader.passes(step):
                    nothing = torch.empty(0, loader.shape[1], dtype=torch.int64, device=loader.device)
                    if not self._put(_Prepared(step, ids, nothing, None, None, (), passed=True)):
                        return
                    continue
                host = self._reader.read(ids, out=place.buffer())
                documents = loader.documents(host)
                if not self._put(_Prepared(step, ids, *place.send(documents), self._reader.retries.take())):
                    return
        except BaseException as error:  # the trainer raises every error of the thread
            self._put(error)

    def _put(self, item: "_Prepared | BaseException") -> bool:
        """Put `item` into the queue. Returns False if the thread has to end before there is room."""
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


class _Host:
    """The transport of batches to a CPU: they stay where they were read, without a copy."""

    def __init__(self, shape: tuple[int, int]):
        self.shape = shape

    def buffer(self) -> np.ndarray:
        self.tokens = np.empty(self.shape, np.int64)
        return self.tokens

    def send(self, documents: np.ndarray | None):
        return torch.from_numpy(self.tokens), None if documents is None else torch.from_numpy(documents), None


class _Device:
    """The transport of batches to a GPU: two alternating pinned buffers, and copies on a separate CUDA stream."""

    def __init__(self, shape: tuple[int, int], device: torch.device):
        torch.cuda.set_device(device)  # for this thread; otherwise pinning would open the first GPU on every rank
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.buffers = [torch.empty(shape, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self.copied: list[torch.cuda.Event | None] = [None, None]
        self.turn = 0

    def buffer(self) -> np.ndarray:
        self.turn = 1 - self.turn
        if (event := self.copied[self.turn]) is not None:
            event.synchronize()  # the copy out of this buffer, two batches ago
        return self.buffers[self.turn].numpy()

    def send(self, documents: np.ndarray | None):
        with torch.cuda.stream(self.stream):
            tokens = self.buffers[self.turn].to(self.device, non_blocking=True)
            numbers = None if documents is None else torch.from_numpy(documents).to(self.device)
            event = torch.cuda.Event()
            event.record(self.stream)
        self.copied[self.turn] = event
        return tokens, numbers, event
