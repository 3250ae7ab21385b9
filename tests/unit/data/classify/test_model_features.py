import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ingot.data.classify.model import END, hash_words, ngram_buckets, words_of


def fnv(word: bytes) -> int:
    """fastText's Dictionary::hash, in plain Python."""
    value = 2166136261
    for byte in word:
        value = (value ^ (byte if byte < 128 else byte | 0xFFFFFF00)) * 16777619 % 2**32
    return value


def ngrams(hashes: list[int], order: int, buckets: int) -> list[int]:
    """fastText's Dictionary::addWordNgrams, in plain Python."""
    signed = [value - 2**32 if value >= 2**31 else value for value in hashes]
    found = []
    for first in range(len(signed)):
        rolling = signed[first] % 2**64
        for following in signed[first + 1 : first + order]:
            rolling = (rolling * 116049371 + following) % 2**64
            found.append(rolling % buckets)
    return found


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=12))
def test_words_are_hashed_as_fasttext_does(words):
    assert hash_words(words).tolist() == [fnv(word) for word in words]


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=8), max_size=4), st.integers(1, 4))
def test_ngrams_are_hashed_as_fasttext_does_and_stay_in_their_text(texts, order):
    hashes = np.array([value for text in texts for value in text], np.uint32)
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    found, where = ngram_buckets(hashes, ends, order, 1000)
    assert sorted(found) == sorted(b for text in texts for b in ngrams(text, order, 1000))
    assert len(where) == len(found) and (where < len(hashes)).all()


def test_a_text_is_one_line_of_words():
    assert words_of("one\ntwo\0three\u00a0four") == [b"one", b"two", "three\u00a0four".encode(), END]
    assert words_of("one </s> two") == [b"one", END]
    assert words_of("__label__x one") == [b"one", END]
    assert words_of("") == [END]
    assert words_of("\ud800") == [b"?", END]
