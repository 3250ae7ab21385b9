import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.data.dedup.minhash import DedupRules, jaccard, shingles, signature

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
