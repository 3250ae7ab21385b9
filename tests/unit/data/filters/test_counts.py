"""The compiled counts equal the plain ones, on any text; what they mean is tested beside the rules."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingot.data.filters.counts import (
    LineRules,
    count_fineweb,
    count_gopher,
    cut_lines,
    plain_cut_lines,
    plain_fineweb,
    plain_gopher,
)
from ingot.data.filters.words import native

# Pieces that the rules look at, whitespace and line ends of all kinds, and characters of one to four bytes.
_PIECES = (
    "the|of|with|a|ab|one two three|end.|...|....|…|•|-|*|▪|#|##|[1]|[12]|[edit]|[citation needed]|[|]|{|}|java|script|"
    "JavaScript|use cookies|Privacy Policy|terms of use|Lorem Ipsum|don't|U.S.|:)|x.com|é|中文|🎉|“so”|。|？|\x00|"
    "\u200b|\u212a|İ|२|wordwordword"
)
_SPACES = [*(" " * 12), "  ", "\t", "\n", "\n\n", "\n \n", "\r\n", "\v", "\x1c", "\x85", "\u2028", "\u3000", ""]
texts = st.lists(st.tuples(st.sampled_from(_PIECES.split("|")), st.sampled_from(_SPACES)), max_size=60).map(
    lambda pairs: "".join(piece + space for piece, space in pairs)
) | st.text(max_size=80)
needs_native = pytest.mark.skipif(native() is None, reason="the compiled core was not built")


@needs_native
@settings(max_examples=400, deadline=None)
@given(texts, st.sampled_from(["whitespace", "spacy"]))
@example("", "spacy")
@example("\ud800 a lone surrogate", "whitespace")
@example("\n\na\n\n\na\n", "whitespace")
@example("a b c d e " * 30 + "ab cd e abcde " * 9, "whitespace")
def test_gopher(text, words):
    assert count_gopher(text, words) == plain_gopher(text, words)


@needs_native
@settings(max_examples=300, deadline=None)
@given(texts, st.integers(0, 40), st.booleans())
def test_fineweb(text, short, quotes):
    assert count_fineweb(text, short, quotes) == plain_fineweb(text, short, quotes)


@needs_native
@settings(max_examples=400, deadline=None)
@given(texts, st.integers(1, 12), st.integers(0, 4), st.tuples(*[st.booleans()] * 7))
@example("Use coo\u212aies if you li\u212ae them.", 12, 3, (False, False, True, False, False, True, True))
def test_cut_lines(text, longest, fewest, switches):
    rules = LineRules(longest, fewest, *switches)
    assert cut_lines(text, rules) == plain_cut_lines(text, rules)


@needs_native
def test_every_document_of_the_shared_data(test_data):
    import gzip
    import json

    rules = LineRules(1000, 3, False, True, True, True, True, True, True)
    for kind in ("wiki", "udhr_labelled"):
        with gzip.open(test_data / "text" / f"{kind}.jsonl.gz", "rt", encoding="utf-8") as file:
            for text in (json.loads(line)["text"][:20_000] for line in file):
                for words in ("whitespace", "spacy"):
                    assert count_gopher(text, words) == plain_gopher(text, words)
                assert count_fineweb(text, 30, True) == plain_fineweb(text, 30, True)
                assert cut_lines(text, rules) == plain_cut_lines(text, rules)


def test_only_the_kelvin_sign_has_a_small_letter_in_a_phrase():
    """An assumption of the compiled loop: no other character becomes ASCII letters alone when lowered."""
    lowered = {chr(code): chr(code).lower() for code in range(128, 0x110000)}
    assert [c for c, lower in lowered.items() if lower.isascii()] == ["\u212a"]
    # This one becomes "i" and a dot above, which no phrase has.
    assert [c for c, lower in lowered.items() if lower[0].isascii()] == ["\u0130", "\u212a"]


@needs_native
@pytest.mark.parametrize("text", ["!" * 300_000, "a-" * 150_000, "a.a@" * 75_000, "a b " * 75_000, "\n" * 300_000])
def test_hostile_texts_take_linear_time(text):
    """Quadratic work on any of them would take minutes."""
    counts = count_gopher(text, "spacy")
    assert counts.characters == len(text)
    assert count_fineweb(text, 30, True).newlines == text.count("\n")
