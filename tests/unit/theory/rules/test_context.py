"""Forms of context parallelism that cannot be are refused with the way out, and the others are not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.theory.rules.test_layout import ARCH, TRAIN, problems

from ingot.schema.parallel import Parallel
from ingot.theory.context import resolve_context, token_multiple
from ingot.theory.rules.context import cut_of_sequences, legal_forms

# 8 query and 2 key/value heads, sequences of 64 tokens.
CASES = [
    ({"context": "ring"}, "parallel.context", "'ring' without context parallelism (cp = 1); set parallel.cp to 2"),
    ({"context_layout": "striped"}, "parallel.context_layout", "without context parallelism (cp = 1)"),
    ({"ulysses": 2}, "parallel.ulysses", "2 without context parallelism (cp = 1)"),
    ({"cp": 4, "ulysses": 2, "context": "ring"}, "parallel.ulysses", 'set parallel.context = "usp", or remove it'),
    ({"cp": 4, "ulysses": 2}, "parallel.ulysses", "2 with context = 'auto', which has no grid"),
    (
        {"cp": 2, "context": "ulysses", "context_layout": "striped"},
        "parallel.context_layout",
        'deals out heads and has no ring; set parallel.context to "ring" or "usp"',
    ),
    ({"cp": 2, "context_layout": "contiguous"}, "parallel.context_layout", "may choose a form without a ring"),
    ({"cp": 8, "context": "usp", "ulysses": 3}, "parallel.ulysses", "that divide it; nearest: 2 or 4"),
    ({"cp": 8, "context": "usp", "ulysses": 8}, "parallel.ulysses", 'is 8 with context = "usp": a grid of cp = 8'),
    ({"cp": 3, "context": "usp", "ulysses": 2}, "parallel.ulysses", 'none fits; use context = "ring", or another cp'),
    ({"cp": 3, "context": "usp"}, "parallel.ulysses", 'is open with context = "usp": a grid of cp = 3 ranks'),
    ({"cp": 9, "context": "usp"}, "parallel.ulysses", "deals out the 8 query heads, so it divides them"),
    (
        {"cp": 8, "tp": 4, "context": "usp", "ulysses": 4},
        "parallel.ulysses",
        "deals out the 2 query heads of a rank of tp = 4, so it divides them; nearest: 2",
    ),
    (
        {"cp": 16, "context": "ulysses"},
        "parallel.cp",
        '16 with context = "ulysses" does not divide the 8 query heads; nearest: 8, or context = "ring"',
    ),
    ({"cp": 8, "tp": 2, "context": "ulysses"}, "parallel.cp", "the 4 query heads of a rank of tp = 2; nearest: 4, or"),
    (
        {"cp": 4, "context": "ring", "seq_len": 60},
        "train.seq_len",
        "60 is not a multiple of 8: equal parts for the 4 ranks of cp, in a ring two each (zigzag); nearest: 56 or 64, "
        'or context_layout = "contiguous" or "striped"',
    ),
    ({"cp": 4, "context": "ring", "context_layout": "striped", "seq_len": 62}, "train.seq_len", "nearest: 60 or 64"),
    (
        {"cp": 4, "context": "ulysses", "seq_len": 62},
        "train.seq_len",
        "not a multiple of 4: equal parts for the 4 ranks",
    ),
    ({"cp": 4, "context": "usp", "ulysses": 2, "seq_len": 62}, "train.seq_len", "62 is not a multiple of 4"),
    ({"cp": 4, "seq_len": 62}, "parallel.cp", "62 is not a multiple of 8, as a ring (zigzag) needs; nearest:"),
    ({"cp": 3, "seq_len": 63}, "parallel.cp", "no other form can deal out the 8 query heads; nearest:"),
    ({"cp": 4, "tp": 8, "seq_len": 40}, "parallel.tp", "40 / cp 4 = 10 tokens"),
]


@pytest.mark.parametrize(("settings", "key", "way_out"), CASES, ids=[f"{k}-{i}" for i, (_, k, _) in enumerate(CASES)])
def test_an_impossible_form_is_refused_with_the_way_out(settings, key, way_out):
    found = problems(**settings)
    assert any(way_out in message for message in found.get(key, [])), found


LEGAL = [
    {"cp": 4},
    {"cp": 32, "context": "ring"},
    {"cp": 8, "context": "ulysses"},  # each key/value head on four ranks
    {"cp": 8, "context": "ulysses", "seq_len": 56},
    {"cp": 4, "context": "usp", "ulysses": 2, "seq_len": 60},
    {"cp": 4, "context": "usp"},
    {"cp": 4, "tp": 2, "context": "ulysses"},
    {"cp": 16, "context": "usp", "ulysses": 8},
    {"cp": 4, "context": "ring", "context_layout": "contiguous", "seq_len": 60},
    {"cp": 4, "seq_len": 60},  # "auto" has Ulysses
    {"cp": 3, "context": "ring", "seq_len": 66},
    {"cp": 4, "tp": 8, "sequence": False, "seq_len": 40},
]


@pytest.mark.parametrize("settings", LEGAL, ids=str)
def test_legal_forms_have_no_problem(settings):
    assert problems(**settings) == {}


@given(st.integers(2, 16), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 64))
def test_a_form_is_refused_by_some_rule_or_possible(cp, tp, kv_heads, half):
    """legal_forms and the rules say the same of every form, and "auto" is refused where none is left."""
    arch, train = replace(ARCH, num_kv_heads=kv_heads), replace(TRAIN, seq_len=2 * half)
    legal = legal_forms(arch, train, Parallel(cp=cp, tp=tp))
    settings = {"cp": cp, "tp": tp, "seq_len": 2 * half, "sequence": False}
    assert ("parallel.cp" in problems(replace(arch, max_seq_len=2 * half), **settings)) == (not legal)
    for ulysses in range(1, cp + 1):
        context = "ring" if ulysses == 1 else "ulysses" if ulysses == cp else "usp"
        given = {"context": context} | ({"ulysses": ulysses} if context == "usp" else {})
        refused = problems(replace(arch, max_seq_len=2 * half), **settings, **given)
        assert bool(refused) == ((context, ulysses) not in legal), refused


@given(st.integers(2, 16), st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from([2, 3, 4, 6, 8, 12]))
def test_rules_and_trainer_cut_sequences_alike(cp, tp, sequence, times):
    """The trainer requires the same of a length as the rules, and "auto" becomes a form that they allow."""
    seq_len = times * cp * tp
    parallel, train = Parallel(cp=cp, tp=tp, sequence=sequence), replace(TRAIN, seq_len=seq_len)
    if not (legal := legal_forms(ARCH, train, parallel)):
        return
    resolved = resolve_context(ARCH, train, parallel)
    assert (resolved.context, resolved.ulysses) in legal
    assert token_multiple(resolved) == cut_of_sequences(resolved)


@pytest.mark.parametrize(
    ("parallel", "form"),
    [
        (Parallel(), ""),
        (Parallel(cp=4, context="ring"), "ring"),
        (Parallel(cp=4, context="ulysses"), "ulysses"),
        (Parallel(cp=8, context="usp", ulysses=2), "usp, ulysses 2"),
    ],
)
def test_the_form_in_words(parallel, form):
    assert resolve_context(ARCH, TRAIN, parallel).context_form == form
