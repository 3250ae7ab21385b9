"""Faults in the contracts of plug-ins: the registration of parts, their modules, the results of update rules."""

from .mutant import Mutant

_LOAD = "tests/unit/plugins/test_load.py"
_REGISTRY = "tests/unit/plugins/test_registry.py"
_FILTER = "tests/unit/plugins/test_data_filter.py"
_RULES = "tests/unit/trainer/optim/test_plugin_rules.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="part-replaces-another",
        what="a part of a plug-in silently replaces the part of the same name of another plug-in",
        file="plugins/registry.py",
        before="if taken := self._entries.get(part.name):",
        after="if (taken := self._entries.get(part.name)) and taken.module == INGOT:",
        tests=(f"{_REGISTRY}::test_a_taken_name_is_refused",),
    ),
    Mutant(
        name="settings-of-any-class",
        what="a part may have settings of a class whose fields cannot be checked",
        file="plugins/registry.py",
        before="not (isinstance(part.settings, type) and is_dataclass(part.settings)):",
        after="not (isinstance(part.settings, type) or is_dataclass(part.settings)):",
        tests=(f"{_REGISTRY}::test_settings_that_cannot_be_checked_are_refused",),
    ),
    Mutant(
        name="plug-in-shadowed",
        what="a plug-in beside the run file is not imported, because an installed module has its name",
        file="plugins/load.py",
        before='(folder / f"{first}.py", folder / first / "__init__.py") if path.exists()]:',
        after='(folder / f"{first}.py", folder / first / "__init__.py") if path.is_dir()]:',
        tests=(f"{_LOAD}::test_a_plug_in_must_not_have_the_name_of_another_module",),
    ),
    Mutant(
        name="plug-in-of-another-folder",
        what="a module beside the file of an earlier run is imported, which other processes of this run do not find",
        file="plugins/load.py",
        before="if any(_is_beside(found, module, other) for other in _folders):",
        after="if any(_is_beside(found, module, other) for other in _folders[:0]):",
        tests=(f"{_LOAD}::test_a_module_beside_another_run_file_is_missing",),
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
        name="ending-of-two-formats",
        what="two formats may claim the same files: the order of their registration decides who reads them",
        file="plugins/source.py",
        before="if ending in taken and part.name not in self:",
        after="if ending in taken and part.name in self:",
        tests=("tests/unit/plugins/test_data_source.py::test_an_ending_belongs_to_one_format",),
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
