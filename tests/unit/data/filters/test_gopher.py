from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.data.filters.counts import GopherCounts, count_gopher, duplicate_ngrams, duplicates, top_ngrams
from ingot.data.filters.gopher import (
    Gopher,
    GopherRules,
    RepetitionRules,
    broken_quality_rule,
    broken_repetition_rule,
)
from ingot.schema.corpus import Document

# 90 different words with stop words: breaks no rule.
GOOD = "the and to of " + " ".join(f"word{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(90))

# Five phrases of five words, each followed by a word of its own.
PHRASES = "".join(f" {c}one {c}two {c}three {c}four {c}five {c}{{0}}x{{1}}" for c in "abcde")


def drop_of(text, **rules):
    document = Document(id="", url="", source="", file="", record_id="", text=text)
    drop = Gopher(GopherRules(**rules))(document)
    assert document.text == text
    return drop.rule if drop else ""


def plain_top(words, n):
    if len(words) < n:
        return 0
    counts = Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
    ngram, count = counts.most_common(1)[0]
    return len(ngram) * count


def plain_duplicates(words, n):
    """The definition of the reference code, word by word."""
    seen, characters, i = set(), 0, 0
    while i < len(words) - n + 1:
        ngram = "".join(words[i : i + n])
        if ngram in seen:
            characters += len(ngram)
            i += n
        else:
            seen.add(ngram)
            i += 1
    return characters


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", "aa", "bb", "ccc", "d", "é", "ff", "longer", "longest"]), max_size=60))
def test_ngram_counts_equal_the_definition(words):
    expected = [plain_top(words, n) for n in (2, 3, 4)] + [plain_duplicates(words, n) for n in range(5, 11)]
    assert top_ngrams(words) + duplicate_ngrams(words) == expected
    assert list(count_gopher(" ".join(words), "whitespace"))[-9:] == expected


@given(st.lists(st.sampled_from(["", "x", "yy", "zzz"])))
def test_duplicates_counts_later_copies(pieces):
    seen, count, characters = set(), 0, 0
    for piece in pieces:
        if piece in seen:
            count, characters = count + 1, characters + len(piece)
        seen.add(piece)
    assert duplicates(pieces) == (count, characters)


def test_good_text_stays():
    assert drop_of(GOOD) == ""


@pytest.mark.parametrize("sign", ["•", "-", "*", "▪", "\t▶"])
def test_blank_lines_do_not_hide_lists(sign):
    words = GOOD.split()
    entries = [f"{sign} {' '.join(words[i : i + 9])}" for i in range(0, len(words), 9)]
    assert drop_of("\n\n".join(entries)) == "gopher.bullet_lines"
    document = Document(id="", url="", source="", file="", record_id="", text="\n\n".join(entries))
    drop = Gopher(words="spacy")(document)  # datatrove counts blank lines
    assert drop is None or drop.rule != "gopher.bullet_lines"


def test_blank_lines_do_not_hide_teasers():
    words = GOOD.split()
    lines = [" ".join(words[i : i + 9]) + "..." * (i < 45) for i in range(0, len(words), 9)]
    assert len(lines) == 11 and drop_of("\n\n".join(lines)) == "gopher.ellipsis_lines"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "gopher.word_count"),
        ("the and " * 20, "gopher.word_count"),
        ("... --- ### " * 40, "gopher.word_count"),  # symbols are no words
        ("the and be a " * 20, "gopher.mean_word_length"),
        (GOOD + " incomprehensibilities" * 200, "gopher.mean_word_length"),
        (GOOD + " #" * 12, "gopher.symbol_ratio"),
        (GOOD.replace(" word", "… word"), "gopher.symbol_ratio"),
        ("\n".join("- " + GOOD[i * 20 : i * 20 + 20] for i in range(30)), "gopher.bullet_lines"),
        ("\n".join(GOOD[i * 110 : i * 110 + 110] + "…" for i in range(6)), "gopher.ellipsis_lines"),
        (GOOD + " 12345" * 40, "gopher.alphabetic_words"),
        (GOOD.replace("the and to of", "der und zu von"), "gopher.stop_words"),
        ("\n\n".join([GOOD, GOOD, GOOD]), "gopher_repetition.duplicate_paragraphs"),
        ("\n".join([GOOD, GOOD, GOOD]), "gopher_repetition.duplicate_lines"),
        (GOOD + " cartwheel engine" * 20, "gopher_repetition.top_2_gram"),
        (GOOD + "".join(PHRASES.format(x, x) for x in "stu"), "gopher_repetition.duplicate_5_gram"),
    ],
)
def test_each_rule_names_what_it_drops(text, rule):
    assert drop_of(text) == rule


