import pytest

from ingot.data.filters.c4 import C4, C4Rules, count_sentences
from ingot.data.filters.quality import PRESETS
from ingot.schema.corpus import Document

LINE = "This is one good line of text."
FIVE = "\n".join(f"This is good line number {i} of the text." for i in range(5))


def run(text, **rules):
    document = Document(id="", url="", source="", file="", record_id="", text=text)
    drop = C4(C4Rules(**rules))(document)
    return drop.rule if drop else "", document.text


def test_good_text_is_not_touched():
    assert run(FIVE) == ("", FIVE)


@pytest.mark.parametrize(
    "line",
    [
        "two words",
        "Please enable JavaScript to see this page.",
        "We use cookies to make this page better.",
        "Read our Privacy Policy before you go on.",
        "one two three " + "x" * 1001,
        "",
    ],
)
def test_bad_lines_are_cut_and_the_document_stays(line):
    assert run(f"{FIVE}\n{line}\n{LINE}") == ("", f"{FIVE}\n{LINE}")


def test_lines_without_terminal_punctuation_stay():
    text = FIVE + "\nA heading without a full stop"
    assert run(text) == ("", text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (FIVE + "\nfunction f() { return 1 }", "c4.curly_bracket"),
        (FIVE + "\nLorem Ipsum dolor sit amet.", "c4.lorem_ipsum"),
        ("\n".join([LINE] * 4), "c4.sentences"),  # five are enough: FIVE
        ("", "c4.sentences"),
    ],
)
def test_documents_are_dropped_by_name(text, rule):
    assert run(text)[0] == rule


def test_a_bracket_in_a_line_that_is_cut_anyway_does_not_count():
    assert run(FIVE + "\njavascript function f() { return 1 }")[0] == ""


def test_citation_marks_go():
    text = FIVE.replace("line number 1", "line[12] number 1[edit][citation needed]")
    assert run(text) == ("", FIVE)


@pytest.mark.parametrize("line", ["[1] [2] [edit]", "See also [3]"])
def test_citation_marks_are_no_words(line):
    assert run(f"{FIVE}\n{line}\n{LINE}") == ("", f"{FIVE}\n{LINE}")


def test_rules_can_be_switched_off():
    text = FIVE + "\nfunction f() { return 1 }"
    assert run(text, curly_bracket=False) == ("", text)
    text = FIVE + "\nPlease enable JavaScript and read our terms of use."
    assert run(text, javascript=False, policy_phrases=False) == ("", text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("no mark at all", 1),
        ("He paid 3.50 for it, e.g. in cash.", 1),
        ('"Stop." She stopped.', 2),
        ("One line\n\nand another", 2),
        ("", 0),
        ("Dots... And more.", 2),
    ],
)
def test_count_sentences(text, count):
    assert count_sentences(text) == count


def test_terminal_punctuation_cuts_lines_when_it_is_on():
    text = "\n".join([FIVE, "A heading without a full stop", 'He said "yes."', "And it goes on...", LINE])  # words: ok
    assert run(text, terminal_punctuation=True) == ("", "\n".join([FIVE, 'He said "yes."', LINE]))  # words: ok


def test_a_single_quote_ends_a_line_as_in_datatrove_but_not_in_c4_itself():
    quoted = "She answered 'I do not know that.'"  # words: ok
    text = "\n".join([FIVE, quoted, LINE])
    assert run(text, terminal_punctuation=True) == ("", text)
    assert run(text, terminal_punctuation=True, single_quotes=False) == ("", "\n".join([FIVE, LINE]))
    assert not PRESETS["c4"].c4.single_quotes and PRESETS["fineweb"].c4.single_quotes


def test_bad_words_are_whole_words_of_a_given_list(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("darn\nbad phrase\n\n", encoding="utf-8")
    rules = {"bad_words": str(words)}
    assert run(FIVE + "\nWell, DARN it all.", **rules)[0] == "c4.bad_words"
    assert run(FIVE + "\nWhat a bad phrase it was.", **rules)[0] == "c4.bad_words"
    assert run(FIVE + "\nShe darned all the socks.", **rules)[0] == ""


def test_bad_words_of_scripts_without_spaces_are_found_inside_a_sentence(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("笨蛋\nก๋วย\ndarn\n", encoding="utf-8")
    rules = {"bad_words": str(words)}
    assert run(FIVE + "\n他是一个笨蛋吗 and more words here.", **rules)[0] == "c4.bad_words"
    assert run(FIVE + "\nShe darned all the socks.", **rules)[0] == ""


SOUND = "\n".join(f"This line has a number {i}." for i in range(3))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (SOUND, SOUND),
        (SOUND.rpartition("\n")[0], "c4.sentences"),
        ("One is here. Two is here. Three is here.", "One is here. Two is here. Three is here."),
        (f"{SOUND}\nOnly four words here.", SOUND),
        (f"{SOUND}\nThere are five words here.", f"{SOUND}\nThere are five words here."),
        (f"{SOUND}\nThis line ends without a mark", SOUND),
        (f"{SOUND}\nThis line ends in an ellipsis...", SOUND),
        (f'{SOUND}\nShe answered him with "yes, I do"', f'{SOUND}\nShe answered him with "yes, I do"'),
        (f"{SOUND}\nThis page needs Javascript to be enabled.", SOUND),
        (f"{SOUND}\nThis page uses cookies for its visitors.", SOUND),
        (f"{SOUND}\nThis line has {'x' * 1001} in it.", SOUND),
        (f"{SOUND}\nThis line has a bracket {{ in it.", "c4.curly_bracket"),
        (f"{SOUND}\nA bracket {{ without a mark at the end", SOUND),
        (f"{SOUND}\nThe text lorem ipsum is no text.", "c4.lorem_ipsum"),
        (f"{SOUND}[1]\nAll four words count[citation needed].", f"{SOUND}"),
    ],
)
def test_the_preset_has_every_rule_of_the_papers_code(text, kept):
    rule, left = run(text, **vars(PRESETS["c4"].c4))
    assert (rule or left) == kept


def test_where_the_preset_and_the_papers_code_differ():
    """The differences that the docstring of c4.py names: c4_utils drops or cuts each of these."""
    for text in (
        f"{SOUND}\none two three four five. [3]",
        "\n".join([LINE] * 7_000),
        "He was seen by Dr. Smith.\nHe was seen there again.",
    ):
        rule, left = run(text, **vars(PRESETS["c4"].c4))
        assert not rule and left == text.removesuffix(" [3]")


def test_the_funnel_says_what_is_off(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("darn\n", encoding="utf-8")
    assert C4().ran == "all rules but terminal punctuation and bad words"
    assert C4(C4Rules(terminal_punctuation=True, bad_words=str(words))).ran == "all rules"
