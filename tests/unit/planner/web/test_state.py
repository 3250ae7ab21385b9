"""The words of a link, which may come from anyone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import IngotError
from ingot.planner.web.state import FIELDS, MAX_DEVICES, WORDS, State, read_state, words


def test_words_as_people_write_them():
    state = read_state(
        [("params", "70b"), ("tokens", "1.5T"), ("mfu", "45%"), ("price", "4"), ("cluster", "128x8xh100")]
    )
    assert (state.params, state.tokens, state.mfu, state.price) == (70 * 10**9, 1_500_000_000_000, 0.45, 4.0)


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("tpp", "8", "there is no setting 'tpp'"),
        ("tp", "0", "tp is 0"),
        ("tp", "-8", "tp is -8"),
        ("tp", "1e3", "tp is '1e3'"),
        ("tp", str(MAX_DEVICES + 1), "tp is 131073"),
        ("zero", "4", "zero is 4"),
        ("schedule", "2f2b", "schedule is '2f2b'"),
        ("recompute", "", "recompute is ''"),
        ("price", "nan", "price is 'nan'"),
        ("price", "inf", "price is 'inf'"),
        ("mfu", "45", "mfu 45"),
        ("tokens", "1.5TB", "these are bytes"),
        ("batch", "many", "'many' is not a count"),
        ("model", "x" * 65, "model has 65 characters"),
    ],
)
def test_other_words_are_refused_with_a_rule(key, text, said):
    with pytest.raises(IngotError) as refused:
        read_state([(key, text)])
    assert said in refused.value.found
    assert refused.value.rule


def test_a_setting_is_given_once():
    with pytest.raises(IngotError, match="tp is given twice"):
        read_state([("tp", "1"), ("tp", "2")])


def test_empty_words_leave_numbers_open():
    assert read_state([("batch", ""), ("mfu", " ")]) == State()


degrees = st.integers(1, 4096)
states = st.builds(
    State,
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
    expected = replace(state, model=State().model) if state.params else state
    assert read_state(words(state).items()) == expected


def test_a_link_says_no_more_than_it_has_to():
    assert words(State(tp=8)) == {"model": "llama3-8b", "cluster": "8xh100", "tp": "8"}
    assert set(words(State())) <= set(FIELDS)
