"""An optimizer with its state in host memory (ZeRO-Offload, Ren et al. 2021) or in a file (ZeRO-Infinity, Rajbhandari
et al. 2021). The update runs on the host.

The master copies are the values of the shards and stay where the layout put them. Tensors outside host memory pass
through two staging slots, one range of a shard's elements at a time: while one slot is updated, the results of the
other are written and its next range is read. The rules are elementwise, so a shard can be updated range by range.
AdamW in ranges that start at multiples of 64 bytes has the same bits as one update of the whole shard.
"""

import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from ingot.errors import ResourceError
from ingot.plugins.optimizer import RuleOf
from ingot.plugins.piece import ParameterShard
from ingot.trainer.optim.optimizer import STEP, Optimizer, State, gradient_of, zero_state

BUFFER_BYTES = 256 * 2**20
DEADLINE_SECONDS = 600.0
VALUE, GRADIENT = "value", "grad"
RANGE_ELEMENTS = 1024  # the length of a range is a multiple of this number: 4 KiB of float32


@dataclass(frozen=True)
class ElementRange:
    """The elements start..stop-1 of a shard, in row-major order."""

    shard: ParameterShard
    start: int
    stop: int

    def of(self, block: Tensor) -> Tensor:
        """Return these elements of a tensor with the shape of the shard."""
        return block.view(-1)[self.start : self.stop]

    def gradient(self) -> Tensor:
        return gradient_of(self.shard).reshape(-1)[self.start : self.stop]

    @property
    def is_last(self) -> bool:
        return self.stop == self.shard.value.numel()


@dataclass
class StagingSlot:
    """Staging memory for one range: one buffer per kind of tensor and dtype, allocated at its first use.

    Buffers of values and gradients are pinned if there is a GPU.
    """

    elements: int
    buffers: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)
    transfer: Future | None = None  # the current writes and reads of the moment file
    copied: torch.cuda.Event | None = None  # recorded after the copies to and from the device

    def take(self, kind: str, like: Tensor) -> Tensor:
        key = (kind, like.dtype)
        if key not in self.buffers:
            pinned = kind in (VALUE, GRADIENT) and torch.cuda.is_available()  # moments never go to the device
            self.buffers[key] = torch.empty(self.elements, dtype=like.dtype, pin_memory=pinned)
        return self.buffers[key][: like.numel()]


