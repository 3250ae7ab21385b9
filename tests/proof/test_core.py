"""The core of the matrix, and what the matrix is made of. All of it: make proof."""

from collections import Counter

import pytest

from .cases import AXES, KINDS, Case, all_cases, core_cases
from .compare import prove


def marks(case: Case) -> list[pytest.MarkDecorator]:
    """`make test` proves one form on two ranks at most, the slow tests all on eight ranks at most."""
    if case.ranks <= 2 and " x " not in case.name:
        return []
    return [pytest.mark.slow if case.ranks <= 8 else pytest.mark.nightly]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{case.ranks}-{case.name}", marks=marks(case)) for case in core_cases()],
)
def test_equals_one_process(ranks, case: Case):
    assert prove(ranks, case).wrong == {}


def test_the_matrix_is_as_large_as_it_claims():
    cases, refused = all_cases()
    kinds = Counter(case.kind for case in cases)
    assert len(cases) >= 120 and kinds["triple"] >= 30 and kinds["four axes"] >= 8
    assert {case.kind for case in core_cases()} == set(KINDS) and {case.ranks for case in cases} >= {2, 4, 8, 16}
    names = {case.name for case in cases} | {refusal.name for refusal in refused}
    axes = list(AXES.values())
    for number, axis in enumerate(axes):
        for form in axis:
            assert form.name in names
            for other in (other for later in axes[number + 1 :] for other in later):
                pair = f"{form.name} x {other.name}"
                assert pair in names or _one_contains_the_other(form, other), pair


def _one_contains_the_other(form, other) -> bool:
    return bool(other.settings) and other.settings.items() <= form.settings.items()


def test_what_is_refused_is_refused_by_a_rule():
    """Written out, so that a rule that refuses too much cannot hollow out the matrix."""
    _, refused = all_cases()
    zero_3 = [form.name for form in AXES["data"] if form.settings.get("zero") == 3]
    halves = ("zb_h1", "interleaved_zb", "zb_v", "dualpipe_v")
    shards = [form.name for form in AXES["data"] if "dp_shard" in form.settings]
    expected = {f"{a} x {b}": "computes weight gradients after the hooks" for a in zero_3 for b in halves}
    expected |= {f"canonical x {b}": "mixes the parts of the batch" for b in halves}
    expected |= {f"{a} x canonical": "sums whole gradients" for a in shards}
    expected["zero-3 on the host x offload nvme"] = 'needs offload = "cpu"'
    assert {refusal.name for refusal in refused} == set(expected)
    for refusal in refused:
        assert expected[refusal.name] in refusal.rules[0]
