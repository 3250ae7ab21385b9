"""The results of a replay, as plain values. No torch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ingot.schema.guard_record import Measure

# -- what the log of the run has --


@dataclass(frozen=True, kw_only=True)
class RecordedWay:
    """The way of the run to one training of a step, as its log has it. rates: step -> its learning rate, with the
    factors of the guard. measures: of the guard before it; None: all in the record that do not name the step. foreign:
    the steps of checkpoints that are not on the way."""

    rates: Mapping[int, float] = field(default_factory=dict)
    measures: Sequence[Measure] | None = None
    foreign: Collection[int] = ()


LAST_WAY = RecordedWay()  # to the last training of the step, with the rates of the run file

# -- a step that is not finite --

Phase = Literal["", "forward", "backward", "gradient norm", "update"]


@dataclass(frozen=True, kw_only=True)
class TensorRange:
    """The values of a tensor. name: of a parameter, "" of any other tensor.

    lowest, highest: of the finite elements; None if there is none. nan, infinite: numbers of such elements.
    zero_rows: the number of rows (over the last dim) in which all elements are 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    lowest: float | None
    highest: float | None
    nan: int
    infinite: int
    zero_rows: int

    @property
    def largest(self) -> float:
        """The largest absolute value of the finite elements; 0 if there is none."""
        return max(abs(self.lowest or 0.0), abs(self.highest or 0.0))


@dataclass(frozen=True, kw_only=True)
class NotFiniteOrigin:
    """The first operation that made values that are not finite, of those that reached the loss or a gradient.

    kind: "operation": all its inputs were finite; "tensor": a tensor from outside the step, usually a parameter, was
    not finite, and this operation was the first to read it; "memory": it read memory that no operation had written.
    module: the path in the model, "" outside of every module. module_class: the name of its class.
    operation: of PyTorch, like "aten.rsqrt". node: the node of autograd, "" in a forward.
    micro_batch: from 0. tensor: the name of that parameter, "" otherwise.
    inputs: its floating-point tensors. output: the result. module_input: the first input of the module in this forward.
    sequences: those of the micro-batch in whose part of the result such values are; empty if the result has no such
    parts.
    """

    kind: Literal["operation", "tensor", "memory"]
    phase: Phase
    module: str
    module_class: str
    operation: str
    node: str
    micro_batch: int
    tensor: str
    inputs: tuple[TensorRange, ...]
    output: TensorRange
    module_input: TensorRange | None
    sequences: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """A step of the replay. lr: the learning rate. skipped: its update was not made.

    change: the root mean square of the update, divided by that of the weights before it, over samples of all matrices.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    change: float

    @property
    def is_finite(self) -> bool:
        return abs(self.loss) < float("inf") and abs(self.grad_norm) < float("inf")


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The replay of a run in one process, from a checkpoint to a step.

    checkpoint: the step of the checkpoint that it began with; 0: the first weights. unused: why newer ones were not
    used. wanted: the step that was looked for. steps: those that ran, in order.
    loaded_bad: the checkpoint has values that are not finite. bad_state: its tensors that have some, or those that have
    some after the update of `step`. finite_at: the newest earlier checkpoint in which those of the checkpoint are
    finite; None: there is none.
    step: the first step with a loss, gradient or state that is not finite; 0: all are finite. phase: where it shows
    first. origin: None if no operation is to blame, or nothing is wrong.
    samples: the positions in the global batch that are affected; empty: not known. batch: the number of samples of a
    step. own_tokens: token ids that all affected samples have, and no other sample of the batch.
    loss_scale: of the step, with fp16. finite_unscaled: with a loss scale of 1, gradients are finite; None: not tried.
    notes: differences between replay and run, as sentences.
    """

    checkpoint: int
    unused: tuple[str, ...]
    wanted: int
    steps: tuple[ReplayedStep, ...]
    loaded_bad: bool
    bad_state: tuple[TensorRange, ...]
    finite_at: int | None
    step: int
    phase: Phase
    origin: NotFiniteOrigin | None
    samples: tuple[int, ...]
    batch: int
    own_tokens: tuple[int, ...]
    loss_scale: float | None
    finite_unscaled: bool | None
    device: str
    precision: str
    notes: tuple[str, ...]


# -- a step with a spike --


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """The norms of one layer: a block, or what is before or after all blocks.

    gradient: in the step, before clipping. gradient_before: the median over the replayed steps before it; NaN without
    one. gradient_other: of another batch on the same weights; NaN without one. weights_before, weights_after: of the
    weights before and after the update of the step; equal if it was skipped.
    """

    name: str
    gradient: float
    gradient_before: float
    gradient_other: float
    weights_before: float
    weights_after: float


@dataclass(frozen=True, kw_only=True)
class ReplayedSpike:
    """A step replayed in one process, with experiments on its weights and its batch.

    checkpoint, unused, device, precision, notes: as in Replayed. steps: those before it, in order. own: the step.
    nats: float32 [samples, T], the loss of every target of its batch on the weights before its update.
    other_step: a step whose batch is compared with it, on the same weights; 0: there is none. other_loss,
    other_grad_norm: of that batch; NaN without one. other_nats: float32 [samples, T]; None without one.
    other_loss_after: of that batch after the update of the step.
    early_loss, early_other_loss: of both batches on the weights of the checkpoint.
    """

    checkpoint: int
    unused: tuple[str, ...]
    steps: tuple[ReplayedStep, ...]
    own: ReplayedStep
    nats: np.ndarray
    other_step: int
    other_loss: float
    other_grad_norm: float
    other_nats: np.ndarray | None
    other_loss_after: float
    early_loss: float
    early_other_loss: float
    layers: tuple[LayerNorms, ...]
    device: str
    precision: str
    notes: tuple[str, ...]
