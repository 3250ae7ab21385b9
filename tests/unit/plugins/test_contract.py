"""Parts that lack something of their contract: it is named when they are registered, with file and line."""

from pathlib import Path

import pytest
from tests.expect import named, refused

from ingot.plugins.load import load_plugins
from ingot.plugins.optimizer import OPTIMIZERS

HEAD = """from abc import ABC
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback
from ingot.plugins.filters import FILTERS, Filter
from ingot.plugins.optimizer import MatrixRule, OPTIMIZERS, OptimizerPart, UpdateRule
from ingot.plugins.schedule import SCHEDULES, SchedulePart
"""
LINE = len(HEAD.splitlines()) + 1
NEW = "    def new(self, value, gradient, state, lr, *, decays): return value, {}\n"
DIRECTION = "    def direction(self, gradient, state): return gradient, {}\n"
OF_MATRIX = "    def of_matrix(self, direction): return direction\n"
APPLY = "    def apply(self, value, update, lr, *, decays): return value\n"
SOME = "    some = 1\n"


def load(lab, text: str) -> Path:
    folder = lab(parts=HEAD + text)
    load_plugins(["parts"], folder)
    return folder


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (f"class Rule(UpdateRule):\n{SOME}", ["new", "update"]),
        (f"class Rule(MatrixRule):\n{DIRECTION}{OF_MATRIX}", ["apply"]),
        (f"class Rule(MatrixRule):\n{NEW}{APPLY}", ["direction", "of_matrix"]),
        (f"class Base(UpdateRule, ABC):\n{SOME}\nclass Rule(Base):\n{SOME}", ["new", "update"]),
    ],
)
def test_a_rule_without_a_method_of_its_contract(lab, text, missing):
    line = LINE + text.splitlines().index(next(x for x in text.splitlines() if x.startswith("class Rule")))
    with refused("E-PLUGIN-CONTRACT", part="Rule", missing=missing, line=line) as caught:
        load(lab, text)
    assert caught.value.facts["file"] == str(lab() / "parts.py")
    assert named([str(caught.value)], *(f"`{name}`" for name in missing), f"parts.py:{line}")


@pytest.mark.parametrize(
    "text",
    [
        f"class Rule(UpdateRule):\n{NEW}",
        "class Rule(UpdateRule):\n    def update(self, *args, **more): pass\n",
        f"class Rule(MatrixRule):\n{DIRECTION}{OF_MATRIX}{APPLY}",
        f"class Base(UpdateRule, ABC):\n{SOME}\nclass Rule(Base):\n{NEW}",
        f"class Mixed:\n{NEW}\nclass Rule(Mixed, UpdateRule):\n{SOME}",
        f"class First(UpdateRule):\n{NEW}\nclass Rule(First):\n{SOME}",
    ],
)
def test_a_rule_with_the_methods_of_its_contract(lab, text):
    load(lab, text + "\nRule()\n")


SCHEDULE = "SCHEDULES.register(SchedulePart(name='odd', {}))"
OPTIMIZER = "OPTIMIZERS.register(OptimizerPart(name='odd', {}))"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (SCHEDULE.format("rate=1e-3"), "rate"),
        (SCHEDULE.format("rate=lambda step, steps: 1.0"), "rate"),
        (SCHEDULE.format("rate=lambda a, b, c, d, e, f: 1.0"), "rate"),
        (SCHEDULE.format("rate=lambda *args: 1.0, problems=None"), "problems"),
        (OPTIMIZER.format("make='module.name', moments=lambda name, dims: 1"), "make"),
        (OPTIMIZER.format("make=None, moments=lambda name, dims: 1"), "make"),
        (OPTIMIZER.format("make='m:f', moments=2"), "moments"),
        ("CALLBACKS.register(CallbackPart(name='odd', make=object))", "make"),
        ("FILTERS.register(Filter(name='odd', make=object))", "make"),
        ("FILTERS.register(Filter(name='odd', make='m:f', files='a.txt'))", "files"),
    ],
)
def test_a_part_whose_function_cannot_be_called(lab, text, field):
    with refused("E-PLUGIN-CONTRACT", part="odd", line=LINE) as caught:
        load(lab, text)
    assert named([caught.value.found], "'odd'", field, f"parts.py:{LINE}")


@pytest.mark.parametrize(
    "more", ["moments=lambda name, *_: 1", "moments=max", "moments=divmod", "moments=lambda name, dims, base=2: base"]
)
def test_functions_with_other_signatures_that_can_be_called(lab, more):
    load(lab, OPTIMIZER.format(f"make='m.n:f', {more}"))
    assert "odd" in OPTIMIZERS


@pytest.mark.parametrize(
    "text",
    [
        "class Own(StepCallback): pass\nCALLBACKS.register(CallbackPart(name='odd', make=Own))",
        "CALLBACKS.register(CallbackPart(name='odd', make=lambda run, options: None))",
        "class Own:\n    def __call__(self, document): pass\n"
        "class Stage(Own): pass\nFILTERS.register(Filter(name='odd', make=Stage))",
    ],
)
def test_classes_and_functions_that_fulfil_their_contract(lab, text):
    load(lab, text)
