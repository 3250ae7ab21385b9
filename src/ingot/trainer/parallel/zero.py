"""Data parallelism with whole parameters on every rank: DDP, ZeRO-1 and ZeRO-2 (Rajbhandari et al. 2020).

                parameters   gradients     master and moments     reduced
    DDP         whole        whole         whole                  once per step, all-reduce
    ZeRO-1      whole        whole         own rows               once per step, reduce-scatter
    ZeRO-2      whole        own rows      own rows               every micro-batch, reduce-scatter

Whole parameters are in the compute dtype, master and moments in float32 (the master is the parameter itself where both
dtypes are the same), gradients in the dtype of `parallel.grads`. The gradients of a unit lie in one buffer of shape
[ranks, elements of one rank's rows], so one collective moves them; those of its experts, which other ranks share, lie
in another one. A unit is reduced as soon as its backward is done, while earlier layers still compute; after the update
it is gathered while the units before it already run forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.trainer.mesh.exchange import start_all_sum, start_gather, start_scatter_sum
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.canonical import Tree
from ingot.trainer.parallel.piece import Piece
from ingot.trainer.parallel.tensor import Cut
from ingot.trainer.parallel.units import Unit, cut_units, is_owner, own_rows


@dataclass
class Slot:
    """A parameter's place in the buffer of its unit: columns start..start+length of [ranks, elements]."""

    name: str
    parameter: nn.Parameter
    start: int
    length: int
    piece: Piece
    fresh: bool = True  # nothing was added since the last step


@dataclass(eq=False)
class Bucket:
    """One unit, or its experts. unit: its number in the order of the forward. view: of the mesh: the ranks that share
    it, of which there are `ranks`. whole: gradients of all rows [ranks, elements]; shard: of the own rows [elements].
    """

    unit: int
    view: str
    ranks: int
    slots: list[Slot] = field(default_factory=list)
    elements: int = 0
    waiting: set[str] = field(default_factory=set)  # parameters whose gradient of this micro-batch has not come
    whole: Tensor | None = None
    shard: Tensor | None = None
    gathering: tuple[dist.Work, Tensor] | None = None


