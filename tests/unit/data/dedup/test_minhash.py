from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.data.dedup.minhash import (
    DedupRules,
    common_reference,
    jaccard,
    shingle_set,
    shingles,
    shingles_reference,
    signature,
    signature_of,
    signature_reference,
)
from ingot.data.native import compiled

TEXTS = st.text(
    st.one_of(st.sampled_from("ab \u00a0\u1680\u2003\u202f\u3000\x85\x1c\n"), st.characters()), max_size=300
)
needs_core = pytest.mark.skipif(compiled("_minhash") is None, reason="the compiled core was not built")
WORDS = st.lists(st.text(alphabet="abcÄ", min_size=1, max_size=3), max_size=40)


@given(WORDS, st.integers(1, 6))
def test_equal_ngrams_have_equal_hashes_and_others_do_not(words, n):
    hashes = shingles(" ".join(words), n)
    lower = [word.lower() for word in words]
    size = min(n, len(lower))
    ngrams = [tuple(lower[i : i + size]) for i in range(len(lower) - size + 1)] if lower else [()]
    assert len(hashes) == len(ngrams)
    assert len(set(zip(ngrams, hashes.tolist(), strict=True))) == len(set(ngrams)) == len(set(hashes.tolist()))


def test_whitespace_and_case_do_not_matter():
    assert (shingles("One  two\nthree\u00a0four five SIX") == shingles("one two three four five six")).all()


def test_hashes_are_the_same_in_every_process_and_release():
    assert shingles("the quick brown fox jumps over").tolist() == [15311587801069458515, 11890767726795897989]


def test_a_lone_surrogate_is_no_error():
    assert len(shingles("a \udc80 b c d e f")) == 3


@given(WORDS, WORDS)
def test_jaccard(a, b):
    left, right = np.unique(shingles(" ".join(a), 1)), np.unique(shingles(" ".join(b), 1))
    one, two = set(left.tolist()), set(right.tolist())
    assert jaccard(left, right) == pytest.approx(len(one & two) / len(one | two))


def test_signatures_estimate_jaccard():
    random = np.random.default_rng(7)
    errors = []
    for share in np.linspace(0, 1, 40):
        both = random.integers(0, 2**63, int(300 * share) + 1, dtype=np.uint64)
        own = random.integers(0, 2**63, (2, 300 - int(300 * share)), dtype=np.uint64)
        left, right = np.concatenate((both, own[0])), np.concatenate((both, own[1]))
        estimate = (signature(left) == signature(right)).mean()
        errors.append(estimate - jaccard(np.unique(left), np.unique(right)))
    assert abs(np.mean(errors)) < 0.03  # unbiased
    assert np.std(errors) < 0.06  # 128 permutations: at most 0.044 by theory


def test_long_texts_go_in_blocks():
    hashes = np.random.default_rng(3).integers(0, 2**63, 10_000, dtype=np.uint64)
    parts = [signature(hashes[i : i + 777]) for i in range(0, 10_000, 777)]
    assert (signature(hashes) == np.minimum.reduce(parts)).all()


def test_rules_are_checked():
    assert [name for name, _ in DedupRules(jaccard=0, bands=0).problems()] == ["jaccard", "bands"]
    assert DedupRules(bands=14).permutations == 112


def test_a_document_in_one_call():
    rules, text = DedupRules(ngram=2), "one two three two three"
    assert (signature_of(text, rules) == signature(shingles(text, 2), 128)).all()
    assert shingle_set(text, rules).tolist() == sorted({*shingles("one two", 2), *shingles("two three two", 2)})


def test_signatures_are_the_same_in_every_process_and_release():
    found = signature_of("the quick brown fox jumps over", DedupRules(bands=1, rows=3))
    assert found.tolist() == [1016250728, 1201384086, 1377846905]


@needs_core
@given(TEXTS, st.integers(1, 8))
def test_the_compiled_core_gives_the_same(text, ngram):
    rules = DedupRules(ngram=ngram, bands=3, rows=13)  # 39 permutations: one whole group and a rest
    plain = shingles_reference(text, ngram)
    assert (shingles(text, ngram) == plain).all()
    assert (signature_of(text, rules) == signature_reference(plain, 39)).all()
    assert (signature(plain, 39) == signature_reference(plain, 39)).all()


@needs_core
@pytest.mark.parametrize("alphabet", ["x", "Ж", "語", "\ud800"])
def test_the_compiled_core_hashes_words_of_every_length(alphabet):
    for length in [*range(1, 70), 127, 128, 129, 240, 241, 5000]:
        text = f"{alphabet * length} {'ab' * length}"
        assert (shingles(text, 1) == shingles_reference(text, 1)).all(), length


@needs_core
def test_the_compiled_core_splits_where_python_does():
    for first in range(0, 0x110000, 0x1000):  # a whitespace character between the letters makes another shingle
        text = "".join(f"a{chr(code)}b " for code in range(first, first + 0x1000))
        assert (shingles(text, 1) == shingles_reference(text, 1)).all(), hex(first)


@needs_core
def test_the_compiled_core_takes_more_shingles_than_a_block():
    text = " ".join(map(str, range(20_000)))
    plain = shingles_reference(text, 5)
    assert (shingles(text) == plain).all()
    assert (signature_of(text, DedupRules()) == signature_reference(plain, 128)).all()


@needs_core
def test_the_compiled_core_with_an_ngram_longer_than_any_text():
    assert (shingles("a b c", 2**40) == shingles_reference("a b c", 3)).all()


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_what_two_sets_share(a, b):
    left, right = np.array(sorted(a), np.uint64), np.array(sorted(b), np.uint64)
    assert common_reference(left, right) == len(a & b)
    if a | b:
        assert jaccard(left, right) == len(a & b) / len(a | b)


@needs_core
def test_the_core_refuses_what_it_cannot_take():
    core: Any = compiled("_minhash")
    with pytest.raises(ValueError, match="ngram"):
        core.shingles("a b", 0, int)
    with pytest.raises(ValueError, match="whole items"):
        core.common(b"1234567", b"")
