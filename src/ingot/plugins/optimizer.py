"""Optimizers: how a parameter changes, given its gradient. The run does all else: sharding, clipping, checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingot.errors import RunFailed
from ingot.plugins.contract import Contract
from ingot.plugins.registry import Part, Reference, Registry

if TYPE_CHECKING:
    from torch import Tensor

State = Mapping[str, "Tensor"]


class UpdateRule(Contract):
    """The contract of an elementwise update: it works on any piece of a parameter, because no number looks at another.

    state: the names of the tensors that it keeps for each piece, which begin as zeros of the piece's shape and dtype
    (float32, or float64). Besides them every state has "step", a float32 scalar: the number of this update, from 1.
    """

    state: tuple[str, ...] = ()
    required = (("new", "update"),)

    def new(
        self, value: "Tensor", gradient: "Tensor", state: State, lr: float, *, decays: bool
    ) -> "tuple[Tensor, State]":
        """Return the new value and the new state of a piece. The arguments must not change. decays: weight decay acts
        on the parameter."""
        raise NotImplementedError

    def update(
        self,
        values: "Sequence[Tensor]",
        gradients: "Sequence[Tensor]",
        states: "Sequence[dict[str, Tensor]]",
        lr: float,
        *,
        decays: bool,
        found_inf: "Tensor | None" = None,
    ) -> None:
        """Update pieces in place, without waiting for the device; nothing changes if the scalar `found_inf` is 1.

        A rule whose kernel takes many pieces at once overrides this method instead of `new`.
        """
        for value, gradient, state in zip(values, gradients, states, strict=True):
            state["step"].add_(1 if found_inf is None else 1 - found_inf)
            new_value, new_state = self.new(value, gradient, state, lr, decays=decays)
            require_like("new value", "a piece", new_value, value)
            keep(value, new_value, found_inf)
            keep_state("a piece", state, new_state, found_inf)


class MatrixRule(UpdateRule):
    """The contract of an update that looks at whole matrices, under any sharding: pieces, then matrix, then pieces."""

    required = (("direction",), ("of_matrix",), ("apply",))

    def direction(self, gradient: "Tensor", state: State) -> "tuple[Tensor, State]":
        """Return the direction of a piece and its new state, elementwise. The arguments must not change."""
        raise NotImplementedError

    def of_matrix(self, direction: "Tensor") -> "Tensor":
        """Return the update of one whole matrix, [rows, columns], from its direction. An expert is a matrix."""
        raise NotImplementedError

    def apply(self, value: "Tensor", update: "Tensor", lr: float, *, decays: bool) -> "Tensor":
        """Return the new value of a piece, elementwise. update: the piece's part of what `of_matrix` returned."""
        raise NotImplementedError


def keep(old: "Tensor", new: "Tensor", found_inf: "Tensor | None") -> None:
    """Overwrite `old` with `new`, or with itself if the scalar `found_inf` is 1."""
    old.copy_(new if found_inf is None else old.where(found_inf.bool(), new))


def keep_state(what: str, old: "Mapping[str, Tensor]", new: State, found_inf: "Tensor | None") -> None:
    """Overwrite the state `old`, without "step", with `new`. Raises RunFailed unless both have the same tensors."""
    if old.keys() - {"step"} != new.keys() - {"step"}:
        raise RunFailed(
            "E-OPTIMIZER-UPDATE",
            f"the rule of {what} returned the state {sorted(new)}, but it keeps {sorted(old.keys() - {'step'})}",
            rule="a rule returns all tensors of its state (plugins/optimizer.py)",
            fix="correct the plug-in of optim.kind",
        )
    for name in new.keys() - {"step"}:
        require_like(f"state {name!r}", what, new[name], old[name])
        keep(old[name], new[name], found_inf)


def require_like(made: str, of: str, new: "Tensor", old: "Tensor") -> None:
    """Raise RunFailed unless `new` has the shape of `old`: it would be broadcast into it."""
    if new.shape != old.shape:
        raise RunFailed(
            "E-OPTIMIZER-UPDATE",
            f"the {made} of {of} has the shape {list(new.shape)}, must have {list(old.shape)}",
            rule="what a rule returns has the shape of what it replaces (plugins/optimizer.py)",
            fix="correct the plug-in of optim.kind",
        )


def _no_flops(rows: int, columns: int) -> float:
    return 0.0


@dataclass(frozen=True, kw_only=True)
class OptimizerPart(Part):
    """An optimizer, chosen by `optim.kind`.

    make(optim, options): returns a function (parameter name, its whole shape) -> the UpdateRule of that parameter.
      optim: the section of the run file. options: an instance of `settings`.
    moments(name, dims): the number of state tensors of a parameter with `dims` dimensions: for the planner, without
      torch, and compared with the rule when a run starts.
    whole_matrices: some rule is a MatrixRule. Such state cannot be offloaded.
    matrix_flops(rows, columns): the floating-point operations of `of_matrix` for one matrix, for the planner.
    matrix_tensors: the number of tensors of the size of its matrix that exist at a time in a call of `of_matrix`, the
      result included, the argument not, for the planner.
    """

    make: Reference
    moments: Callable[[str, int], int]
    whole_matrices: bool = False
    matrix_flops: Callable[[int, int], float] = _no_flops
    matrix_tensors: int = 5


def _two(name: str, dims: int) -> int:
    return 2


OPTIMIZERS = Registry[OptimizerPart](
    "optimizer",
    "optim.kind",
    (OptimizerPart(name="adamw", make="ingot.trainer.optim.adamw:adamw_rules", moments=_two),),
)
RuleOf = Callable[[str, tuple[int, ...]], UpdateRule]
