"""Data parallelism with whole parameters on every rank: DDP, ZeRO-1 and ZeRO-2 (Rajbhandari et al. 2020).

                parameters   gradients     master and moments     reduced
    DDP         whole        whole         whole                  once per step, all-reduce
    ZeRO-1      whole        whole         own rows               once per step, reduce-scatter
    ZeRO-2      whole        own rows      own rows               every micro-batch, reduce-scatter

Whole parameters are in the compute dtype, master and moments in float32 (if both dtypes are the same, the master is the
parameter itself), gradients in the dtype of `parallel.grads`. A bucket holds the gradients of a unit in one buffer of
shape [ranks, elements of one rank's rows], so one collective moves them; the experts of a unit, which a different set
of ranks shares, have a bucket of their own. A bucket is reduced as soon as its backward is done, while earlier layers
still compute. After the update its parameters are gathered while earlier units already run forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.plugins.piece import ParameterShard
from ingot.trainer.mesh.collectives import start_all_sum, start_gather, start_scatter_sum
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.bucket import Bucket, BucketSlot, BucketState, Reduction, clear_missing
from ingot.trainer.parallel.canonical import ReductionTree
from ingot.trainer.parallel.tensor import TensorCut
from ingot.trainer.parallel.units import ShardingUnit, cut_units, is_owner, own_rows
from ingot.trainer.parallel.unreduced import GradientReader


@dataclass(frozen=True)
class _Scatter:
    """A reduce-scatter of `whole` into `own`, in flight. last: the bucket's last in this optimizer step."""

    work: dist.Work
    bucket: Bucket
    own: Tensor
    whole: Tensor
    last: bool