# Counts of a page of 100 words and 10 lines that breaks no rule; shares of characters are percent.
SOUND = GopherCounts(**dict.fromkeys(GopherCounts._fields, 0))._replace(
    characters=100, words=100, real_words=100, real_characters=500, alphabetic_words=100, lines=10, stop_words=9,
    paragraphs=10, pieces=10,
)  # fmt: skip


@pytest.mark.parametrize(
    ("count", "last", "beyond"),
    [
        ("real_words", 50, 49),
        ("real_characters", 300, 299),
        ("real_characters", 1000, 1001),
        ("hashes", 10, 11),
        ("ellipses", 10, 11),
        ("bullet_lines", 9, 10),
        ("ellipsis_lines", 3, 4),
        ("alphabetic_words", 80, 79),
        ("stop_words", 2, 1),
        ("duplicate_lines", 3, 4),
        ("duplicate_paragraphs", 3, 4),
        ("duplicate_line_characters", 20, 21),
        ("duplicate_paragraph_characters", 20, 21),
        *((f"top_{n}_gram", most, most + 1) for n, most in ((2, 20), (3, 18), (4, 16))),
        *((f"duplicate_{n}_gram", 20 - n, 21 - n) for n in range(5, 11)),
    ],
)
def test_limits_are_those_of_the_paper_and_inclusive(count, last, beyond):
    """Rae et al. 2021, section A.1.1 (quality) and Table A1 (repetition)."""

    def broken(value):
        counts = SOUND._replace(**{count: value})
        if count == "real_words":
            counts = counts._replace(real_characters=5 * value)
        return broken_quality_rule(counts, GopherRules()) or broken_repetition_rule(counts, RepetitionRules())

    assert broken(last) is None and broken(beyond) is not None


def test_thresholds_are_inclusive_and_can_be_moved():
    counts = count_gopher(" ".join(["the", "and"] + [f"abc{chr(97 + i)}" for i in range(8)]), "whitespace")
    assert broken_quality_rule(counts, GopherRules(word_count=(10, 10))) is None
    assert broken_quality_rule(counts, GopherRules(word_count=(11, 99))) == ("gopher.word_count", "10 < 11")
    assert broken_quality_rule(counts, GopherRules(word_count=(1, 9))) == ("gopher.word_count", "10 > 9")


def test_the_definition_of_a_word_decides():
    """Half of the words are commas to spaCy: too few of them have a letter."""
    document = Document(id="", url="", source="", file="", record_id="", text=GOOD.replace(" word", ", word"))
    assert Gopher()(document) is None
    drop = Gopher(words="spacy")(document)
    assert drop is not None
    assert (drop.rule, drop.value) == ("gopher.alphabetic_words", "0.511 < 0.8")


def test_switched_off_halves_are_not_run_and_not_named():
    repeated = Document(id="", url="", source="", file="", record_id="", text=GOOD + "\n" + GOOD)
    only_quality = Gopher(GopherRules(), RepetitionRules(enabled=False))
    assert only_quality(repeated) is None
    assert only_quality.ran.startswith("quality rules")
    assert Gopher(GopherRules(enabled=False), RepetitionRules())(repeated) is not None
