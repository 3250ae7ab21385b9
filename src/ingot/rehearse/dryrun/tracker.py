"""A tracker of a program's operations: memory by kind, communication, FLOPs, and their order.

A TorchDispatchMode receives every operation below autograd, including those of the backward. With fake tensors, the
tracker records a rank of a large cluster on a laptop; it works the same way with real CPU tensors. Memory is that of
the tensors' storages, rounded up to 512 bytes as caching allocators do, without fragmentation and kernel workspaces.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from ingot.rehearse.dryrun.calls import call_of, collective_tensors
from ingot.rehearse.dryrun.fake import FakeProgram
from ingot.rehearse.dryrun.operators import operator_of
from ingot.rehearse.dryrun.rendezvous import IRECV, ISEND, RECV, SEND, SENT, WAIT, Call
from ingot.trainer.torch_private import FakeTensor, TraceMode, operator_packet, storage_key, tree_leaves

ROUNDING_BYTES = 512
# Kinds of memory, by the purpose of a tensor. `label` may set the kind after the tensor was made.
KINDS = ("parameters", "gradients", "optimizer", "activations", "communication", "logits", "backward", "other")
LASTING = ("parameters", "gradients", "optimizer")
HOST = "host"  # the kind of offloaded tensors, which are not part of a peak and reported separately


@dataclass(frozen=True, slots=True)
class Event:
    """An issued operation. what: "compute" (an operation with FLOPs), "call" (a collective, send or receive), "wait"
    (a wait for a collective) or "mark". name: the name of the operation, or the text of the mark. place: the part of
    the program.
    """

    what: str
    name: str
    place: str
    call: Call | None = None


@dataclass(frozen=True)
class TrackedPeak:
    """The peak memory of a phase. by_kind: bytes at the peak by kind. place: the part of the program that reaches the
    peak. rest: bytes held at the end of the phase.
    """

    bytes: int
    by_kind: dict[str, int]
    place: str
    rest: int


class _Held(weakref.ref):
    """A weak reference that notifies the tracker when a storage is freed. number: index of the storage in the tracker;
    key: identity of the storage while it is alive.
    """

    __slots__ = ("key", "number")


class Tracker(TraceMode):
    """A context that records operations. Inside the context, the caller names phases (`begin`), kinds of memory and
    places (`within`).

    events: the issued operations in order. flops: FLOPs by operation. calls: the collectives of this rank in order, for
    rendezvous.py. groups: the process groups of this rank as (name, purpose, ranks), if the caller lists them. moments:
    the phases as (name, index of the first entry in the memory log). fakes: the surrounding mode of fake tensors, if
    any, whose cache makes the tracker fast.
    """

    def __init__(self, fakes: FakeProgram | None = None):
        super().__init__()
        self._fakes, self._call = fakes, _call if fakes is None else fakes.call
        self._flops_of: dict[tuple, int] = {}
        self.events: list[Event] = []
        self.flops: Counter[str] = Counter()
        self.operations = 0
        self.groups: list[tuple[str, str, tuple[int, ...]]] = []
        self.moments: list[tuple[str, int]] = []
        self._events_at: list[int] = []
        self._flops_at: list[Counter[str]] = []
        self._operations_at: list[int] = []
        self.kind: str | None = None
        self.place = ""
        self._backward = False
        self._live: dict[int, _Held] = {}
        self._kinds: list[str] = []
        self._held_bytes: list[int] = []
        self._log: list[tuple[int, int, str]] = []  # storage number, change in bytes, place
        self._messages: Counter[tuple] = Counter()  # number of messages by direction, group, channel and peer
        self._posting: list[Call] | None = None  # inside isend or irecv: the waits that belong to its messages
        self._in_batch = 0  # position in a batch of messages, from 1; 0 outside a batch
        self._replaced: list[tuple[Any, str, Any]] = []

    # -- phases, kinds and places, set by the caller
    # ------------------------------------------------------------------------

    def begin(self, moment: str) -> None:
        """Start the phase `moment`. Total FLOPs and events keep counting over all phases."""
        self.moments.append((moment, len(self._log)))
        self._events_at.append(len(self.events))
        self._flops_at.append(self.flops.copy())
        self._operations_at.append(self.operations)

    @contextmanager
    def within(self, kind: str | None = None, place: str = "") -> Iterator[None]:
        """Set the kind of memory that is allocated inside the context, and the place of operations. Empty arguments
        keep the present values.
        """
        before = self.kind, self.place
        self.kind, self.place = kind or self.kind, place or self.place
        try:
            yield
        finally:
            self.kind, self.place = before

    def put_aside(self) -> Callable[[], None]:
        """Give up the place of the computation that runs, as one of two that take turns, and return the function that
        sets it again."""
        held = self.kind, self.place, self._backward
        self._backward = False

        def restore() -> None:
            self.kind, self.place, self._backward = held

        return restore

    def mark(self, text: str) -> None:
        self.events.append(Event("mark", text, self.place))

    def label(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Set the kind of these tensors, including their past entries in the memory log. The tensors may have been made
        outside the context.
        """
        for tensor in tensors:
            if tensor is not None and (number := self._hold(tensor)) is not None:
                self._kinds[number] = kind

    # -- results -------------------------------------------------------------------------------------------------

    @property
    def calls(self) -> list[Call]:
        return [event.call for event in self.events if event.call is not None]

    def events_of(self, moment: str) -> list[Event]:
        """Return the events of the first phase named `moment`."""
        number = [name for name, _ in self.moments].index(moment)
        return self.events[self._events_at[number] : [*self._events_at, len(self.events)][number + 1]]

    def flops_of(self, moment: str) -> Counter[str]:
        number = [name for name, _ in self.moments].index(moment)
        return [*self._flops_at, self.flops][number + 1] - self._flops_at[number]

    def operations_of(self, moment: str) -> int:
        """Return how many operations of the first phase named `moment` a device works for, collectives left out."""
        number = [name for name, _ in self.moments].index(moment)
        return [*self._operations_at, self.operations][number + 1] - self._operations_at[number]

    def peaks(self) -> dict[str, TrackedPeak]:
        """Return the peak of each phase. A repeated phase has its largest peak, and the rest at its last end."""
        held: Counter[str] = Counter()
        found: dict[str, TrackedPeak] = {}
        stops = [start for _, start in self.moments[1:]] + [len(self._log)]
        self._replay(0, self.moments[0][1], held)
        for (moment, start), stop in zip(self.moments, stops, strict=True):
            peak = self._replay(start, stop, held)
            before = found.get(moment, peak)
            found[moment] = replace(max(before, peak, key=lambda p: p.bytes), rest=peak.rest)
        return found

    def _replay(self, start: int, stop: int, held: Counter[str]) -> TrackedPeak:
        """Return the peak in the entries start..stop-1 of the memory log, and advance `held` (bytes by kind) to the end
        of this part.
        """
        total = top = sum(held.values()) - held[HOST]
        by_kind, at = dict(held), "at the beginning"
        for number, more, place in self._log[start:stop]:
            held[self._kinds[number]] += more
            if self._kinds[number] != HOST:
                total += more
            if total > top:
                top, by_kind, at = total, dict(held), place
        return TrackedPeak(top, {kind: size for kind, size in by_kind.items() if size}, at, total)

    # -- interception of operations
    # ----------------------------------------------------------------------------------------------

    def __enter__(self):
        self._replace(torch.autograd, "backward", self._in_backward(torch.autograd.backward))
        # FSDP2 frees gathered parameters by shrinking their storage to nothing.
        self._replace(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_))
        for name in ("isend", "irecv"):
            posting = self._posted(getattr(distributed_c10d, name))
            self._replace(distributed_c10d, name, posting)
            self._replace(torch.distributed, name, posting)
        batching = self._batched(distributed_c10d.batch_isend_irecv)
        self._replace(distributed_c10d, "batch_isend_irecv", batching)
        self._replace(torch.distributed, "batch_isend_irecv", batching)
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Record the operations of this thread as well, while the tracker is open in another thread."""
        with nullcontext() if self._fakes is None else self._fakes:
            super().__enter__()
            try:
                yield
            finally:
                super().__exit__(None, None, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device  # a short cut: this is queried twice per operation, and dispatching is slow
        if DTensor in types:
            return NotImplemented  # a DTensor first decomposes into local operations
        result = self._call(func, args, kwargs or {})
        operator = operator_of(func)
        if operator.is_collective:
            self._communicated(func, args, kwargs or {}, result)
        elif (formula := operator.flops) is not None:
            self.operations += 1
            self.flops[operator.name] += self._count(formula, args, kwargs or {}, result)
            self.events.append(Event("compute", operator.name, self.place))
        elif operator.is_view:
            # The memory of a view was recorded when it was allocated, or is that of Gloo's own copies (shown as views).
            return result
        else:
            self.operations += operator.starts
        if isinstance(result, Tensor):
            self._hold(result)
        elif isinstance(result, (tuple, list)):
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._hold(tensor)
        return result

    def _count(self, formula, args, kwargs, result) -> int:
        """Return the FLOPs of an operation, cached by the shapes and values of its arguments."""
        key = (formula, *[arg.shape if isinstance(arg, Tensor) else repr(arg) for arg in (*args, *kwargs.values())])
        if key not in self._flops_of:
            self._flops_of[key] = formula(*args, **kwargs, out_val=result)
        return self._flops_of[key]

    def _communicated(self, func, args, kwargs, result) -> None:
        call = call_of(func, args, kwargs, result, self.place)
        if call is None:
            self.events.append(Event("wait", operator_packet(func).__name__, self.place))
            return
        if call.op in (SEND, RECV):
            way = call.op, call.group, call.channel, call.peer
            if self._posting is not None:
                posted, done = (ISEND, SENT) if call.op == SEND else (IRECV, WAIT)
                self._posting.append(replace(call, op=done, ticket=self._messages[way]))
                call = replace(call, op=posted, joined=self._in_batch > 1)
                self._in_batch += self._in_batch > 0
            self._messages[way] += 1
        self.events.append(Event("call", call.op, self.place, call))
        # Buffers of in-place collectives count as communication memory, unless they are parameters, gradients or state.
        for tensor in collective_tensors(func, args):
            number = self._hold(tensor)
            if number is not None and self._kinds[number] in ("activations", "backward", "other"):
                self._kinds[number] = "communication"

    def _hold(self, tensor: Tensor) -> int | None:
        """Return the index of the tensor's storage, and track the storage from now on. None for a tensor on the meta
        device, which has no memory.
        """
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if (held := self._live.get(key)) is not None:
            return held.number
        if type(tensor) is not FakeTensor and tensor.is_meta:
            return None
        held = _Held(storage, self._died)
        held.key, held.number = key, len(self._kinds)
        self._live[key] = held
        self._kinds.append(self._kind_now())
        self._held_bytes.append(0)
        self._resized(held.number, storage.nbytes())
        return held.number

    def _kind_now(self) -> str:
        if self.kind is not None:
            return self.kind
        # Gradients are enabled during the backward only while activations are recomputed.
        return "backward" if self._backward and not torch.is_grad_enabled() else "activations"

    def _resized(self, number: int, size: int) -> None:
        rounded = -(-size // ROUNDING_BYTES) * ROUNDING_BYTES
        if more := rounded - self._held_bytes[number]:
            self._held_bytes[number] = rounded
            self._log.append((number, more, self.place))

    def _died(self, held: _Held) -> None:
        if self._live.get(held.key) is held:
            del self._live[held.key]
        self._resized(held.number, 0)

    def _in_backward(self, original: Callable) -> Callable:
        def backward(*args, **kwargs):
            before, self._backward = self._backward, True
            try:
                return original(*args, **kwargs)
            finally:
                self._backward = before

        return backward

    def _resizing(self, original: Callable) -> Callable:
        def resize_(storage, size):
            result = original(storage, size)
            if (held := self._live.get(storage_key(storage))) is not None:
                if self._kinds[held.number] not in LASTING:
                    self._kinds[held.number] = "communication"
                self._resized(held.number, size)
            return result

        return resize_

    def _posted(self, original: Callable) -> Callable:
        """Wrap isend or irecv so that the wait for the message, which can block the rank, is recorded too."""

        def post(*args, **kwargs):
            self._posting = []
            try:
                work = original(*args, **kwargs)
                return work and _Awaited(work, [self._waited(call) for call in self._posting])
            finally:
                self._posting = None

        return post

    def _batched(self, original: Callable) -> Callable:
        def batch_isend_irecv(messages):
            self._in_batch = 1
            try:
                return original(messages)
            finally:
                self._in_batch = 0

        return batch_isend_irecv

    def _waited(self, call: Call) -> Callable[[], None]:
        return lambda: self.events.append(Event("call", call.op, self.place, replace(call, label=self.place)))

    def _replace(self, owner, name: str, new) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)


class _Awaited:
    """A work handle whose first wait is recorded."""

    def __init__(self, work: Any, waited: list[Callable[[], None]]):
        self._work, self._on_wait = work, waited

    def wait(self, *args, **kwargs) -> Any:
        while self._on_wait:
            self._on_wait.pop()()
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _call(func, args, kwargs) -> Any:
    return func(*args, **kwargs)


_DEVICE_OF = torch.ops.prim.device.default
