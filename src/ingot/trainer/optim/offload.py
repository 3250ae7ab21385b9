"""AdamW whose moments are not on the device: in host memory (ZeRO-Offload, Ren et al. 2021) or in a file
(ZeRO-Infinity, Rajbhandari et al. 2021). The update runs on the host.

The master copies are the pieces' values and stay where the layout put them. What is not in host memory passes through
two staging slots, cut by cut: while one cut is updated, the other slot is written behind and read ahead. A cut is a run
of a piece's elements; AdamW is elementwise, so any cut is legal, and cuts at multiples of 64 bytes keep the bits.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from ingot.errors import ResourceError
from ingot.schema.parallel import Parallel
from ingot.schema.run import Optim
from ingot.trainer.optim.adamw import Optimizer, Piece, State, gradient_of, update, zero_state
from ingot.trainer.optim.moment_file import KINDS, MomentFile

BUFFER_BYTES = 256 * 2**20
DEADLINE_SECONDS = 600.0
CUT_ELEMENTS = 1024  # cuts are multiples of this: 4 KiB of float32


def build_optimizer(
    pieces: Iterable[Piece],
    optim: Optim,
    parallel: Parallel,
    base: Path,
) -> Optimizer:
    """base: where a relative `parallel.offload_folder` starts. It should be on a local disk; ranks may share it."""
    if parallel.offload == "none":
        return Optimizer(pieces, optim)
    if parallel.offload == "cpu":
        return OffloadedOptimizer(pieces, optim)
    return OffloadedOptimizer(pieces, optim, folder=base / parallel.offload_folder)


@dataclass(frozen=True)
class Cut:
    """Elements start..stop of a piece's block, counted row by row."""

    piece: Piece
    start: int
    stop: int

    def of(self, block: Tensor) -> Tensor:
        return block.view(-1)[self.start : self.stop]

    def gradient(self) -> Tensor:
        return gradient_of(self.piece).reshape(-1)[self.start : self.stop]

    @property
    def is_last(self) -> bool:
        return self.stop == self.piece.value.numel()


@dataclass
class Slot:
    """Staging memory of one cut: a buffer per kind and dtype, made when first needed, pinned where a GPU copies."""

    elements: int
    buffers: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)
    transfer: Future | None = None  # with the file
    copied: torch.cuda.Event | None = None  # from the device

    def take(self, kind: str, like: Tensor) -> Tensor:
        key = (kind, like.dtype)
        if key not in self.buffers:
            pinned = kind not in KINDS and torch.cuda.is_available()  # moments never go to the device
            self.buffers[key] = torch.empty(self.elements, dtype=like.dtype, pin_memory=pinned)
        return self.buffers[key][: like.numel()]


class Movers:
    """Threads that run what they are given, in order. Python waits at its exit for the threads of an executor, but not
    for these: a disk that never answers must not keep a process from ending."""

    def __init__(self, number: int):
        self._tasks: SimpleQueue[tuple[Future, Callable, tuple] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name="offload", daemon=True) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable, *args) -> Future:
        future = Future()
        self._tasks.put((future, call, args))
        return future

    def close(self, *, wait: bool) -> None:
        """What has not begun is dropped. wait: for what has."""
        while True:
            try:
                self._tasks.get_nowait()
            except Empty:
                break
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call, args = task
            try:
                future.set_result(call(*args))
            except BaseException as error:
                future.set_exception(error)
            del task, future, call, args  # they hold staging memory


