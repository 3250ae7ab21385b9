"""Loss terms: what is minimized besides the cross entropy. A term is a function of the logits of each token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingot.plugins.registry import Part, Reference, Registry
from ingot.ranges import Factor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class VocabularyPart:
    """The part of the vocabulary whose logits this rank has. first: the id of its first column.

    sum, largest: the sum or the largest of a value [M] over all parts, the same on every rank. Without tensor
    parallelism there is one part, and both return their argument.
    """

    first: int
    sum: "Callable[[Tensor], Tensor]"
    largest: "Callable[[Tensor], Tensor]"


@dataclass(frozen=True, kw_only=True)
class LossTermPart(Part):
    """A loss term, chosen by a table [loss.NAME] with its `weight`: the run minimizes the mean over tokens of nats plus
    weight x the mean of the term. The logged loss and held-out scores stay nats; the mean of each term is in `metrics`.

    term: term(logits, targets, vocabulary, options) -> (values, slope), without gradients recorded.
      logits: [M, V], float32 (float64 in a float64 run), softcapped, those of `vocabulary`; they must not change.
      targets: [M], ids in the whole vocabulary. values: [M], the same on all ranks. slope: [M, V], the derivative of
      each token's value with respect to its logits here.
    tensors: the number of tensors of the shape and dtype of the logits that exist at a time in a call, for the planner.
    """

    term: Reference
    tensors: int = 3


@dataclass(frozen=True, kw_only=True)
class TermWeight:
    """The setting that every loss term has. weight: its factor beside the cross entropy in nats."""

    weight: Factor


LOSS_TERMS = Registry[LossTermPart]("loss term", "[loss.NAME]")
