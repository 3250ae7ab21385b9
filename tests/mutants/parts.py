"""Faults in the contracts of plug-ins: the registration of parts, their modules, the results of update rules."""

from .mutant import Mutant

_LOAD = "tests/unit/plugins/test_load.py"
_REGISTRY = "tests/unit/plugins/test_registry.py"
_FILTER = "tests/unit/plugins/test_data_filter.py"
_RULES = "tests/unit/trainer/optim/test_plugin_rules.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="settings-of-any-class",
        what="a part may have settings of a class whose fields cannot be checked",
        file="plugins/registry.py",
        before="not (isinstance(part.settings, type) and is_dataclass(part.settings)):",
        after="not (isinstance(part.settings, type) or is_dataclass(part.settings)):",
        tests=(f"{_REGISTRY}::test_settings_that_cannot_be_checked_are_refused",),
    ),
    Mutant(
        name="filter-named-as-a-stage",
        what="a filter may have the name of a stage of ingot, and both have one row in the funnel",
        file="plugins/filters.py",
        before="if part.name in STAGE_NAMES and part.name not in self:",
        after="if part.name in _OWN and part.name not in self:",
        tests=(f"{_FILTER}::test_a_wrong_registration_is_refused",),
    ),
    Mutant(
        name="state-left-out",
        what="a rule of a plug-in may leave out a tensor of its state, which then keeps the value of the step before",
        file="plugins/optimizer.py",
        before='if old.keys() - {"step"} != new.keys() - {"step"}:',
        after='if new.keys() - {"step"} - old.keys():',
        tests=(f"{_RULES}::test_what_a_rule_returns_is_like_what_it_was_given",),
    ),
    Mutant(
        name="update-broadcast",
        what="a rule of a plug-in may return one row as the new value of a matrix, which is broadcast into it",
        file="plugins/optimizer.py",
        before="if new.shape != old.shape:",
        after="if new.dim() != old.dim():",
        tests=(f"{_RULES}::test_an_update_has_the_shape_of_its_matrix",),
    ),
]
