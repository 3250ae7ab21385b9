"""The order of a step on one rank as text: the parts that its device computes, and the exchanges next to them.

Nothing is drawn by hand. A rank of the real program is traced on fake tensors (rehearse/dryrun), and each exchange is
drawn from the place where it is issued to the place where the computation waits for it. Columns have no length in time.
"""

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ingot.rehearse.dryrun import role
from ingot.rehearse.dryrun.dry_run import grid_of
from ingot.rehearse.dryrun.rendezvous import IRECV, ISEND, SENT, WAIT, Call
from ingot.rehearse.dryrun.stand_ins import replaced
from ingot.rehearse.dryrun.tracker import Event, Tracker
from ingot.schema.arch import Arch, Moe
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.trainer.parallel.zero import Zero
from ingot.trainer.torch_private import waits_of_fsdp

SYMBOLS = {
    "all_gather": "G", "reduce_scatter": "S", "all_reduce": "R", "all_to_all": "A", "broadcast": "C",
    ISEND: ">", IRECV: "<", "send": ">", "recv": "<",
}  # fmt: skip
_DENSE = Arch(vocab_size=1024, d_model=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, d_ffn=512)
_DEEPER = replace(_DENSE, num_layers=3)
_SPARSE = replace(_DENSE, moe=Moe(num_experts=4, top_k=2, d_expert=128, shared_experts=1))


@dataclass(frozen=True)
class StreamCase:
    """A layout to draw. ranks: those that are drawn."""

    title: str
    layout: dict[str, Any]
    arch: Arch = _DENSE
    micro_batches: int = 1
    ranks: tuple[int, ...] = (0,)

    @property
    def run(self) -> RunConfig:
        parallel = Parallel(**self.layout)
        batch = self.micro_batches * parallel.data_ranks
        train = Train(steps=1, seq_len=512, global_batch=batch, micro_batch=1)
        return RunConfig(name="drawn", model=self.arch, data=Data(tokens=""), train=train, parallel=parallel)


CASES = {
    "dp": StreamCase(
        "ZeRO-1: whole parameters, divided optimizer state", {"dp_shard": 2, "zero": 1, "unit_layers": 1}, _DEEPER
    ),
    "fsdp": StreamCase("ZeRO-3 (FSDP2): divided parameters", {"dp_shard": 2, "zero": 3, "unit_layers": 1}, _DEEPER),
    "tp": StreamCase("tensor parallelism with sequences", {"tp": 2}),
    "pp": StreamCase(
        "a pipeline of two ranks, 1F1B, four micro-batches", {"pp": 2}, micro_batches=4, ranks=(0, 1)
    ),
    "cp": StreamCase("context parallelism, a ring of two", {"cp": 2, "context": "ring"}),
    "ep": StreamCase("experts divided among two ranks", {"dp_shard": 2, "ep": 2, "zero": 1}, _SPARSE),
}  # fmt: skip


class Picture:
    """The rows of a picture while events are read. Columns are parts of the computation and waits."""

    def __init__(self) -> None:
        self.computes: list[str] = []
        self.rows: dict[str, dict[int, str]] = {}
        self._new = True  # the next computation begins a column
        self._open: dict[str, deque[tuple[str, str, int]]] = {}  # kind of wait -> exchanges: row, symbol, first column

    def compute(self, part: str) -> None:
        if self._new or self.computes[-1] != part:
            self.computes.append(part)
        self._new = False

    def begin(self, row: str, symbol: str, kind: str) -> None:
        self._new = True
        self._open.setdefault(kind, deque()).append((row, symbol, len(self.computes)))

    def end(self, kind: str) -> None:
        """The computation waits for the oldest exchange of this kind, if there is one."""
        if not (waiting := self._open.get(kind)):
            return
        row, symbol, first = waiting.popleft()
        self._new = True
        if first == len(self.computes):  # nothing was computed since it began
            self.computes.append("")
        for column in range(first, len(self.computes)):
            cells = self.rows.setdefault(row, {})
            cells[column] = cells.get(column, "") + symbol

    def end_all(self, kind: str) -> None:
        while self._open.get(kind):
            self.end(kind)

    def finish(self) -> None:
        for kind in list(self._open):
            self.end_all(kind)

    def text(self, width: int = 110) -> str:
        cells = [("computes", dict(enumerate(self.computes))), *sorted(self.rows.items())]
        sizes = [max(len(row.get(c, "")) for _, row in cells) for c in range(len(self.computes))]
        margin = max(len(name) for name, _ in cells) + 1
        blocks, column = [], 0
        while column < len(sizes):
            until, used = column, margin
            while until < len(sizes) and used + sizes[until] + 1 <= width:
                used += sizes[until] + 1
                until += 1
            lines = [
                name.ljust(margin) + " ".join(row.get(c, "").ljust(sizes[c], ".") for c in range(column, until))
                for name, row in cells
            ]
            blocks.append("\n".join(lines))
            column = until
        return "\n\n".join(blocks)


