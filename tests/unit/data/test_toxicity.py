import pytest

from ingot.data.toxicity import Toxicity, ToxicityRules, listed_words
from ingot.schema.document import Document


def run(text, stage=None):
    return (stage or Toxicity())(Document(id="", url="", source="", file="", record_id="", text=text))


def test_the_funnel_says_what_ran():
    assert Toxicity().ran == f"word list of {len(listed_words())} words; no classifier"
    assert Toxicity(words=["a", "B"], classifier=len).ran == "word list of 2 words; classifier builtins.len"


def test_the_list_is_lower_case_words():
    assert len(listed_words()) > 20
    assert all(word.isalpha() and word == word.lower() for word in listed_words())


def test_frequent_listed_words_drop_a_page():
    drop = run("You damned idiot, you bastard! " * 3)
    assert drop.rule == "toxicity.words"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The judge called it a damn shame. " + "Nothing else happened in court. " * 20,
        "Scunthorpe assessed the cockpit in Shitake " * 10,  # inside other words
        "damn idiot",  # fewer than min_words
    ],
)
def test_single_words_and_parts_of_words_do_not(text):
    assert run(text) is None


def test_case_and_punctuation_do_not_hide_words():
    assert run("DAMN! (Idiot) 'moron', crap.").rule == "toxicity.words"


def test_a_classifier_plugs_in():
    stage = Toxicity(ToxicityRules(classifier=0.5), classifier=lambda text: len(text) / 10)
    assert run("long text that scores", stage).rule == "toxicity.classifier"
    assert run("shor", stage) is None
