"""Layouts of four to six features that nobody chose: other ones in every run.

The seed is printed; INGOT_PROOF_SEED repeats a run.
"""

import os
import random
from collections.abc import Iterator

import pytest

from .cases import AXES, CONTEXT, EXPERT_MODELS, EXPERTS, OTHER_MODELS, Case, Form, compose
from .compare import prove

MOST_RANKS = 8
MODELS = tuple(Form(name, model=name) for name in OTHER_MODELS)
FEATURES = AXES | {"context": CONTEXT, "experts": EXPERTS, "model": MODELS}


def draw(seed: int) -> Iterator[Case]:
    """Yield legal layouts without end. A feature never undoes another one, and ep has a model with experts."""
    chosen = random.Random(seed)
    while True:
        axes = chosen.sample(list(FEATURES), chosen.randint(4, 6))
        forms = [chosen.choice(FEATURES[axis]) for axis in axes]
        if "experts" in axes:
            forms = [form for form, axis in zip(forms, axes, strict=True) if axis != "model"]
            model = chosen.choice(list(EXPERT_MODELS))
            forms.append(Form(model, model=model))
        settings = [key for form in forms for key in form.settings if key != "zero"]
        case = compose(*forms, number=chosen.randrange(3))
        if len(set(settings)) == len(settings) and len(forms) >= 4 and case.ranks <= MOST_RANKS and not case.problems():
            yield case


@pytest.mark.parametrize(
    "layouts", [pytest.param(4, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.nightly)]
)
def test_layouts_nobody_chose_equal_one_process(ranks, layouts: int):
    seed = int(os.environ.get("INGOT_PROOF_SEED") or random.SystemRandom().randrange(10**6))
    print(f"INGOT_PROOF_SEED={seed}")
    cases = draw(seed)
    for case in (next(cases) for _ in range(layouts)):
        outcome = prove(ranks, case)
        print(f"{case.ranks:3d} ranks  {outcome.seconds:4.1f} s  {case.name}")
        assert outcome.wrong == {}, f"INGOT_PROOF_SEED={seed}: {case.name}, {case.parallel}"
