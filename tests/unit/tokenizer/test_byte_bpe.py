"""Training, and the conversion to tiktoken: if it succeeds, both give the same ids on any vocabulary."""

import json

import numpy as np
import pytest
import tiktoken
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.expect import refused
from tokenizers import Tokenizer

from ingot.tokenizer.byte_bpe import EOT, GPT2_PATTERN, NotExact, byte_of_character, tiktoken_form, train_bpe
from ingot.tokenizer.encoder import load_encoder

TEXTS = ["the cat and the hat and the bat\n" * 20, "counting 1 22 333 4444 55555\n" * 20, "naïve café\n" * 20]
SPLIT = {"type": "Split", "pattern": {"Regex": r"\s+|\S+"}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def spec(merges, *, ignore_merges=False, ids=None, more=(), **changes):
    """A tokenizer.json with the 256 bytes, the products of `merges` and `more` entries; `ids` permutes the ids."""
    tokens = list(dict.fromkeys([*byte_of_character(), *(a + b for a, b in merges), *more]))
    ids = range(len(tokens)) if ids is None else ids(len(tokens))
    model = {
        "type": "BPE",
        "vocab": dict(zip(tokens, ids, strict=True)),
        "merges": [list(m) for m in merges],
        "ignore_merges": ignore_merges,
    }
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]},
        "model": model | changes.pop("model", {}),
    } | changes


def both(values, text):
    pattern, ranks, ids = tiktoken_form(values)
    fast = tiktoken.Encoding("t", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<e>": len(ranks)})
    slow = Tokenizer.from_str(json.dumps(values))
    return ids[fast.encode_ordinary(text)].tolist(), slow.encode(text, add_special_tokens=False).ids


@st.composite
def merge_lists(draw):
    """Merges in any order over three letters: some dead, some that several pairs lead to."""
    known, merges = ["a", "b", "c"], []
    for _ in range(draw(st.integers(1, 9))):
        pair = (draw(st.sampled_from(known)), draw(st.sampled_from(known)))
        if pair not in merges:
            merges.append(pair)
            known = list(dict.fromkeys([*known, pair[0] + pair[1]]))
    return merges


@settings(max_examples=150, deadline=None)
@given(
    merges=merge_lists(),
    ignore_merges=st.booleans(),
    seed=st.integers(0, 99),
    text=st.text(alphabet="abc ", max_size=24),
)
def test_an_accepted_vocabulary_gives_the_same_ids(merges, ignore_merges, seed, text):
    values = spec(
        merges, ignore_merges=ignore_merges, ids=lambda n: np.random.default_rng(seed).permutation(n).tolist()
    )
    try:
        fast, slow = both(values, text)
    except NotExact:
        assume(False)
    assert fast == slow


def test_rank_is_merge_order_and_not_id():
    merges = [("b", "c"), ("a", "b")]
    values = spec(merges, ids=lambda n: [*range(256), 257, 256])  # ids in the other order than merges
    fast, slow = both(values, "abc")
    assert fast == slow == [values["model"]["vocab"][t] for t in ("a", "bc")]


def test_a_token_that_merging_never_reaches_is_left_out():
    merges = [("a", "b"), ("b", "c"), ("a", "bc")]  # abc -> ab c: the last merge is dead
    assert both(spec(merges), "abc bc")[0] == both(spec(merges), "abc bc")[1]
    assert b"abc" not in tiktoken_form(spec(merges))[1]
    with pytest.raises(NotExact, match="does not lead to it"):
        tiktoken_form(spec(merges, ignore_merges=True))


def test_a_vocabulary_that_lists_every_split_is_exact():
    # What converters from tiktoken write: all pairs of a token, side by side.
    merges = [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]
    fast, slow = both(spec(merges, ignore_merges=True), "abc abcabc aabc")
    assert fast == slow


def test_gpt2_pattern_is_the_one_inside_byte_level():
    values = spec([("a", "b")], pre_tokenizer=BYTES | {"use_regex": True})
    assert tiktoken_form(values)[0] == GPT2_PATTERN
    fast, slow = both(values, "ab's  12ab  \n ab!!")
    assert fast == slow


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (spec([], model={"type": "Unigram"}), "Unigram"),
        (spec([], normalizer={"type": "NFC"}), "NFC"),
        (spec([], model={"dropout": 0.1}), "dropout"),
        (spec([], model={"byte_fallback": True}), "byte_fallback"),
        (spec([], model={"continuing_subword_prefix": "##"}), "continuing_subword_prefix"),
        (spec([], pre_tokenizer=BYTES | {"add_prefix_space": True}), "space before"),
        (spec([], pre_tokenizer=BYTES), "does not split"),
        (spec([], pre_tokenizer={"type": "Whitespace"}), "Whitespace"),
        (spec([], pre_tokenizer=None), "pre-tokenizer"),
        (
            spec([], pre_tokenizer={"type": "Sequence", "pretokenizers": [SPLIT | {"behavior": "Removed"}, BYTES]}),
            "one plain pattern",
        ),
        (spec([], added_tokens=[{"id": 256, "content": "<tool>", "special": False}], more=["<tool>"]), "not special"),
        (spec([("a", "b")], added_tokens=[{"id": 256, "content": "ab", "special": True}]), "special token 'ab'"),
        (spec([("a", "b"), ("a", "c"), ("b", "b"), ("a", "bb"), ("c", "c"), ("ab", "b")]), "far apart"),
        (spec([], ignore_merges=True, more=["abc"]), "no merge"),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "pre_tokenizer": BYTES | {"use_regex": True}},
            "255",
        ),
    ],
)
def test_what_has_no_exact_form_says_why(values, reason):
    with pytest.raises(NotExact, match=reason):
        tiktoken_form(values)


def test_training_twice_and_in_another_order_gives_the_same_file(tmp_path):
    first = train_bpe(TEXTS, 300, tmp_path / "a.json")
    second = train_bpe(reversed(TEXTS), 300, tmp_path / "b.json")
    assert first.read_bytes() == second.read_bytes()


def test_the_vocabulary_has_all_bytes_and_digits_come_in_threes(tmp_path):
    encoder = load_encoder(train_bpe(TEXTS, 280, tmp_path / "t.json"))
    assert (encoder.vocab_size, encoder.eot) == (280, EOT)
    everything = bytes(range(256)).decode("latin-1")
    assert encoder.decode(encoder.encode(everything)) == everything
    pieces = [encoder.decode([i]) for i in encoder.encode("55555").tolist()]
    assert max(map(len, pieces)) <= 3


def test_a_small_text_gives_a_smaller_vocabulary(tmp_path):
    assert load_encoder(train_bpe(["aaab"], 4096, tmp_path / "t.json")).vocab_size < 300


def test_lone_surrogates_do_not_stop_training(tmp_path):
    assert train_bpe(["a\ud800b" * 3], 260, tmp_path / "t.json").exists()


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_no_text_is_an_error_and_writes_nothing(tmp_path, texts):
    with refused("E-TOKENIZER-NO-TEXT"):
        train_bpe(texts, 300, tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_below_the_bytes_is_refused(tmp_path):
    with refused("E-TOKENIZER-VOCABULARY-SIZE", vocab_size=256):
        train_bpe(TEXTS, 256, tmp_path / "t.json")
