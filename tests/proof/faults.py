"""Errors planted one at a time, each the kind of slip that trains on in silence; the matrix has to see every one.

Those of long sequences and experts are in faults_long.py.
"""

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

from ingot.plugins.piece import ParameterShard
from ingot.trainer import build as trainer_build
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.model.loss import Readout, nats_and_slope
from ingot.trainer.parallel import apply, fsdp, tensor, zero
from ingot.trainer.parallel.canonical import ReductionTree
from ingot.trainer.parallel.channels import Channels
from ingot.trainer.parallel.pipeline import PipelineExecutor, TiedEnds
from ingot.trainer.parallel.split_backward import WeightGradients
from ingot.trainer.parallel.tensor import Region
from ingot.trainer.parallel.zero import Zero

from .planting import fault, replaced

_DONE = SimpleNamespace(wait=lambda: None)


# -- data parallelism --


@fault("the all-reduce of gradients is skipped", "ddp", "gradient norm parameters loss replicas")
def all_reduce_skipped(stack: ExitStack) -> None:
    replaced(stack, zero, "start_all_sum", lambda original: lambda x, group: _DONE)


@fault("the all-reduce of gradients is done twice", "ddp", "gradient norm parameters")
def all_reduce_doubled(stack: ExitStack) -> None:
    def make(original):
        def twice(x, group):
            original(x, group).wait()
            return original(x, group)

        return twice

    replaced(stack, zero, "start_all_sum", make)


@fault("gradients are scattered over dp_replicate, not dp_shard", "hsdp-1", "gradient norm parameters loss")
def scattered_on_the_wrong_group(stack: ExitStack) -> None:
    def make(scatter):
        def other_axis(self, bucket, last):
            def swap(group):
                return lambda mesh, axis: group(mesh, "dp_replicate" if axis == "shard" else axis)

            with ExitStack() as inner:
                replaced(inner, Mesh, "group", swap)
                scatter(self, bucket, last)

        return other_axis

    replaced(stack, Zero, "_scatter", make)


@fault("gradients are summed over data ranks, not averaged", "zero-1", "gradient norm parameters")
def mean_left_out(stack: ExitStack) -> None:
    def make(reduce):
        def total(self):
            reduce(self)
            for shard in self.shards:
                shard.grad.mul_(self.mesh.data_ranks)

        return total

    replaced(stack, Zero, "reduce", make)


@fault(
    "a micro-batch is divided by its own tokens, not by those of the step",
    "accumulation",
    "loss gradient norm parameters",
)
def tokens_of_a_micro_batch(stack: ExitStack) -> None:
    replaced(stack, Readout, "forward", lambda original: lambda *args: 2 * original(*args))


@fault("HSDP's copies of the model do not exchange gradients", "hsdp-1", "gradient norm parameters loss replicas")
def copies_left_alone(stack: ExitStack) -> None:
    replaced(stack, zero, "start_all_sum", lambda original: lambda x, group: _DONE)


@fault("ZeRO-2 keeps the buffer of the micro-batch before", "zero-2", "gradient norm parameters loss")
def accumulated_twice(stack: ExitStack) -> None:
    def make(scatter):
        def keep(self, bucket, last):
            whole = bucket.whole
            scatter(self, bucket, last)
            if not last:
                bucket.whole = whole.clone()
                for slot in bucket.slots:
                    slot.fresh = False

        return keep

    replaced(stack, Zero, "_scatter", make)


@fault("the copies of the model sum their gradients after each micro-batch, not after the last", "hsdp-2", "error")
def copies_sum_too_early(stack: ExitStack) -> None:
    """The states of a bucket refuse the gradients of the next micro-batch."""
    replaced(stack, Zero, "_complete", lambda complete: lambda self, bucket, last: complete(self, bucket, True))


@fault("updated parameters are not gathered", "zero-1", "loss norm parameters")
def not_gathered(stack: ExitStack) -> None:
    def make(original):
        def only_at_first(self, place):
            if not self.stepped:
                original(self, place)

        return only_at_first

    def count(publish):
        def and_count(self):
            self.stepped = hasattr(self, "stepped")
            publish(self)

        return and_count

    replaced(stack, Zero, "_before_forward", make)
    replaced(stack, Zero, "publish", count)


@fault("a rank gives its rows the first values of the first rows", "zero-1", "loss gradient norm parameters")
def wrong_rows_at_first(stack: ExitStack) -> None:
    def make(original):
        return lambda name, shape, arch, seed, offsets, sizes: original(
            name, shape, arch, seed, [0] * len(sizes), sizes
        )

    replaced(stack, trainer_build, "initial_value", make)


@fault("ZeRO-3 takes the shard of the next rank for its own", "zero-3", "loss gradient norm parameters")
def wrong_shard(stack: ExitStack) -> None:
    replaced(stack, fsdp, "own_rows", lambda own: lambda rows, ranks, index: own(rows, ranks, (index + 1) % ranks))


@fault("canonical sums are taken in turn, not in a tree", "canonical over 1", "bits")
def sums_in_turn(stack: ExitStack) -> None:
    def make(original):
        def one_part(self, mesh, micro_batches):
            original(self, mesh, micro_batches)
            self.parts = 1

        return one_part

    replaced(stack, ReductionTree, "__init__", make)


# -- the optimizer --


@fault("copies of a parameter count twice in the gradient norm", "ddp", "norm owners parameters loss")
def copies_in_the_norm(stack: ExitStack) -> None:
    replaced(stack, zero, "is_owner", lambda original: lambda cut, parameter, mesh: True)


