"""Gradients that two ranks compute: in chosen steps, a rank computes the part of the batch of another data rank too.

It does so before its own part, with the same weights, and reduces nothing. Both ranks hash the gradients just before
they would be reduced (parallel/unreduced.py), and compare the hashes at the next log line. On one kind of hardware,
with kernels that always add in the same order, the bits are equal: a difference shows that one of the ranks computed
wrong, whatever computed it: a gradient, an activation, a weight that only one of them has.

All ranks of a copy of the model compute the same other part at the same time, so their collectives match. With experts,
tokens cross the ranks of an expert group: whole groups compute the parts of another group, rank by rank.

While steps are trained again because of damage (verdict.py), every step is computed by a third rank as well, if there
is one: of three, the one that differs is damaged. Of two it is the one that differs from what it computed the first
time.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ingot.errors import RunFailed
from ingot.rng import derive
from ingot.trainer.integrity.hashing import BufferHasher, locate, multipliers
from ingot.trainer.integrity.verdict import NOTHING, Damage, Suspicion, Trust, doubted, explained
from ingot.trainer.mesh.collectives import largest_of_ranks, start_gather
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.pipeline import MicroBatches, PipelineExecutor
from ingot.trainer.parallel.unreduced import ReadableGradients

_REMEMBERED = 4096  # steps whose hashes are kept, to compare them when the steps are trained again
# (step, data rank) -> the part of the batch of this step that belongs to the data rank
ReadPart = Callable[[int, int], MicroBatches]


@dataclass(frozen=True)
class _Recomputed:
    """The hashes of the gradients of one step on this rank, on the device.

    entries: int64 [1 + opinions, exchanges, buffers]: of its own part of the batch, then of parts of other data ranks.
    totals: int64 [1 + opinions], one hash of each. again: of its own part, computed once more; None in most checks.
    """

    step: int
    entries: Tensor
    totals: Tensor
    again: Tensor | None

    @property
    def opinions(self) -> int:
        return len(self.totals) - 1


class RecomputedGradients:
    """The gradients of this rank's part of a batch, and of another's: their hashes, and what follows from them.

    Constructor and methods are collective; all ranks call them at the same points of the same steps. every: one of so
    many steps is chosen, at random by the seed. read: reads a part of a batch. replayed: the damage for which steps are
    trained again; then all steps up to it are chosen. suspects_damage: the next step is, too.
    compared_after: the last step that was chosen for that reason; a log line is due after it.
    """

    def __init__(
        self,
        program: PipelineExecutor,
        data: ReadableGradients,
        mesh: Mesh,
        *,
        every: int,
        seed: int,
        read: ReadPart,
        device: torch.device,
    ):
        self.every, self.apart = every, False
        self.suspects_damage, self.compared_after = False, 0
        self.replayed: Damage | None = None
        self._program, self._data, self._seed, self._read_part, self._device = program, data, seed, read, device
        self._line, self._group = mesh.data_line()
        self._link = torch.device(mesh.devices.device_type)
        self._own, self._shift = self._line.index(dist.get_rank()), mesh.parallel.expert_parts
        self._hasher = BufferHasher(device)
        self._factors = torch.from_numpy(multipliers(0, math.prod(data.buffers_read))).to(device)
        self._entries: Tensor | None = None  # of the gradients that are being computed
        self._exchanges: list[int] = []
        self._shapes: dict[int, tuple[int, int]] = {}  # of a buffer: elements, and bytes of an element
        self._open: tuple[int, list[Tensor], Tensor | None] | None = None
        self._pending: list[_Recomputed] = []
        self._rows: Tensor | None = None
        self._compared: list[tuple[_Recomputed, np.ndarray]] = []
        self._totals: dict[int, list[int]] = {}
        self._earlier: dict[int, list[int]] = {}
        self._is_proven = False
        self._varying = 0  # a step in which no rank of this line computed the same bits twice
        data.show_gradients(self)

    # -- in each step, without waiting --

    def is_due(self, step: int) -> bool:
        """Return whether the gradients of `step` are computed twice."""
        is_replayed = self.replayed is not None and step <= self.replayed.step
        return is_replayed or self.suspects_damage or is_chosen(self._seed, step, self.every)

    def recompute(self, step: int, scale: Tensor | None) -> None:
        """Compute the gradients of other data ranks, if it is due. Call before the step's own. scale: of the
        loss."""
        self._open = self._entries = None
        if not self.is_due(step):
            return
        with unnoticed(self._program.stages, self._device):
            again = None if self._is_proven else self._apart(step, self._own, scale)
            others = [self._apart(step, part, scale) for part in self._parts()]
        self._open, self._is_proven = (step, others, again), True
        self.compared_after, self.suspects_damage = step if self.suspects_damage else 0, False
        self._begin()

    def reduced(self, step: int) -> None:
        """Take in that the step's own gradients were reduced."""
        if self._open is None or self._open[0] != step:
            return
        (_, others, again), self._open = self._open, None
        entries = torch.stack([self._end(), *others])
        totals = (entries.flatten(1) * self._factors).sum(1)
        self._pending.append(_Recomputed(step, entries, totals, None if again is None else self._total(again)))

    def _parts(self) -> list[int]:
        """Return the data ranks whose parts this rank computes, besides its own."""
        groups = len(self._line) // self._shift
        opinions = min(2 if self.replayed is not None else 1, groups - 1)
        return [(self._own + (number + 1) * self._shift) % len(self._line) for number in range(opinions)]

    def _apart(self, step: int, part: int, scale: Tensor | None) -> Tensor:
        """Compute the gradients of data rank `part`, and return their hashes; the gradients are dropped."""
        batch, self.apart = self._read_part(step, part), True
        self._begin()
        try:
            self._program.train(batch, scale, part)
            self._data.drop_gradients()
        finally:
            self.apart = False
        return self._end()

    def _begin(self) -> None:
        exchanges, buffers = self._data.buffers_read
        self._entries = torch.zeros(exchanges, buffers, dtype=torch.int64, device=self._device)
        self._exchanges = [0] * buffers

    def _end(self) -> Tensor:
        assert self._entries is not None
        entries, self._entries = self._entries, None
        return entries

    def take(self, number: int, gradients: Tensor) -> None:
        """Hash the gradients of buffer `number`, if they are of a step that was chosen."""
        if self._entries is None:
            return
        self._entries[self._exchanges[number], number] = self._hasher.hash(gradients)
        self._exchanges[number] += 1
        self._shapes[number] = gradients.numel(), gradients.itemsize

    def _total(self, entries: Tensor) -> Tensor:
        return (entries.flatten() * self._factors).sum()

    # -- at a log line --

    def compare(self) -> list[Tensor]:
        """Exchange the hashes since the last call. Returns scalars, true if something differs. Does not wait."""
        if not self._pending:
            return []
        own, flags = torch.zeros(len(self._pending), 4, dtype=torch.int64, device=self._device), []
        for row, check in zip(own, self._pending, strict=True):
            row[: len(check.totals)] = check.totals
            row[-1] = check.totals[0] if check.again is None else check.again
        self._rows = rows = self._exchange(own)
        for at, check in enumerate(self._pending):
            for number in range(1, check.opinions + 1):
                flags.append((rows[:, at, number].roll(number * self._shift) != rows[:, at, 0]).any())
        return [*flags, (rows[..., -1] != rows[..., 0]).any()]

    def read(self) -> None:
        """Take in that the host has waited for the device."""
        if self._rows is None:
            return
        each = self._rows.cpu().numpy().swapaxes(0, 1)
        self._compared = list(zip(self._pending, each, strict=True))
        self._pending, self._rows = [], None
        for check, rows in self._compared:
            if (rows[:, -1] != rows[:, 0]).all():
                self._varying = self._varying or check.step
            self._totals[check.step] = rows[self._own, : check.opinions + 1].tolist()
        for step in list(self._totals)[:-_REMEMBERED]:
            del self._totals[step]

    # -- after a difference --

    def suspicion(self) -> Suspicion:
        """Return what the checks that were read last say of this rank. Raises RunFailed, on all ranks, if no rank of a
        line computes the same bits twice. Collective over the world."""
        if step := int(largest_of_ranks(self._varying)[0]):
            raise _not_repeatable(step)
        doubts, first, first_part = [], None, 0
        for check, rows in self._compared:
            for part, found in self._doubts(check, rows):
                doubts.append(found)
                first, first_part = (first, first_part) if first is not None else (check, part)
        self._compared = []
        if first is None:
            return NOTHING
        names = self._difference(first, first_part)
        ranks, are_sure = explained(doubts)
        if self._own not in ranks:
            return NOTHING
        return Suspicion(trust=Trust.RECOMPUTED_ALONE if are_sure else Trust.RECOMPUTED, step=first.step, **names)

    def _doubts(self, check: _Recomputed, rows: np.ndarray) -> list[tuple[int, frozenset[int]]]:
        """Return (data rank, the data ranks of which one computed its part wrong) for each part with a difference."""
        found = [
            (part, doubted(self._opinions(part, rows[:, : check.opinions + 1]))) for part in range(len(self._line))
        ]
        found += [(part, frozenset({part})) for part in np.flatnonzero(rows[:, -1] != rows[:, 0]).tolist()]
        found = [(part, ranks) for part, ranks in found if ranks]
        earlier = self._earlier.get(check.step) if self.replayed is not None else None
        if earlier is not None and any(len(ranks) > 1 for _, ranks in found):
            both = min(len(earlier), check.opinions + 1)
            before = self._exchange(torch.tensor(earlier[:both])).cpu().numpy()
            found = [(part, self._changed_of(part, ranks, before, rows[:, :both])) for part, ranks in found]
        return found

    def _changed_of(self, part: int, ranks: frozenset[int], before: np.ndarray, now: np.ndarray) -> frozenset[int]:
        """Return those of `ranks` that computed other gradients of `part` the first time, or all of them."""
        then = self._opinions(part, before)
        changed = (rank for rank, value in self._opinions(part, now).items() if rank in ranks and value != then[rank])
        return frozenset(changed) or ranks

    def _opinions(self, part: int, rows: np.ndarray) -> Mapping[int, int]:
        """Return the data ranks that computed this part of the batch, and their hashes. rows: [ranks, 1 + opinions]."""
        each = [((part - number * self._shift) % len(self._line), number) for number in range(rows.shape[1])]
        return {rank: int(rows[rank, number]) for rank, number in each}

    def _difference(self, check: _Recomputed, part: int) -> dict[str, Any]:
        """Return where the gradients of `part` differ: the name of a tensor, its element and the bit. Collective over
        the ranks that differ in their part of the batch."""
        rows = self._exchange(check.entries)  # [ranks, 1 + opinions, exchanges, buffers]
        each = [rows[(part - number * self._shift) % len(self._line), number].cpu() for number in range(rows.shape[1])]
        for other in each[1:]:
            for exchange, number in torch.nonzero(other != each[0]).tolist():
                elements, itemsize = self._shapes[number]
                flip = locate(elements, itemsize, int(other[exchange, number]) - int(each[0][exchange, number]))
                name, element = self._data.name_of(number, flip.element if flip else 0)
                place = {"element": element, "bit": flip.bit} if flip else {}
                return {"tensor": f"gradient of model.{name}", **place}
        return {}

    def changed(self) -> bool:
        """Return whether this rank computed other gradients at the step of the damage when it was trained again."""
        if self.replayed is None or not self.replayed.of_gradients:
            return False
        then, now = (totals.get(self.replayed.step, []) for totals in (self._earlier, self._totals))
        return any(a != b for a, b in zip(then, now, strict=False))

    def forget(self) -> None:
        """Take in that the state was replaced: the steps since then are trained again."""
        self._pending, self._open = [], None
        self.suspects_damage, self.compared_after = False, 0
        if self._totals:
            self._earlier, self._totals = self._totals, {}

    def _exchange(self, values: Tensor) -> Tensor:
        """Return the int64 `values` of all ranks of the line, [ranks, *shape]."""
        whole = torch.empty((len(self._line), *values.shape), dtype=torch.int64, device=self._link)
        start_gather(whole, values.to(self._link).contiguous(), self._group).wait()
        return whole