class OffloadedOptimizer(Optimizer):
    """Same updates as `Optimizer` on a CPU, bit for bit, with the state in host memory, or in a file in `folder`.

    buffer_bytes: of both slots together, all that is staged; with `folder` the only host memory that state takes.
    A step waits for the device: the host needs its gradients. Beyond the pieces it takes one cut of device memory.
    `step` raises ResourceError if the file cannot be read or written, or not within `deadline_seconds`. Values and
    state are then torn, `moments` does not give them out, and the process has to start again from a checkpoint.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        optim: Optim,
        *,
        folder: Path | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        deadline_seconds: float = DEADLINE_SECONDS,
    ):
        pieces = [p for p in pieces if p.value.numel()]
        self.deadline_seconds = deadline_seconds
        self.file = MomentFile(folder, {p.name: p.value for p in pieces}) if folder else None
        self.movers = Movers(2) if folder else None
        self.torn = False
        super().__init__(pieces, optim)
        # A slot holds a cut's value, gradient and two moments.
        itemsize = max((p.value.itemsize for p in pieces), default=4)
        self.cut_elements = max(buffer_bytes // (2 * 4 * itemsize) // CUT_ELEMENTS, 1) * CUT_ELEMENTS
        self.stream: torch.cuda.Stream | None = None
        self.slots = (Slot(self.cut_elements), Slot(self.cut_elements))

    def _zero_states(self) -> dict[str, State]:
        """Moments in the file are mapped into memory: a checkpoint reads and writes them as any tensor."""
        states = {}
        for piece in self.pieces:
            if self.file is not None:
                blocks = [self.file.tensor(piece.name, kind) for kind in KINDS]
            else:
                blocks = [torch.zeros(piece.value.shape, dtype=piece.value.dtype) for _ in KINDS]
            states[piece.name] = zero_state(*blocks)
        return states

    @torch.no_grad()
    def step(self, lr: float, *, scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        if found_inf is not None and bool(found_inf):
            for piece in self.pieces:
                piece.grad = None
            return
        self.torn = True
        if self.file is not None:
            self.file.release_pages()
        stream = self._side_stream()
        cuts = list(self._cuts())
        for slot, cut in zip(self.slots, cuts, strict=False):
            self._turn(slot, None, cut, scale, stream)
        for i, cut in enumerate(cuts):
            slot = self.slots[i % 2]
            self._wait(slot)
            self._update(slot, cut, lr, scale)
            self._turn(slot, cut, cuts[i + 2] if i + 2 < len(cuts) else None, scale, stream)
        for slot in self.slots:
            self._wait(slot)
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self.torn = False

    def moments(self) -> dict[str, State]:
        if self.torn:
            raise ResourceError(
                "the optimizer's last update was cut short",
                rule="values and moments of different steps are never saved",
                fix="go on from the newest checkpoint",
            )
        return super().moments()

    def close(self) -> None:
        """The file has no name: its space is free once it is closed, or its process is dead."""
        if self.movers is not None and self.file is not None:
            self.movers.close(wait=not self.torn)
            self.states = {}
            self.file.close()

    def _cuts(self) -> Iterator[Cut]:
        for piece in self.pieces:
            elements = piece.value.numel()
            for start in range(0, elements, self.cut_elements):
                yield Cut(piece, start, min(start + self.cut_elements, elements))

    def _side_stream(self) -> torch.cuda.Stream | None:
        """Where copies run, after what is under way on the device; None if everything is in host memory."""
        tensors = (t for p in self.pieces for t in (p.value, p.grad) if t is not None and t.is_cuda)
        first = next(tensors, None)
        if first is None:
            return None
        if self.stream is None:  # always the same one: the allocator keeps memory by stream
            self.stream = torch.cuda.Stream(first.device)
        self.stream.wait_stream(torch.cuda.current_stream(first.device))
        return self.stream

    def _turn(
        self, slot: Slot, done: Cut | None, coming: Cut | None, scale: Tensor | None, stream: torch.cuda.Stream | None
    ) -> None:
        """Start to bring what the slot holds of `done` back to its place, and then `coming` into the slot."""
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if done is not None and not on_host(done.piece.value):
                value = done.of(done.piece.value)
                value.copy_(slot.take("value", value), non_blocking=True)
            if coming is not None:
                value, gradient = coming.of(coming.piece.value), coming.gradient()
                if not on_host(value):
                    slot.take("value", value).copy_(value, non_blocking=True)
                if not on_host(gradient):
                    slot.take("grad", value).copy_(scaled(gradient, value.dtype, scale), non_blocking=True)
            if stream is not None:
                slot.copied = torch.cuda.Event()
                slot.copied.record(stream)
        if self.movers is not None:
            slot.transfer = self.movers.submit(self._exchange, slot, done, coming)

    def _exchange(self, slot: Slot, done: Cut | None, coming: Cut | None) -> None:
        assert self.file is not None
        for cut, transfer in ((done, self.file.write), (coming, self.file.read)):
            if cut is not None:
                for kind in KINDS:
                    transfer(cut.piece.name, kind, cut.start, slot.take(kind, cut.of(cut.piece.value)))

    def _wait(self, slot: Slot) -> None:
        if slot.transfer is not None:
            try:
                slot.transfer.result(self.deadline_seconds)
            except FutureTimeout:
                raise ResourceError(
                    f"{self.file} did not answer within {self.deadline_seconds:g} s",
                    rule="optimizer state in files needs a disk that keeps up",
                    fix="check the disk of parallel.offload_folder",
                ) from None
            slot.transfer = None
        if slot.copied is not None:
            slot.copied.synchronize()

    def _update(self, slot: Slot, cut: Cut, lr: float, scale: Tensor | None) -> None:
        """The step count of a piece moves on with its last cut; the others work on a copy."""
        piece, state = cut.piece, self.states[cut.piece.name]
        value, gradient = cut.of(piece.value), cut.gradient()
        dtype = value.dtype
        gradient = scaled(gradient, dtype, scale) if on_host(gradient) else slot.take("grad", value)
        blocks = [cut.of(state[k]) if self.file is None else slot.take(k, value) for k in KINDS]
        if not on_host(value):
            value = slot.take("value", value)
        counted = {
            **dict(zip(KINDS, blocks, strict=True)),
            "step": state["step"] if cut.is_last else state["step"].clone(),
        }
        update([value], [gradient], [counted], lr, self.optim, decays=piece.decays)
        if cut.is_last:
            piece.grad = None


def on_host(tensor: Tensor) -> bool:
    """Host memory is worked on in place; everything else is staged."""
    return tensor.device.type == "cpu"


def scaled(gradient: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    gradient = gradient.to(dtype)
    return gradient if scale is None else gradient * scale.to(gradient.device)
