import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expect import refused

from ingot.data.mixture.shares import CLASSIC, mix, named_weights, parse_weights, preset_weights, read_weights
from ingot.errors import ConfigError


def tokens_of(mixture) -> dict[str, int]:
    return {one.source: one.tokens for one in mixture.sources}


def test_weights_divide_the_budget():
    mixture = mix({"web": 900, "code": 300}, {"web": 3, "code": 1}, 800)
    assert tokens_of(mixture) == {"web": 600, "code": 200}
    assert mixture.weights == {"web": 0.75, "code": 0.25} and not mixture.notes and not mixture.warnings
    assert mixture.sources[0].epochs == 600 / 900


def test_what_a_small_source_cannot_give_goes_to_the_others_in_proportion():
    mixture = mix({"web": 10_000, "code": 10_000, "books": 100}, {"web": 6, "code": 2, "books": 2}, 2000, 2)
    assert tokens_of(mixture) == {"web": 1350, "code": 450, "books": 200}
    assert mixture.sources[2].epochs == 2 and "books: 20.0% wanted, 10.0% given" in mixture.notes[0]


def test_a_source_that_gets_over_its_cap_by_what_others_leave_is_capped_too():
    mixture = mix({"a": 10, "b": 60, "c": 1000}, {"a": 1, "b": 1, "c": 1}, 180, 1)
    assert tokens_of(mixture) == {"c": 110, "b": 60, "a": 10}


def test_more_than_four_epochs_are_warned_of():
    (warning,) = mix({"web": 100}, {"web": 1}, 650, 10).warnings
    assert "repeated 6.5 times" in warning and "Muennighoff" in warning
    assert not mix({"web": 100}, {"web": 1}, 400, 10).warnings


def test_caps_of_single_sources():
    available = {"web": 1000, "code": 100}
    assert tokens_of(mix(available, {"web": 1, "code": 1}, 1000, {"code": 1})) == {"web": 900, "code": 100}
    with refused("E-SOURCE-UNKNOWN", source="cod", close=["code"]):
        mix(available, {"web": 1}, 10, {"cod": 1})


@pytest.mark.parametrize(
    ("weights", "tokens", "epochs", "code", "facts"),
    [
        ({"wbe": 1}, 10, 4, "E-SOURCE-UNKNOWN", {"source": "wbe", "close": ["web"]}),
        ({"web": 0}, 10, 4, "E-WEIGHT-RANGE", {"source": "web", "weight": 0}),
        ({"web": float("nan")}, 10, 4, "E-WEIGHT-RANGE", {"source": "web"}),
        ({"web": 1}, 0, 4, "E-MIXTURE-BUDGET", {"tokens": 0}),
        ({}, 10, 4, "E-MIXTURE-EMPTY", {}),
        ({"web": 1, "code": 1}, 900, 2, "E-MIXTURE-CAPS", {"tokens": 900, "possible": 800}),
        ({"web": 1}, 10, 0, "E-MIXTURE-EPOCHS", {"source": "web", "max_epochs": 0}),
        ({"empty": 1}, 10, 4, "E-SOURCE-EMPTY", {"source": "empty"}),
    ],
)
def test_what_cannot_be_mixed_is_refused(weights, tokens, epochs, code, facts):
    with refused(code, **facts):
        mix({"web": 300, "code": 100, "empty": 0}, weights, tokens, epochs)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 10**9), st.floats(1e-3, 1e3)), min_size=1),
    st.floats(0.01, 0.999),
    st.floats(0.1, 10),
)
def test_the_budget_is_met_and_no_cap_is_passed(sources, part, epochs):
    available = {name: tokens for name, (tokens, _) in sources.items()}
    budget = int(part * epochs * sum(available.values()))
    if budget < 1:
        return
    mixture = mix(available, {name: weight for name, (_, weight) in sources.items()}, budget, epochs)
    assert sum(one.tokens for one in mixture.sources) == budget
    assert all(one.tokens <= epochs * one.available + 1 for one in mixture.sources)
    free = [one.share / one.wanted for one in mixture.sources if one.tokens < epochs * one.available - 1]
    assert all(ratio == pytest.approx(free[0]) for ratio in free) and all(ratio >= 1 - 1e-9 for ratio in free)


def test_the_classic_shares_add_up_to_one():
    assert sum(CLASSIC.values()) == pytest.approx(1)
    assert CLASSIC["web"] == 0.7 and CLASSIC["forums"] == pytest.approx(0.05)


def test_a_preset_is_fitted_to_the_sources_that_are_there():
    weights, notes = preset_weights("classic", {"web": 10, "code": 10, "news": 10})
    assert weights == {"web": 0.7, "code": 0.1}
    assert notes == (
        "books, papers, encyclopedia, forums: not in these tokens; the other sources get their share of 20%",
        "news: not in the preset 'classic', so not used",
    )
    assert preset_weights("natural", {"web": 30, "code": 10})[0] == {"web": 30, "code": 10}
    assert preset_weights("equal", {"web": 30, "code": 10})[0] == {"web": 1, "code": 1}
    with refused("E-MIXTURE-NO-SOURCE", sources=["news"]):
        preset_weights("classic", {"news": 10})
    with refused("E-MIXTURE-UNKNOWN", name="clasic"):
        preset_weights("clasic", {"web": 10})


def test_weights_on_a_command_line():
    assert parse_weights(["web=.7", "a=b=2"]) == {"web": 0.7, "a=b": 2.0}
    for wrong in ("web", "web=", "=3", "web=x"):
        with refused("E-WEIGHT-FORM", text=wrong):
            parse_weights([wrong])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.toml", 'name = "x"\n[data]\ntokens = "t"\n[data.weights]\nweb = 0.7\ncode = 1\n'),
        ("mix.toml", "[weights]\nweb = 0.7\ncode = 1\n"),
        ("mix.toml", "web = 0.7\ncode = 1\n"),
        ("doremi.json", json.dumps({"weights": {"web": 0.7, "code": 1}, "history": []})),
    ],
)
def test_weights_out_of_files(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert read_weights(tmp_path / name) == {"web": 0.7, "code": 1.0}


@pytest.mark.parametrize(
    "content", ["", 'web = "much"', "[weights]\n", "web = true", "[[", 'name = "run"\n[data]\na=1']
)
def test_files_without_weights_are_refused(tmp_path, content):
    (tmp_path / "x.toml").write_text(content)
    with pytest.raises(ConfigError):
        read_weights(tmp_path / "x.toml")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.toml", None, "No such file or directory"),
        ("x.toml", b"\xff", "invalid start byte"),
        ("x.toml", b"a = = 1", "x.toml:1"),
        ("x.json", b"{", "Expecting property name"),
        ("x.json", b'{"web": %s}' % (b"9" * 401), "too large"),
    ],
)
def test_files_that_cannot_be_read_are_refused_with_the_reason(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with refused("E-WEIGHTS-UNREADABLE", path=str(tmp_path / name)) as caught:
        read_weights(tmp_path / name)
    assert reason in caught.value.found


def test_a_mixture_by_name_or_file(tmp_path):
    (tmp_path / "mine.toml").write_text("web = 1.0")
    assert named_weights(str(tmp_path / "mine.toml"), {"web": 5}) == ("mine", {"web": 1.0}, ())
    assert named_weights("natural", {"web": 5}) == ("natural", {"web": 5.0}, ())
    with refused("E-MIXTURE-UNKNOWN", name="clasic"):
        named_weights("clasic", {"web": 5})
