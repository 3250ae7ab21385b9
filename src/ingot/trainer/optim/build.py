"""The optimizer of a run on one rank, made from the registered one that `optim.kind` names."""

from collections.abc import Iterable
from pathlib import Path

from ingot.errors import ConfigError
from ingot.plugins.optimizer import OPTIMIZERS, MatrixRule, OptimizerPart, RuleOf, UpdateRule
from ingot.plugins.piece import ParameterShard
from ingot.plugins.registry import options_of, resolve
from ingot.schema.parallel import Parallel
from ingot.schema.run import Optim
from ingot.trainer.optim.matrices import Matrices
from ingot.trainer.optim.offload import OffloadedOptimizer
from ingot.trainer.optim.optimizer import Optimizer


def optimizer_rules(optim: Optim) -> RuleOf:
    """Return the function from a parameter's name and whole shape to its update rule.

    The function raises ConfigError for a rule that is not what its plug-in declared.
    """
    part = OPTIMIZERS[optim.kind]
    rule_of = resolve(part.make)(optim, options_of(part, optim.options))

    def checked(name: str, shape: tuple[int, ...]) -> UpdateRule:
        rule = rule_of(name, shape)
        if found := _undeclared(part, rule, name, shape):
            raise ConfigError(
                "E-OPTIMIZER-RULE",
                f"optimizer {part.name!r}: the rule of {name} {found}",
                rule="an optimizer's rules keep exactly what its part declares, because the planner counts that",
                fix="correct the plug-in: `moments` and `whole_matrices` of its OptimizerPart, or its rules",
                optimizer=part.name,
                parameter=name,
            )
        return rule

    return checked


def _undeclared(part: OptimizerPart, rule: object, name: str, shape: tuple[int, ...]) -> str:
    """Return how a rule differs from what its optimizer declares, or ""."""
    if not isinstance(rule, UpdateRule):
        return f"is a {type(rule).__name__}, not an UpdateRule"
    if isinstance(rule, MatrixRule) and not part.whole_matrices:
        return "looks at whole matrices, which was not declared"
    if isinstance(rule, MatrixRule) and len(shape) != 2:
        return f"looks at whole matrices, but the parameter has {len(shape)} dims"
    if len(rule.state) != part.moments(name, len(shape)):
        kept, declared = len(rule.state), part.moments(name, len(shape))
        return f"keeps {kept} tensor{'s' if kept != 1 else ''}, but declares {declared}"
    return ""


def build_optimizer(
    shards: Iterable[ParameterShard],
    rule_of: RuleOf,
    parallel: Parallel,
    base: Path,
    matrices: Matrices | None = None,
) -> Optimizer:
    """Build the optimizer of these shards.

    base: the folder to which `parallel.offload_folder` is relative. The result should be on a local disk; ranks may
    share it. matrices: needed if some rule looks at whole matrices.
    """
    if parallel.offload == "none":
        return Optimizer(shards, rule_of, matrices)
    if parallel.offload == "cpu":
        return OffloadedOptimizer(shards, rule_of)
    return OffloadedOptimizer(shards, rule_of, folder=base / parallel.offload_folder)
