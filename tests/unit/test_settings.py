"""Every setting of a run file, a cluster file and a data recipe is read by something outside its own rules.

The test searches the source for `RECEIVER.setting`, where the receiver has one of the names that values of the
setting's type have in this code. A property of a schema reads the settings that it is computed from.
"""

import ast
import dataclasses
import functools
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import ingot
from ingot.data.build.recipe import DataRecipe
from ingot.data.filters.junk import MEASURES
from ingot.data.filters.quality import QualityRules
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig

SOURCE = Path(ingot.__file__).parent
# Names of variables and attributes, by type. Rules of a data stage are `rules` in the class or function of the stage.
RECEIVERS = {
    "RunConfig": {"config", "run"},
    "Arch": {"arch", "model"},
    "Evaluate": {"evaluate", "wanted"},
    "BackgroundEvaluation": {"settings"},
    "WatchSettings": {"watch"},
    "Guard": {"guard"},
    "MetricSettings": {"metrics"},
    "LoadFilter": {"rules"},
    "UrlChannel": {"channel"},
    "EmailChannel": {"email"},
    "Cluster": {"cluster"},
    "DataRecipe": {"recipe"},
}
STAGE = {"rules", "limits"}
# Settings that are read by a computed name: setting -> the file, and the text in it that reads them.
_BY_RULE = ("data/filters/gopher.py", "getattr(rules, rule)")
COMPUTED = {
    "preset": ("data/build/recipe.py", 'values.get("preset"'),
    **{f"quality.gopher.{name}": _BY_RULE for name in ("symbol_ratio", "bullet_lines", "ellipsis_lines")},
    **{
        f"quality.gopher_repetition.{name}": _BY_RULE
        for name in dataclasses.asdict(QualityRules().gopher_repetition)
        if name != "enabled"
    },
    **{f"junk.{name}": ("data/filters/junk.py", "getattr(self.rules, name)") for name in MEASURES},
}


def settings(kind: type, section: str = "") -> Iterator[tuple[str, type, str]]:
    """Yield (key, type that has the field, field) of each setting of `kind` and its sections."""
    for name, hint in typing.get_type_hints(kind).items():
        if name not in {field.name for field in dataclasses.fields(kind)}:
            continue
        if dataclasses.is_dataclass(hint):
            yield from settings(typing.cast(type, hint), f"{section}{name}.")
        else:
            yield section + name, kind, name


@functools.cache
def reads() -> set[tuple[str, str]]:
    """Return (receiver, attribute) of each attribute that the source reads, where not for a rule about its value."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        _collect(ast.parse(path.read_text()), "", found)
    return found


def _collect(node: ast.AST, owner: str, found: set) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and child.name.endswith(("problems", "_below_least")):
            continue
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
            value = child.value
            receiver = getattr(value, "attr", getattr(value, "id", ""))
            found.add((owner if receiver == "self" else receiver.strip("_"), child.attr))
        _collect(child, child.name if isinstance(child, ast.ClassDef) else owner, found)


ALL = [one for root in (RunConfig, Cluster, DataRecipe) for one in settings(root)]


@pytest.mark.parametrize("setting", ALL, ids=lambda one: f"{one[1].__name__}.{one[2]}")
def test_a_setting_is_read(setting):
    key, kind, name = setting
    section = key.split(".")[-2] if "." in key else ""
    others = STAGE if kind.__module__.startswith("ingot.data") else set()
    receivers = {kind.__name__, section} | RECEIVERS.get(kind.__name__, others)
    if key in COMPUTED:
        file, text = COMPUTED[key]
        assert text in (SOURCE / file).read_text()
    else:
        assert receivers & {receiver for receiver, attribute in reads() if attribute == name}, key