def part_of(place: str) -> str:
    """Return the short name of a place: F0 and B0 are the forward and backward of block 0, L is the loss."""
    way, _, module = place.partition(" ")
    if module.startswith("blocks."):
        return way[0].upper() + module.removeprefix("blocks.")
    return {"embed": way[0].upper() + "e", "norm": "L", "readout": "L"}.get(module, place)


def draw(events: Sequence[Event], axes: Mapping[tuple[int, ...], str], *, experts: bool = False) -> str:
    """Return the picture of a step. axes: ranks of a group -> its axis. experts: an all-to-all is that of ep."""
    picture = Picture()
    for number, event in enumerate(events):
        call = event.call
        if event.what == "compute":
            picture.compute(part_of(event.place))
        elif event.what == "mark":
            picture.compute(event.name)
        elif event.what == "wait" and event.name == "every reduce_scatter":
            picture.end_all("reduce_scatter")
        elif event.what == "wait":
            picture.end(event.name)
        elif call is not None and call.op in (SENT, WAIT):
            picture.end(_message(call))
        elif call is not None:
            follows = events[number + 1] if number + 1 < len(events) else None
            row = "ep" if experts and call.op == "all_to_all" else axes[call.group] or "all ranks"
            picture.begin(row, SYMBOLS[call.op], kind := _kind(call, axes))
            if call.op == "all_reduce" and (follows is None or follows.what != "wait"):
                picture.end(kind)  # the call itself waits
    picture.finish()
    return picture.text()


def _kind(call: Call, axes: Mapping[tuple[int, ...], str]) -> str:
    """Return the kind of wait that ends an exchange: `wait_tensor` for operators that return a new tensor."""
    if call.op in (ISEND, IRECV):
        return _message(call)
    returns = axes[call.group] == "tp" or call.op in ("all_to_all", "all_reduce")
    return "wait_tensor" if returns else call.op


def _message(call: Call) -> str:
    return f"{'send' if call.op in (ISEND, SENT) else 'receive'} {call.channel} {call.peer}"


class WatchedTracker(Tracker):
    """A tracker that also records the update, and waits for exchanges in place, which pass no dispatcher."""

    made: ClassVar["list[WatchedTracker]"] = []

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.made.append(self)

    @contextmanager
    def within(self, kind: str | None = None, place: str = "") -> Iterator[None]:
        if place == "update":
            self.events.append(Event("mark", "U", place))
        with super().within(kind, place):
            yield

    def waits(self, kind: str) -> None:
        self.events.append(Event("wait", kind, self.place))


def _waiting(owner: type, name: str, kind: str, waits: Callable[..., bool]):
    """Replace a method by one that first records a wait, if `waits` of its arguments is true."""
    original = getattr(owner, name)

    def method(*args, **settings):
        if waits(*args):
            WatchedTracker.made[-1].waits(kind)
        return original(*args, **settings)

    return replaced(owner, name, method)


def traced(case: StreamCase, rank: int) -> str:
    """Return the picture of one rank. Torch's default process group must not exist."""
    unit, (unshard, reduce, end) = waits_of_fsdp()
    in_flight = "_all_gather_result"
    with (
        replaced(role, "Tracker", WatchedTracker),
        _waiting(Zero, "_before_forward", "all_gather", lambda _, bucket: bucket.gathering is not None),
        _waiting(Zero, "_finish_scatter", "reduce_scatter", lambda zero: zero._scattering is not None),
        _waiting(unit, unshard, "all_gather", lambda group: getattr(group, in_flight) is not None),
        _waiting(unit, reduce, "reduce_scatter", lambda group: True),
        _waiting(unit, end, "every reduce_scatter", lambda group: True),
    ):
        tracker = role.trace_rank(case.run, rank, "cuda")
    names = {group: "+".join(grid_of(case.run).axes(group)) for group in {call.group for call in tracker.calls}}
    return draw(tracker.events_of(role.STEADY), names, experts=case.run.parallel.ep > 1)


def pictures() -> dict[str, list[str]]:
    """Return the pictures of each case, one per drawn rank."""
    return {name: [traced(case, rank) for rank in case.ranks] for name, case in CASES.items()}


if __name__ == "__main__":
    json.dump(pictures(), sys.stdout)
