import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expect import refused

from ingot.data.classify.model import write_model
from ingot.data.classify.train import ClassifierSettings, Labelled, train
from ingot.data.filters.toxicity import Toxicity, ToxicityRules, fingerprint, listed_words
from ingot.schema.corpus import Document


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


_WORDS = ("damn", "fuck", "fucking", "ass", "b", "größe", "schei\u00dfe", "ab-c", "x1")
_PIECES = st.sampled_from(
    [*_WORDS, "DAMN", "GRÖSSE", "é", "\u0130", "\ud800", "1", "_", " ", "\n", "\u201c", "-", "c", ""]
)


@given(st.lists(_PIECES | st.text(max_size=4), max_size=30).map("".join))
def test_what_is_counted_is_what_splitting_finds(text):
    stage = Toxicity(ToxicityRules(words=1e-9, min_words=1), words=_WORDS)
    words = re.findall(r"[^\W\d_]+", text.lower())
    hits = sum(word in _WORDS for word in words)
    drop = run(text, stage)
    assert (drop and drop.value) == (f"{hits / len(words):.3f} >= 1e-09" if hits else None)


def test_a_classifier_plugs_in():
    stage = Toxicity(ToxicityRules(classifier=0.5), classifier=lambda text: len(text) / 10)
    assert run("long text that scores", stage).rule == "toxicity.classifier"
    assert run("shor", stage) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A classifier that knows two words."""
    pytest.importorskip("fasttext")
    path = tmp_path_factory.mktemp("model") / "toxic.bin"
    examples = [Labelled("awful hateful rant", ("positive",)), Labelled("kind gentle talk", ("negative",))] * 30
    write_model(path, train(examples, ClassifierSettings(dim=4, buckets=64, min_count=1, batch=4, rate=0.5)))
    return path


def document(text):
    return Document(id="", url="", source="", file="", record_id="", text=text)


def test_a_model_file_does_it(model):
    stage = Toxicity(ToxicityRules(model=str(model)))
    bad, good = document("hateful rant"), document("gentle talk")
    drop = stage(bad)
    assert drop is not None and drop.rule == "toxicity.classifier" and drop.value.endswith(">= 0.8")
    assert stage(good) is None and 0 <= good.notes["toxicity"] < 0.2 < 0.8 <= bad.notes["toxicity"]
    assert stage.ran.endswith(f"; classifier toxic.bin ({fingerprint(stage.rules)[:12]}), positive from 0.8 on")
    assert pickle.loads(pickle.dumps(stage))(document("hateful rant")) == drop


def test_the_word_list_needs_no_model_and_leaves_no_score():
    one = document("gentle talk")
    assert Toxicity()(one) is None and "toxicity" not in one.notes
    assert fingerprint(ToxicityRules()) == "" == fingerprint(ToxicityRules(enabled=False, model="missing.bin"))


def test_a_model_that_is_missing_or_lacks_the_label_is_said(model, tmp_path):
    with refused("E-CLASSIFIER-MISSING", path=str(tmp_path / "none.bin")):
        Toxicity(ToxicityRules(model=str(tmp_path / "none.bin")))
    with refused("E-CLASSIFIER-LABEL", label="toxic"):
        Toxicity(ToxicityRules(model=str(model), label="toxic"))(document("x"))