def is_chosen(seed: int, step: int, every: int) -> bool:
    """Return whether `step` is chosen: of the steps 1..every, every+1..2 every, and so on, one each."""
    block, place = divmod(step - 1, every)
    return place == derive(seed, "recompute", block) % every


@contextlib.contextmanager
def unnoticed(stages: Mapping[int, nn.Module], device: torch.device) -> Iterator[None]:
    """Keep from the run what a forward and a backward change besides gradients: counts of routers, sums of loss terms,
    and the states of random generators."""
    modules = [module for stage in stages.values() for module in stage.modules()]
    routers: list[Any] = [module for module in modules if hasattr(module, "seen")]
    terms: list[Any] = [term for module in modules for term in getattr(module, "terms", ())]
    sums = [term.sums for term in terms]
    for term in terms:
        term.sums = None  # they are added to in place
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for router in routers:
        router.seen = None
    for term, own in zip(terms, sums, strict=True):
        term.sums = own


def _not_repeatable(step: int) -> RunFailed:
    return RunFailed(
        "E-GRADIENTS-VARY",
        f"at step {step}, every rank computed its own gradients twice, and found other bits the second time",
        rule="gradients can be compared between ranks only if their kernels always add in the same order "
        "(guard.recompute_every)",
        fix="set guard.recompute_every = 0, or use kernels and plug-ins without random numbers and atomic additions",
        step=step,
    )
