"""The gradients of a sharding unit in one buffer, and the states that they have in a step; zero.py exchanges them."""

from dataclasses import dataclass, field
from enum import Enum

import torch.distributed as dist
from torch import Tensor, nn

from ingot.plugins.piece import ParameterShard


class Reduction(Enum):
    """The exchange of a bucket's gradients between the ranks that share it."""

    SUM_COPIES = "one rank has all rows: at the last micro-batch, the copies of the model sum their gradients"
    SCATTER_LAST = "reduce-scatter at the last micro-batch (ZeRO-1), then the copies sum theirs"
    SCATTER_EACH = "reduce-scatter after each micro-batch (ZeRO-2), and after the last one the copies sum theirs"
    TREE = "at the end of the step, in the order of canonical sums"


class BucketState(Enum):
    """The state of a bucket's gradients within one optimizer step."""

    EMPTY = "empty"  # no gradient of this step has arrived
    FILLING = "filling"  # `whole` sums the gradients of micro-batches
    SCATTERING = "scattering"  # a reduce-scatter of `whole` is in flight
    SCATTERED = "scattered"  # `own` has the sum over ranks of this rank's rows; more micro-batches may follow
    SUMMING = "summing"  # an all-reduce over the copies of the model is in flight; no micro-batch may follow
    REDUCED = "reduced"  # shards have their gradients


TRANSITIONS = {
    BucketState.EMPTY: {BucketState.FILLING, BucketState.REDUCED},
    BucketState.FILLING: {BucketState.SCATTERING, BucketState.SUMMING, BucketState.REDUCED},
    BucketState.SCATTERING: {BucketState.SCATTERED},
    BucketState.SCATTERED: {BucketState.FILLING, BucketState.SUMMING, BucketState.REDUCED},
    BucketState.SUMMING: {BucketState.REDUCED},
    BucketState.REDUCED: {BucketState.EMPTY},
}


class IllegalTransition(RuntimeError):
    """An exchange of a bucket's gradients in the wrong order: an error of the program, never of the user."""


@dataclass
class BucketSlot:
    """A parameter's place in the buffer of its bucket: columns start..start+length of [ranks, elements].

    fresh: no gradient was added since the last exchange of the buffer, so the first gradient overwrites the columns.
    """

    name: str
    parameter: nn.Parameter
    start: int
    length: int
    shard: ParameterShard
    fresh: bool = True


@dataclass(eq=False)
class Bucket:
    """The parameters of one unit, or its experts.

    unit: the number of the unit in the order of the forward. view: the view of the mesh (mesh/mesh.py) whose ranks
    share these parameters. ranks: their number. waiting: parameters whose gradient of this micro-batch has not arrived.
    whole: gradients of all rows, [ranks, elements]. own: gradients of this rank's rows, [elements].
    gathering: the gather of updated parameters in flight, and its result.
    """

    unit: int
    view: str
    ranks: int
    reduction: Reduction
    slots: list[BucketSlot] = field(default_factory=list)
    elements: int = 0
    waiting: set[str] = field(default_factory=set)
    whole: Tensor | None = None
    own: Tensor | None = None
    gathering: tuple[dist.Work, Tensor] | None = None
    state: BucketState = BucketState.EMPTY

    def move(self, state: BucketState) -> None:
        """Change the state. Raises IllegalTransition if `state` may not follow the current one."""
        if state not in TRANSITIONS[self.state]:
            allowed = " or ".join(sorted(s.value for s in TRANSITIONS[self.state]))
            raise IllegalTransition(
                f"unit {self.unit}, view {self.view} ({self.slots[0].name if self.slots else 'no parameters'}): "
                f"{state.value} after {self.state.value}, but only {allowed} may follow"
            )
        self.state = state

    def drop(self) -> None:
        """Forget gradients that are not reduced. A buffer in `whole` is used again."""
        self.state = BucketState.EMPTY
        for slot in self.slots:
            slot.fresh = True

    def place_of(self, element: int) -> tuple[str, int]:
        """Return the parameter of an element of `whole`, as a flat tensor, and the element's index in it."""
        rank, column = divmod(element, self.elements)
        slot = next(slot for slot in self.slots if slot.start <= column < slot.start + slot.length)
        return slot.name, rank * slot.length + column - slot.start


def clear_missing(bucket: Bucket) -> None:
    """Zero the columns of parameters that got no gradient; a reused buffer has old values in them."""
    if bucket.whole is None:
        return
    if bucket.state is BucketState.EMPTY:
        bucket.move(BucketState.FILLING)  # the columns become zeros
    for slot in bucket.slots:
        if slot.fresh:
            bucket.whole[:, slot.start : slot.start + slot.length].zero_()
