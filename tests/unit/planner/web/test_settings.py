"""The words of a link, which may come from anyone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expect import refused

from ingot.planner.web.settings import FIELDS, MAX_DEVICES, WORDS, PageSettings, link_pairs, read_settings


def test_words_as_people_write_them():
    state = read_settings(
        [("params", "70b"), ("tokens", "1.5T"), ("mfu", "45%"), ("price", "4"), ("cluster", "128x8xh100")]
    )
    assert (state.params, state.tokens, state.mfu, state.price) == (70 * 10**9, 1_500_000_000_000, 0.45, 4.0)


@pytest.mark.parametrize(
    ("key", "text", "code"),
    [
        ("tpp", "8", "E-PAGE-SETTING"),
        ("tp", "0", "E-PAGE-VALUE"),
        ("tp", "-8", "E-PAGE-VALUE"),
        ("tp", "1e3", "E-PAGE-VALUE"),
        ("tp", str(MAX_DEVICES + 1), "E-PAGE-VALUE"),
        ("zero", "4", "E-PAGE-VALUE"),
        ("schedule", "2f2b", "E-PAGE-VALUE"),
        ("recompute", "", "E-PAGE-VALUE"),
        ("price", "nan", "E-PAGE-VALUE"),
        ("price", "inf", "E-PAGE-VALUE"),
        ("mfu", "45", "E-OPTION-RANGE"),
        ("tokens", "1.5TB", "E-COUNT-BYTES"),
        ("batch", "many", "E-QUANTITY"),
        ("model", "x" * 65, "E-PAGE-VALUE"),
    ],
)
def test_other_values_are_refused_with_a_rule(key, text, code):
    with refused(code) as caught:
        read_settings([(key, text)])
    assert caught.value.rule
    assert not code.startswith("E-PAGE") or caught.value.facts["setting"] == key


def test_a_setting_is_given_once():
    with refused("E-PAGE-REPEATED", setting="tp"):
        read_settings([("tp", "1"), ("tp", "2")])


def test_empty_words_leave_numbers_open():
    assert read_settings([("batch", ""), ("mfu", " ")]) == PageSettings()


degrees = st.integers(1, 4096)
states = st.builds(
    PageSettings,
    model=st.sampled_from(["tiny", "llama3-8b"]),
    params=st.sampled_from([0, 7_000_000_000]),
    cluster=st.sampled_from(["8xh100", "128x8xh100"]),
    seq=st.integers(0, 2**20),
    tokens=st.sampled_from([0, 10**9, 123_456_789_012]),
    tp=degrees,
    pp=degrees,
    micro_batch=degrees,
    zero=st.sampled_from([1, 2, 3]),
    recompute=st.sampled_from(WORDS["recompute"]),
    schedule=st.sampled_from(WORDS["schedule"]),
    recipe=st.sampled_from(WORDS["recipe"]),
    price=st.sampled_from([0.0, 2.5, 4.0]),
    mfu=st.sampled_from([0.0, 0.45]),
)


@given(states)
def test_a_link_restores_the_settings(state):
    expected = replace(state, model=PageSettings().model) if state.params else state
    assert read_settings(link_pairs(state).items()) == expected


def test_a_link_says_no_more_than_it_has_to():
    assert link_pairs(PageSettings(tp=8)) == {"model": "llama3-8b", "cluster": "8xh100", "tp": "8"}
    assert set(link_pairs(PageSettings())) <= set(FIELDS)
