"""Step callbacks: what a run calls on every rank at fixed points of a step, besides its own work."""

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ingot.plugins.piece import ParameterShard
from ingot.plugins.registry import Part, Reference, Registry
from ingot.schema.run import RunConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Verdict(enum.Enum):
    """The ways to continue after a step. SKIP: the step's update was vetoed; report this and continue.

    ROLL_BACK: continue from the newest checkpoint. STOP: save and end, as after a stop request.
    """

    CONTINUE = enum.auto()
    SKIP = enum.auto()
    ROLL_BACK = enum.auto()
    STOP = enum.auto()


@dataclass(frozen=True)
class StepFinding:
    """The findings of the guard in one step. kinds: "loss spike" and others (trainer/guard/step_judge.py).

    loss_sigmas, norm_sigmas: deviations above the median of healthy steps, of the loss and of the logarithm of the
    gradient norm. norm_factor: the gradient norm in units of its median. All are 0 before there are enough such steps.
    """

    kinds: tuple[str, ...]
    loss_sigmas: float
    norm_sigmas: float
    norm_factor: float


@dataclass(frozen=True)
class StepNumbers:
    """The result of a step as numbers, equal on every rank. loss: nats per token, mean over the global batch.

    skipped: the step changed no weights. passed: its data were passed by decision, so there is no loss and no gradient:
    both are NaN. finding: what the guard found; None: nothing.
    """

    step: int
    loss: float
    grad_norm: float
    skipped: bool
    passed: bool = False
    finding: StepFinding | None = None

    @property
    def is_finite(self) -> bool:
        """True if loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class CallbackRun:
    """The run as callbacks see it. pieces: this rank's blocks of the parameters, the same objects in every step.

    sum_over_ranks: returns the sum of a tensor over all ranks. Collective. Count a piece only where it is `owner`.
    loss_scale: in fp16 the live scalar by which gradients are multiplied at `on_gradients`; None in other precisions.
    """

    config: RunConfig
    rank: int
    world_size: int
    device: "torch.device"
    pieces: Sequence[ParameterShard]
    sum_over_ranks: "Callable[[Tensor], Tensor]"
    loss_scale: "Tensor | None" = None


class StepCallback:
    """The contract, as a base class: every method does nothing. All are called on every rank, in the same order.

    A callback that must continue where it stopped keeps its state in the tensors of `tensors`, which are saved and
    loaded in place, and in the JSON of `record`. Nothing that it gets may be kept beyond the call, except the pieces.
    """

    def __init__(self, run: CallbackRun, options: Any):
        """Make the callback at the start of an attempt. options: an instance of the part's `settings`."""

    def on_gradients(self, step: int) -> None:
        """Look at `grad` of the pieces: the mean over the batch, before clipping; times the loss scale in an fp16 run.
        Must not wait for the device."""

    def on_update(self, step: int) -> None:
        """Look at `value` of the pieces after the optimizer's step. Must not wait for the device."""

    def on_line(self, steps: Sequence[StepNumbers]) -> Mapping[str, float]:
        """Return own metrics at a log line, for the `metrics` event; rank 0's are written. steps: those since the
        previous line."""
        return {}

    def verdict(self, steps: Sequence[StepNumbers]) -> Verdict:
        """Return CONTINUE, ROLL_BACK or STOP after a log line; the same on every rank."""
        return Verdict.CONTINUE

    def tensors(self) -> "Mapping[str, Tensor | Mapping[str, Tensor]]":
        """Return the live tensors that checkpoints hold: name -> a tensor with the same value on all ranks, or name ->
        piece name -> a tensor of the piece's shape. The names and shapes never change."""
        return {}

    def record(self) -> Any:
        """Return further state as JSON values; rank 0's is saved."""

    def restore(self, record: Any) -> None:
        """Take over a saved `record`. Not called if the checkpoint has none."""


@dataclass(frozen=True, kw_only=True)
class CallbackPart(Part):
    """A callback, chosen by a table [callbacks.NAME].

    make: a subclass of StepCallback, or a reference to one. pieces: the number of tensors in `tensors` that are given
    by piece, each as large as the rank's pieces together: the planner counts their memory.
    """

    make: Reference
    pieces: int = 0


class CallbackRegistry(Registry[CallbackPart]):
    """The registry of callbacks, whose classes have the methods of StepCallback."""

    def broken(self, part: CallbackPart) -> Iterator[str]:
        if isinstance(part.make, type) and not issubclass(part.make, StepCallback):
            yield f"make = {part.make.__qualname__} is not a subclass of StepCallback"


CALLBACKS = CallbackRegistry("callback", "[callbacks.NAME]")