class Zero:
    """`stages`: modules with materialised parameters in the compute dtype, values not yet set.

    Set `pieces[..].value` and call `publish` before the first forward.
    """

    def __init__(
        self,
        stages: list[nn.Module],
        cuts: dict[str, Cut],
        mesh: Mesh,
        *,
        zero: int,
        master: torch.dtype,
        grads: torch.dtype,
        micro_batches: int,
    ):
        settings = mesh.parallel
        self.mesh, self.keeps_whole, self.grads, self.master = mesh, zero < 2, grads, master
        self.hold = settings.splits_backward  # weights' gradients of several micro-batches come in turn
        self.prefetch = settings.prefetch
        self.pieces: list[Piece] = []
        self._seen: set[nn.Parameter] = set()  # tied ends of a V-shaped pipeline are one parameter on two stages
        self.buckets: dict[nn.Module, list[Bucket]] = {}
        self.in_order: list[Bucket] = []
        self._scattering: tuple[dist.Work, Bucket, Tensor, Tensor] | None = None
        self._reducing: list[dist.Work] = []
        self._last = False
        self._scatter_is_last = False
        self._to_gather: list[Bucket] = []
        self._units = 0
        for stage in stages:
            units = cut_units(stage, settings.unit_blocks, cuts)
            self.buckets[stage] = [bucket for unit in units for bucket in self._buckets(stage, unit, cuts)]
        self.tree = Tree(mesh, micro_batches) if settings.reduce == "canonical" else None

    # -- layout --

    def _buckets(self, stage: nn.Module, unit: Unit, cuts: dict[str, Cut]) -> list[Bucket]:
        parts = [(unit.names, unit.modules), (unit.expert_names, unit.experts)]
        made = [self._bucket(stage, names, modules[0], cuts) for names, modules in parts if names]
        buckets = [bucket for bucket in made if bucket.slots]
        self._units += bool(buckets)
        self.in_order += buckets
        return buckets

    def _bucket(self, stage: nn.Module, names: Sequence[str], first: nn.Module, cuts: dict[str, Cut]) -> Bucket:
        """first: the module that runs first with these parameters."""
        view = cuts[names[0]].view
        bucket = Bucket(self._units, view, self.mesh.size(view))
        for name in names:
            parameter = stage.get_parameter(name)
            if parameter in self._seen:
                continue
            self._seen.add(parameter)
            length = -(-len(parameter) // bucket.ranks) * parameter[0].numel()
            slot = Slot(name, parameter, bucket.elements, length, self._piece(name, parameter, cuts[name]))
            bucket.slots.append(slot)
            self.pieces.append(slot.piece)
            bucket.elements += length
            parameter.register_post_accumulate_grad_hook(lambda p, b=bucket, s=slot: self._arrived(b, s))
        if bucket.slots:
            first.register_forward_pre_hook(lambda module, args: self._before_forward(bucket))
        return bucket

    def _piece(self, name: str, parameter: nn.Parameter, cut: Cut) -> Piece:
        rows = own_rows(len(parameter), self.mesh.size(cut.view), self.mesh.index(cut.view))
        own = parameter.detach()[rows.start : rows.stop]
        value = own if parameter.dtype == self.master else torch.empty_like(own, dtype=self.master)
        return Piece(
            name=name,
            shape=cut.shape,
            offsets=(cut.offsets[0] + rows.start, *cut.offsets[1:]),
            sizes=tuple(own.shape),
            value=value,
            owner=is_owner(cut, parameter, self.mesh),
        )

    # -- gradients --

    def before_backward(self, stage: nn.Module, last: bool) -> None:
        self._last = last
        if not self.hold:
            for bucket in self.buckets[stage]:
                bucket.waiting = {slot.name for slot in bucket.slots}

    def after_backward(self, stage: nn.Module, last: bool) -> None:
        """What hooks did not send on its way goes now: all of it where they hold, else parameters without gradient."""
        for bucket in reversed(self.buckets[stage]):
            if self.hold or bucket.waiting:
                bucket.waiting = set()
                self._complete(bucket, last)
        if self.tree is not None:
            for bucket in self.buckets[stage]:
                _clear_missing(bucket)
            self.tree.after_micro_batch(stage, [b.whole for b in self.buckets[stage] if b.whole is not None])
            for slot in (slot for bucket in self.buckets[stage] for slot in bucket.slots):
                slot.fresh = slot.fresh or self.tree.between_parts(stage)

    @torch.no_grad()
    def _arrived(self, bucket: Bucket, slot: Slot) -> None:
        """A parameter's gradient of one micro-batch moves into its unit's buffer."""
        gradient = slot.parameter.grad
        slot.parameter.grad = None
        if bucket.whole is None:
            if self._scattering is not None and self._scattering[1] is bucket:
                self._finish_scatter()  # its buffer goes before another one comes
            bucket.whole = torch.zeros(bucket.ranks, bucket.elements, dtype=self.grads, device=slot.parameter.device)
        assert gradient is not None
        flat = gradient.reshape(-1)
        if flat.numel() < bucket.ranks * slot.length:
            flat = F.pad(flat, (0, bucket.ranks * slot.length - flat.numel()))
        target, rows = bucket.whole[:, slot.start : slot.start + slot.length], flat.view(bucket.ranks, slot.length)
        if slot.fresh:
            target.copy_(rows)
        else:
            target.add_(rows)
        slot.fresh = False
        if slot.name in bucket.waiting:
            bucket.waiting.discard(slot.name)
            if not bucket.waiting:
                self._complete(bucket, self._last)

    def _complete(self, bucket: Bucket, last: bool) -> None:
        """All gradients of a unit are there: start what has to be exchanged now."""
        if self.tree is not None:
            return
        if bucket.ranks == 1:
            if last and bucket.whole is not None:
                _clear_missing(bucket)
                self._sum_copies(bucket.whole)
        elif bucket.whole is not None and (last or not self.keeps_whole):
            self._scatter(bucket, last)
        elif last:
            # ZeRO-2, backward in two halves: the last gradients came early and went with those before.
            self._finish_scatter()
            if bucket.shard is not None:
                self._sum_copies(bucket.shard)

    def _sum_copies(self, gradients: Tensor) -> None:
        if self.mesh.size("dp_replicate") > 1:
            self._reducing.append(start_all_sum(gradients, self.mesh.group("dp_replicate")))

    def _scatter(self, bucket: Bucket, last: bool) -> None:
        self._finish_scatter()
        # The buffer goes with the exchange: what comes before it ends belongs to the next micro-batch.
        whole, bucket.whole = bucket.whole, None
        assert whole is not None
        own = torch.empty(bucket.elements, dtype=self.grads, device=whole.device)
        work = start_scatter_sum(own, whole, self.mesh.group(bucket.view))
        self._scattering = (work, bucket, own, whole)
        self._scatter_is_last = last
        for slot in bucket.slots:
            slot.fresh = True

    def _finish_scatter(self) -> None:
        """Wait for the reduce-scatter on its way, keep its result, and let the copies of the model sum theirs."""
        if self._scattering is None:
            return
        work, bucket, own, _ = self._scattering
        self._scattering = None
        work.wait()
        bucket.shard = own if bucket.shard is None else bucket.shard.add_(own)
        if self._scatter_is_last:
            self._sum_copies(bucket.shard)

    @torch.no_grad()
    def reduce(self) -> None:
        """Set the gradient of every piece: the mean over token ranks. Ends all exchanges of this step."""
        self._finish_scatter()
        for work in self._reducing:
            work.wait()
        self._reducing.clear()
        if self.tree is not None:
            self.tree.reduce({s: [b.whole for b in bs if b.whole is not None] for s, bs in self.buckets.items()})
            for bucket in self.in_order:
                self._sum_within_copy(bucket)
        for bucket in self.in_order:
            shard = bucket.shard if bucket.ranks > 1 else None if bucket.whole is None else bucket.whole[0]
            if shard is None:
                continue
            shard.mul_(1 / self.mesh.parallel.token_ranks)
            for slot in bucket.slots:
                own = slot.piece.value.numel()
                slot.piece.grad = shard[slot.start : slot.start + own].view(slot.piece.sizes)

    def _sum_within_copy(self, bucket: Bucket) -> None:
        """The tree has added what the copies of the model have; it does not reach the ranks of one copy, which have
        other tokens: those of the cp axis, and those that share experts."""
        if bucket.whole is None:
            return
        if bucket.ranks > 1:
            bucket.shard = torch.empty(bucket.elements, dtype=self.grads, device=bucket.whole.device)
            start_scatter_sum(bucket.shard, bucket.whole, self.mesh.group(bucket.view)).wait()
        elif bucket.view == "shard" and self.mesh.size("cp") > 1:
            start_all_sum(bucket.whole, self.mesh.group("cp")).wait()

    # -- parameters --

    @torch.no_grad()
    def publish(self) -> None:
        """Let the compute-dtype parameters follow the masters. Gathers of later units wait for the next forward."""
        for bucket in self.in_order:
            bucket.shard = None
            for slot in bucket.slots:
                slot.fresh, slot.piece.grad = True, None
                if bucket.ranks == 1 and slot.parameter.dtype != slot.piece.value.dtype:
                    slot.parameter.data.copy_(slot.piece.value)
        self._to_gather = [bucket for bucket in self.in_order if bucket.ranks > 1]
        self._gather_ahead(0)

    def _gather_ahead(self, unit: int) -> None:
        """Start gathers up to `prefetch` units beyond this one."""
        while self._to_gather and self._to_gather[0].unit <= unit + self.prefetch:
            self._gather(self._to_gather.pop(0))

    @torch.no_grad()
    def _gather(self, bucket: Bucket) -> None:
        first = bucket.slots[0].parameter
        own = torch.zeros(bucket.elements, dtype=first.dtype, device=first.device)
        for slot in bucket.slots:
            own[slot.start : slot.start + slot.piece.value.numel()] = slot.piece.value.reshape(-1)
        whole = torch.empty(bucket.ranks, bucket.elements, dtype=first.dtype, device=first.device)
        bucket.gathering = (start_gather(whole, own, self.mesh.group(bucket.view)), whole)

    @torch.no_grad()
    def _before_forward(self, bucket: Bucket) -> None:
        self._gather_ahead(bucket.unit)
        if bucket.gathering is None:
            return
        work, whole = bucket.gathering
        bucket.gathering = None
        work.wait()
        for slot in bucket.slots:
            rows = whole[:, slot.start : slot.start + slot.length].reshape(-1)
            slot.parameter.data.copy_(rows[: slot.parameter.numel()].view_as(slot.parameter))


def _clear_missing(bucket: Bucket) -> None:
    """A parameter that got no gradient has the last step's in a buffer that stayed."""
    for slot in bucket.slots:
        if slot.fresh and bucket.whole is not None:
            bucket.whole[:, slot.start : slot.start + slot.length].zero_()