class TransferThreads:
    """Threads that run tasks in order of submission.

    Python waits at exit for the threads of an executor, but not for these daemon threads: a disk that never answers
    must not keep a process from ending.
    """

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
        """Drop the tasks that have not begun, and end the threads. wait: wait for the running tasks."""
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
    """Elementwise rules with their state in host memory, or in a file in `folder`. The bits are those of `Optimizer`.

    buffer_bytes: the size of both staging slots together; with `folder`, the state takes no other host memory.
    A step waits for the device, whose gradients the host needs, and takes device memory for one range of elements.
    `step` raises ResourceError if a read or write of the file fails or takes longer than `deadline_seconds`. Values
    and state then belong to different steps: `moments` raises too, and the run must restart from a checkpoint.
    """

    def __init__(
        self,
        shards: Iterable[ParameterShard],
        rule_of: RuleOf,
        *,
        folder: Path | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        deadline_seconds: float = DEADLINE_SECONDS,
    ):
        shards = [p for p in shards if p.value.numel()]
        self.deadline_seconds = deadline_seconds
        kinds = {p.name: rule_of(p.name, p.shape).state for p in shards}
        self.file = MomentFile(folder, {p.name: p.value for p in shards}, kinds) if folder else None
        self.threads = TransferThreads(2) if folder else None
        self.torn = False
        super().__init__(shards, rule_of)
        # A slot holds the value, gradient and state of a range.
        tensors = 2 + max(map(len, kinds.values()), default=0)
        itemsize = max((p.value.itemsize for p in shards), default=4)
        self.range_elements = max(buffer_bytes // (2 * tensors * itemsize) // RANGE_ELEMENTS, 1) * RANGE_ELEMENTS
        self.stream: torch.cuda.Stream | None = None
        self.slots = (StagingSlot(self.range_elements), StagingSlot(self.range_elements))

    def _zero_states(self) -> dict[str, State]:
        """Return zero tensors: mapped from the file if there is one, otherwise in host memory."""
        states = {}
        for shard in self.shards:
            kinds = self.kinds(shard)
            if self.file is not None:
                blocks = [self.file.tensor(shard.name, kind) for kind in kinds]
            else:
                blocks = [torch.zeros(shard.value.shape, dtype=shard.value.dtype) for _ in kinds]
            states[shard.name] = zero_state(shard, dict(zip(kinds, blocks, strict=True)))
        return states

    @torch.no_grad()
    def step(self, lr: float, *, scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        if found_inf is not None and bool(found_inf):
            for shard in self.shards:
                shard.grad = None
            return
        self.torn = True
        if self.file is not None:
            self.file.release_pages()
        stream = self._side_stream()
        ranges = list(self._ranges())
        for slot, part in zip(self.slots, ranges, strict=False):
            self._exchange_slot(slot, None, part, scale, stream)
        for i, part in enumerate(ranges):
            slot = self.slots[i % 2]
            self._wait(slot)
            self._update(slot, part, lr, scale)
            self._exchange_slot(slot, part, ranges[i + 2] if i + 2 < len(ranges) else None, scale, stream)
        for slot in self.slots:
            self._wait(slot)
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self.torn = False

    def moments(self) -> dict[str, State]:
        if self.torn:
            raise ResourceError(
                "E-OFFLOAD-INCOMPLETE",
                "the optimizer's last update was interrupted, so values and moments belong to different steps",
                rule="only values and moments of the same step are saved",
                fix="run `ingot train` again: the run continues from its newest checkpoint",
            )
        return super().moments()

    def close(self) -> None:
        """Close the file, which has no name: its disk space is freed with it, at the latest when the process ends."""
        if self.threads is not None and self.file is not None:
            self.threads.close(wait=not self.torn)
            self.states = {}
            self.file.close()

    def _ranges(self) -> Iterator[ElementRange]:
        for shard in self.shards:
            elements = shard.value.numel()
            for start in range(0, elements, self.range_elements):
                yield ElementRange(shard, start, min(start + self.range_elements, elements))

    def _side_stream(self) -> torch.cuda.Stream | None:
        """Return the stream for copies, which waits for the device's current work; None without tensors on a GPU."""
        tensors = (t for p in self.shards for t in (p.value, p.grad) if t is not None and t.is_cuda)
        first = next(tensors, None)
        if first is None:
            return None
        if self.stream is None:  # one stream for all steps: the allocator caches memory by stream
            self.stream = torch.cuda.Stream(first.device)
        self.stream.wait_stream(torch.cuda.current_stream(first.device))
        return self.stream

    def _exchange_slot(
        self,
        slot: StagingSlot,
        done: ElementRange | None,
        coming: ElementRange | None,
        scale: Tensor | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Start to copy the results of range `done` out of the slot, and then the inputs of range `coming` into it."""
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if done is not None and not in_host_memory(done.shard.value):
                value = done.of(done.shard.value)
                value.copy_(slot.take(VALUE, value), non_blocking=True)
            if coming is not None:
                value, gradient = coming.of(coming.shard.value), coming.gradient()
                if not in_host_memory(value):
                    slot.take(VALUE, value).copy_(value, non_blocking=True)
                if not in_host_memory(gradient):
                    slot.take(GRADIENT, value).copy_(scaled(gradient, value.dtype, scale), non_blocking=True)
            if stream is not None:
                slot.copied = torch.cuda.Event()
                slot.copied.record(stream)
        if self.threads is not None:
            slot.transfer = self.threads.submit(self._exchange_file, slot, done, coming)

    def _exchange_file(self, slot: StagingSlot, done: ElementRange | None, coming: ElementRange | None) -> None:
        assert self.file is not None
        for part, transfer in ((done, self.file.write), (coming, self.file.read)):
            if part is not None:
                for kind in self.kinds(part.shard):
                    transfer(part.shard.name, kind, part.start, slot.take(kind, part.of(part.shard.value)))

    def _wait(self, slot: StagingSlot) -> None:
        if slot.transfer is not None:
            try:
                slot.transfer.result(self.deadline_seconds)
            except FutureTimeout:
                raise ResourceError(
                    "E-OFFLOAD-TIMEOUT",
                    f"a read or write of {self.file} took longer than {self.deadline_seconds:g} s",
                    rule="each read and write of the optimizer state ends before its deadline",
                    fix="check the disk of parallel.offload_folder, or set parallel.offload_folder to another disk",
                    folder="" if self.file is None else str(self.file.folder),
                    seconds=self.deadline_seconds,
                ) from None
            slot.transfer = None
        if slot.copied is not None:
            slot.copied.synchronize()

    def _update(self, slot: StagingSlot, part: ElementRange, lr: float, scale: Tensor | None) -> None:
        """Update one range. Only the last range of a shard advances its step count; other ranges use a copy of it."""
        shard, state = part.shard, self.states[part.shard.name]
        value, gradient = part.of(shard.value), part.gradient()
        dtype = value.dtype
        gradient = scaled(gradient, dtype, scale) if in_host_memory(gradient) else slot.take(GRADIENT, value)
        own = {k: part.of(state[k]) if self.file is None else slot.take(k, value) for k in self.kinds(shard)}
        if not in_host_memory(value):
            value = slot.take(VALUE, value)
        own[STEP] = state[STEP] if part.is_last else state[STEP].clone()
        self.rules[shard.name].update([value], [gradient], [own], lr, decays=shard.decays)
        if part.is_last:
            shard.grad = None


def in_host_memory(tensor: Tensor) -> bool:
    """Return whether `tensor` is on the CPU and is updated in place; tensors on a GPU are staged."""
    return tensor.device.type == "cpu"


def scaled(gradient: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return the gradient in `dtype`, times `scale`."""
    gradient = gradient.to(dtype)
    return gradient if scale is None else gradient * scale.to(gradient.device)


class MomentFile:
    """The moments of one rank in one raw file, zeros at first.

    For each of `values` and each of its `kinds` of state, the file has a block that starts at a multiple of the page
    size. The file has no name in its folder, so a killed process leaves no file that could be mistaken for a saved
    state. The constructor reserves the whole size and raises ResourceError if the disk has no room.
    """

    def __init__(self, folder: Path, values: Mapping[str, Tensor], kinds: Mapping[str, Sequence[str]]):
        self.folder, self.values = folder, values
        self.positions: dict[tuple[str, str], int] = {}
        size = 0
        for name, value in values.items():
            for kind in kinds[name]:
                self.positions[name, kind] = size
                size += -(-value.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size_bytes = max(size, mmap.PAGESIZE)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  (closed by close)
            os.posix_fallocate(self.file.fileno(), 0, self.size_bytes)
        except OSError as error:
            raise ResourceError(
                "E-OFFLOAD-SPACE",
                f"{folder} has no room for {self.size_bytes / 2**30:.2f} GiB of optimizer state: {error.strerror}",
                rule="offload to files reserves 8 bytes per parameter of the rank (16 in float64) at the start",
                fix="free space on this disk, set another parallel.offload_folder, or use more ranks",
                folder=str(folder),
                size_bytes=self.size_bytes,
            ) from error
        self.map = mmap.mmap(self.file.fileno(), self.size_bytes)

    def __str__(self) -> str:
        return f"the file of moments in {self.folder}"

    def tensor(self, name: str, kind: str) -> Tensor:
        """Return a block as a mapped tensor. Its pages belong to the system's file cache, not to this process."""
        value = self.values[name]
        position = self.positions[name, kind]
        return torch.frombuffer(self.map, dtype=value.dtype, count=value.numel(), offset=position).view(value.shape)

    def read(self, name: str, kind: str, start: int, into: Tensor) -> None:
        """Fill `into`, contiguous and in host memory, with the elements of a block, beginning at element `start`."""
        view, position = self._bytes(into), self._position(name, kind, start)
        try:
            while view:
                count = os.preadv(self.file.fileno(), [view], position)
                if not count:
                    raise OSError(0, "the file ends early")
                view, position = view[count:], position + count
        except OSError as error:
            raise self._failed("read", error) from error

    def write(self, name: str, kind: str, start: int, elements: Tensor) -> None:
        """Write `elements`, contiguous and in host memory, to a block, beginning at element `start`."""
        view, position = self._bytes(elements), self._position(name, kind, start)
        try:
            while view:
                count = os.pwrite(self.file.fileno(), view, position)
                view, position = view[count:], position + count
        except OSError as error:
            raise self._failed("written", error) from error

    def release_pages(self) -> None:
        """Free the memory of pages that were read through `tensor`. Everything written stays in the file."""
        self.map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Close the file. The disk space is freed only after the last tensor mapped from it is gone."""
        self.file.close()
        del self.map

    def _position(self, name: str, kind: str, start: int) -> int:
        return self.positions[name, kind] + start * self.values[name].itemsize

    def _bytes(self, tensor: Tensor) -> memoryview:
        return tensor.numpy().data.cast("B")

    def _failed(self, action: str, error: OSError) -> ResourceError:
        return ResourceError(
            "E-OFFLOAD-FILE",
            f"{self} could not be {action}: {error.strerror}",
            rule="the disk with the optimizer state works and has free space",
            fix="free space or set another parallel.offload_folder, then run `ingot train` again: the run continues "
            "from its newest checkpoint",
            folder=str(self.folder),
            action=action,
        )