class Zero:
    """Data parallelism over `stages`, modules with parameters in the compute dtype whose values are not set yet.

    Set `shards[..].value` and call `publish` before the first forward.
    """

    def __init__(
        self,
        stages: list[nn.Module],
        cuts: dict[str, TensorCut],
        mesh: Mesh,
        *,
        zero: int,
        master: torch.dtype,
        grads: torch.dtype,
        micro_batches: int,
    ):
        settings = mesh.parallel
        self.mesh, self.zero, self.grads, self.master = mesh, zero, grads, master
        self.hold = settings.splits_backward  # then gradients of several micro-batches arrive interleaved
        self.prefetch = settings.prefetch
        self.shards: list[ParameterShard] = []
        self._known: set[nn.Parameter] = set()  # in a V-shaped pipeline, tied embedding and head are one parameter
        self.hooks = []  # handles of the hooks of parameters, see ShardedModel.close
        self.buckets: dict[nn.Module, list[Bucket]] = {}
        self.in_order: list[Bucket] = []
        self._scattering: _Scatter | None = None
        self._summing: list[dist.Work] = []
        self._last = False
        self._to_gather: list[Bucket] = []
        self._units = 0
        for stage in stages:
            units = cut_units(stage, settings.unit_blocks, cuts)
            self.buckets[stage] = [bucket for unit in units for bucket in self._buckets(stage, unit, cuts)]
        self.tree = ReductionTree(mesh, micro_batches) if settings.reduce == "canonical" else None
        self._reader: GradientReader | None = None
        each = any(bucket.reduction is Reduction.SCATTER_EACH for bucket in self.in_order)
        self.buffers_read = (micro_batches if each else 1, len(self.in_order))

    # -- layout --

    def _buckets(self, stage: nn.Module, unit: ShardingUnit, cuts: dict[str, TensorCut]) -> list[Bucket]:
        parts = [(unit.names, unit.modules), (unit.expert_names, unit.experts)]
        made = [self._bucket(stage, names, modules[0], cuts) for names, modules in parts if names]
        buckets = [bucket for bucket in made if bucket.slots]
        self._units += bool(buckets)
        self.in_order += buckets
        return buckets

    def _bucket(self, stage: nn.Module, names: Sequence[str], first: nn.Module, cuts: dict[str, TensorCut]) -> Bucket:
        """Make the bucket of these parameters. first: the module that uses them first."""
        view = cuts[names[0]].view
        bucket = Bucket(self._units, view, self.mesh.size(view), self._reduction(self.mesh.size(view)))
        for name in names:
            parameter = stage.get_parameter(name)
            if parameter in self._known:
                continue
            self._known.add(parameter)
            length = -(-len(parameter) // bucket.ranks) * parameter[0].numel()
            slot = BucketSlot(name, parameter, bucket.elements, length, self._shard(name, parameter, cuts[name]))
            bucket.slots.append(slot)
            self.shards.append(slot.shard)
            bucket.elements += length
            arrived = parameter.register_post_accumulate_grad_hook(lambda p, b=bucket, s=slot: self._arrived(b, s))
            self.hooks.append(arrived)
        if bucket.slots:
            first.register_forward_pre_hook(lambda module, args: self._before_forward(bucket))
        return bucket

    def _reduction(self, ranks: int) -> Reduction:
        if self.mesh.parallel.reduce == "canonical":
            return Reduction.TREE
        if ranks == 1:
            return Reduction.SUM_COPIES
        return Reduction.SCATTER_LAST if self.zero < 2 else Reduction.SCATTER_EACH

    def _shard(self, name: str, parameter: nn.Parameter, cut: TensorCut) -> ParameterShard:
        rows = own_rows(len(parameter), self.mesh.size(cut.view), self.mesh.index(cut.view))
        own = parameter.detach()[rows.start : rows.stop]
        value = own if parameter.dtype == self.master else torch.empty_like(own, dtype=self.master)
        return ParameterShard(
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
        """Complete the buckets that hooks did not complete: all buckets if `self.hold` is True, otherwise those in
        which a parameter got no gradient."""
        for bucket in reversed(self.buckets[stage]):
            if self.hold or bucket.waiting:
                bucket.waiting = set()
                self._complete(bucket, last)
        if self.tree is not None:
            for bucket in self.buckets[stage]:
                clear_missing(bucket)
            self.tree.after_micro_batch(stage, [b.whole for b in self.buckets[stage] if b.whole is not None])
            for slot in (slot for bucket in self.buckets[stage] for slot in bucket.slots):
                slot.fresh = slot.fresh or self.tree.between_parts(stage)

    @torch.no_grad()
    def _arrived(self, bucket: Bucket, slot: BucketSlot) -> None:
        """Move a parameter's gradient of one micro-batch into the buffer of its bucket."""
        gradient = slot.parameter.grad
        slot.parameter.grad = None
        if bucket.state is BucketState.SCATTERING:
            self._finish_scatter()  # frees the buffer in flight before the bucket gets a new one
        if bucket.state is not BucketState.FILLING:
            bucket.move(BucketState.FILLING)
        if bucket.whole is None:
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
        """Start the exchange that is due after all gradients of one micro-batch have arrived.

        last: the micro-batch is the last one of the step.
        """
        match bucket.reduction:
            case Reduction.TREE:
                pass  # in `reduce`
            case Reduction.SUM_COPIES:
                if last:
                    clear_missing(bucket)
                    if bucket.state is BucketState.FILLING and self._is_reduced(bucket):
                        self._sum_copies(bucket, bucket.whole)
            case Reduction.SCATTER_LAST | Reduction.SCATTER_EACH:
                if bucket.state is BucketState.FILLING:
                    if (last or bucket.reduction is Reduction.SCATTER_EACH) and self._is_reduced(bucket):
                        self._scatter(bucket, last)
                elif last:
                    # Backward in two halves: the last gradients arrived early and were reduced with those of an earlier
                    # micro-batch.
                    self._finish_scatter()
                    if bucket.state is BucketState.SCATTERED:
                        self._sum_copies(bucket, bucket.own)

    def _is_reduced(self, bucket: Bucket) -> bool:
        """Show a bucket's gradients to the reader, and return whether to reduce them. If not, they are dropped."""
        if self._reader is None:
            return True
        assert bucket.whole is not None
        self._reader.take(self.in_order.index(bucket), bucket.whole)
        if self._reader.apart:
            bucket.drop()
            bucket.whole = bucket.whole if bucket.reduction in (Reduction.SUM_COPIES, Reduction.TREE) else None
        return not self._reader.apart

    def show_gradients(self, reader: GradientReader) -> None:
        """Show this rank's gradients to `reader` from now on, before they are reduced."""
        self._reader = reader

    def name_of(self, number: int, element: int) -> tuple[str, int | None]:
        """Return the parameter of an element of buffer `number`, and the element's index in this rank's part of it."""
        return self.in_order[number].place_of(element)

    @torch.no_grad()
    def drop_gradients(self) -> None:
        """End a step whose gradients are only read: drop what is left of them. Starts no exchange."""
        if self.tree is not None:
            self._sum_parts(self.tree)

    def _sum_parts(self, tree: ReductionTree) -> list[Bucket]:
        """Sum the parts that this rank read, and return the buckets whose sums are to be reduced."""
        tree.sum_parts({s: [b.whole for b in bs if b.whole is not None] for s, bs in self.buckets.items()})
        return [bucket for bucket in self.in_order if bucket.whole is not None and self._is_reduced(bucket)]

    def _sum_copies(self, bucket: Bucket, gradients: Tensor | None) -> None:
        """Start to sum `gradients` over the copies of the model, if there are several."""
        if self.mesh.size("dp_replicate") > 1:
            assert gradients is not None
            bucket.move(BucketState.SUMMING)
            self._summing.append(start_all_sum(gradients, self.mesh.group("dp_replicate")))

    def _scatter(self, bucket: Bucket, last: bool) -> None:
        self._finish_scatter()
        bucket.move(BucketState.SCATTERING)
        # The exchange keeps this buffer: gradients that arrive before its end go to a new buffer.
        whole, bucket.whole = bucket.whole, None
        assert whole is not None
        own = torch.empty(bucket.elements, dtype=self.grads, device=whole.device)
        work = start_scatter_sum(own, whole, self.mesh.group(bucket.view))
        self._scattering = _Scatter(work, bucket, own, whole, last)
        for slot in bucket.slots:
            slot.fresh = True

    def _finish_scatter(self) -> None:
        """Wait for the reduce-scatter in flight and keep its result. If it is the bucket's last, sum over copies."""
        if self._scattering is None:
            return
        scatter, self._scattering = self._scattering, None
        bucket = scatter.bucket
        scatter.work.wait()
        bucket.move(BucketState.SCATTERED)
        bucket.own = scatter.own if bucket.own is None else bucket.own.add_(scatter.own)
        if scatter.last:
            self._sum_copies(bucket, bucket.own)

    @torch.no_grad()
    def reduce(self) -> None:
        """Finish this step's exchanges, and set each shard's gradient to the mean over the ranks that read tokens."""
        self._finish_scatter()
        for work in self._summing:
            work.wait()
        self._summing.clear()
        if self.tree is not None:
            for bucket in self._sum_parts(self.tree):
                assert bucket.whole is not None
                self.tree.sum_over_copies(bucket.whole)
                self._sum_within_copy(bucket)
        for bucket in self.in_order:
            bucket.move(BucketState.REDUCED)
            own = bucket.own if bucket.ranks > 1 else None if bucket.whole is None else bucket.whole[0]
            if own is None:
                continue
            if self.mesh.parallel.token_ranks > 1:
                own.mul_(1 / self.mesh.parallel.token_ranks)
            for slot in bucket.slots:
                elements = slot.shard.value.numel()
                slot.shard.grad = own[slot.start : slot.start + elements].view(slot.shard.sizes)

    def _sum_within_copy(self, bucket: Bucket) -> None:
        """Sum a bucket's gradients over the ranks within one copy of the model that saw different tokens: the cp ranks
        and the ranks that share experts. Used with reduce = "canonical", whose tree sums over the copies only."""
        if bucket.whole is None:
            return
        if bucket.ranks > 1:
            bucket.move(BucketState.SCATTERING)
            bucket.own = torch.empty(bucket.elements, dtype=self.grads, device=bucket.whole.device)
            start_scatter_sum(bucket.own, bucket.whole, self.mesh.group(bucket.view)).wait()
            bucket.move(BucketState.SCATTERED)
        elif bucket.view == "shard" and self.mesh.size("cp") > 1:
            start_all_sum(bucket.whole, self.mesh.group("cp")).wait()

    # -- parameters --

    def published(self) -> dict[tuple[str, tuple[int, ...]], Tensor]:
        """Return (name, offsets in the whole) -> parameter, of those that are copies of masters: in another dtype, or
        with rows that other ranks own. Between a forward and the next `publish`, all of them are complete."""
        found = {}
        for bucket in self.in_order:
            for slot in bucket.slots:
                if bucket.ranks > 1 or slot.parameter.dtype != self.master:
                    first, *others = slot.shard.offsets
                    own = own_rows(len(slot.parameter), bucket.ranks, self.mesh.index(bucket.view))
                    found[slot.name, (first - own.start, *others)] = slot.parameter.data
        return found

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters to the parameters in the compute dtype. The forward starts the gathers of later units."""
        for bucket in self.in_order:
            if bucket.state is not BucketState.EMPTY:  # before the first step it is empty
                bucket.move(BucketState.EMPTY)
            bucket.own = None
            for slot in bucket.slots:
                slot.fresh, slot.shard.grad = True, None
                if bucket.ranks == 1 and slot.parameter.dtype != slot.shard.value.dtype:
                    slot.parameter.data.copy_(slot.shard.value)
        self._to_gather = [bucket for bucket in self.in_order if bucket.ranks > 1]
        self._gather_ahead(0)

    def _gather_ahead(self, unit: int) -> None:
        """Start the gathers of all units up to number `unit` + `prefetch`."""
        while self._to_gather and self._to_gather[0].unit <= unit + self.prefetch:
            self._gather(self._to_gather.pop(0))

    @torch.no_grad()
    def _gather(self, bucket: Bucket) -> None:
        first = bucket.slots[0].parameter
        own = torch.zeros(bucket.elements, dtype=first.dtype, device=first.device)
        for slot in bucket.slots:
            own[slot.start : slot.start + slot.shard.value.numel()] = slot.shard.value.reshape(-1)
        whole = torch.empty(bucket.ranks, bucket.elements, dtype=first.dtype, device=first.device)
        bucket.gathering = (start_gather(whole, own, self.mesh.group(bucket.view)), whole)

    @torch.no_grad()
    def _before_forward(self, bucket: Bucket) -> None:
        """Wait for the updated parameters of a bucket, before the first module that uses them runs."""
        self._gather_ahead(bucket.unit)
        if bucket.gathering is None:
            return
        work, whole = bucket.gathering
        bucket.gathering = None
        work.wait()
        for slot in bucket.slots:
            copy_rows(whole[:, slot.start : slot.start + slot.length], slot.parameter.data)


def copy_rows(rows: Tensor, parameter: Tensor) -> None:
    """Fill `parameter`, contiguous, with the numbers of `rows`, [ranks, elements of one rank's part], which may be
    columns of a larger buffer and may have more at their end. Each number is copied once: `rows` never becomes
    contiguous in between."""
    flat, length = parameter.view(-1), rows.shape[1]
    full = flat.numel() // length
    flat[: full * length].view(full, length).copy_(rows[:full])
    if left := flat.numel() % length:
        flat[full * length :].copy_(rows[full, :left])