@fault("weight decay acts on norm weights", "zero-1", "parameters loss norm")
def norms_decay(stack: ExitStack) -> None:
    stack.enter_context(patch.object(ParameterShard, "decays", True))


# -- tensor parallelism --


@fault("gradients of norms are not summed over tp", "tp+sp", "gradient norm parameters loss replicas")
def partial_sum_left_out(stack: ExitStack) -> None:
    replaced(stack, apply, "sum_partial_gradients", lambda original: lambda shards, mesh: None)


@fault(
    "gradients of head norms are summed over tp only where tp divides the tokens as well",
    "tp",
    "gradient norm parameters loss replicas",
)
def head_norms_left_partial(stack: ExitStack) -> None:
    def make(original):
        return lambda shards, mesh: original(shards, mesh) if mesh.parallel.sequence else None

    replaced(stack, apply, "sum_partial_gradients", make)


@fault("a block that tp divides counts in the norm on the first rank alone", "tp+sp", "norm owners parameters loss")
def divided_blocks_counted_once(stack: ExitStack) -> None:
    def make(original):
        return lambda cut, parameter, mesh: original(cut, parameter, mesh) and mesh.index("tp") == 0

    replaced(stack, zero, "is_owner", make)


@fault("entering and leaving a region are swapped", "tp", "gradient norm parameters loss replicas")
def enter_and_leave_swapped(stack: ExitStack) -> None:
    enter, leave = Region.enter, Region.leave
    stack.enter_context(patch.object(Region, "enter", leave))
    stack.enter_context(patch.object(Region, "leave", enter))


@fault("the backward of entering a region does not sum", "tp", "gradient norm parameters loss replicas")
def backward_not_summed(stack: ExitStack) -> None:
    backward = staticmethod(lambda ctx, *grads: (grads[0], None))
    stack.enter_context(patch.object(tensor._SumBackward, "backward", backward))


@fault("each rank subtracts the largest logit of its own vocabulary", "tp+sp", "gradient norm parameters loss")
def own_largest_logit(stack: ExitStack) -> None:
    def make(original):
        return lambda x, group, op="sum": x if op == "max" else original(x, group, op)

    replaced(stack, tensor, "all_sum", make)


@fault("the loss over a vocabulary that is split has no softcap", "softcap x tp+sp", "gradient norm parameters loss")
def cap_dropped_under_tensor_parallelism(stack: ExitStack) -> None:
    def make(use):
        def without_cap(self, measure, *more):
            if measure is not nats_and_slope:
                self.softcap = 0.0
            use(self, measure, *more)

        return without_cap

    replaced(stack, Readout, "use", make)


@fault("queries attend to the next key/value head", "tp+sp over 4, tied", "gradient norm parameters loss")
def wrong_kv_head(stack: ExitStack) -> None:
    def make(original):
        return lambda heads, ranks, index: original(heads, ranks, (index + ranks // heads) % ranks)

    replaced(stack, tensor, "_own_head", make)


# -- pipelines --


@fault("a stage begins one block late", "1f1b", "coverage owners missing gradient norm parameters loss")
def stage_boundary_off_by_one(stack: ExitStack) -> None:
    def make(cut):
        def late(model, stage, stage_layers):
            cut(model, stage, stage_layers)
            if stage:
                del model.blocks[next(iter(model.blocks))]
            return model

        return late

    replaced(stack, apply, "cut_stage", make)


@fault("tied embedding and head do not add their gradients", "1f1b", "gradient norm parameters loss replicas")
def ends_not_summed(stack: ExitStack) -> None:
    replaced(stack, TiedEnds, "sum_gradients", lambda original: lambda self: None)


@fault("two messages are received in the wrong order", "gpipe", "gradient norm parameters loss")
def received_in_the_wrong_order(stack: ExitStack) -> None:
    def make(original):
        def swapped(self, *args):
            original(self, *args)
            self.order = {
                channel: [order[1], order[0], *order[2:]] if channel.kind == "activation" else order
                for channel, order in self.order.items()
            }

        return swapped

    replaced(stack, Channels, "__init__", make)


@fault("the last micro-batch is dropped", "1f1b", "gradient norm parameters loss")
def last_micro_batch_dropped(stack: ExitStack) -> None:
    def make(original):
        def shorter(name, pp, micro_batches, stages_per_rank):
            table = original(name, pp, micro_batches, stages_per_rank)
            rows = tuple(tuple(a for a in row if a.micro_batch < micro_batches - 1) for row in table.rows)
            return replace(table, rows=rows)

        return shorter

    replaced(stack, trainer_build, "build_table", make)


@fault("a W is forgotten", "zb_h1", "gradient norm parameters loss")
def weights_forgotten(stack: ExitStack) -> None:
    def make(original):
        def all_but_the_first(self):
            if hasattr(all_but_the_first, "called"):
                original(self)
            all_but_the_first.called = True

        return all_but_the_first

    replaced(stack, WeightGradients, "compute", make)


@fault("stages send half of the gradient of their input", "zb_h1", "gradient norm parameters loss")
def half_a_gradient_sent(stack: ExitStack) -> None:
    def make(original):
        def half(self, action, made, local, reader):
            original(self, action, made if action.kind == "F" else made / 2, local, reader)

        return half

    replaced(stack, PipelineExecutor, "_pass_on", make)
