import gzip
import json
import subprocess
import sys

import pytest

from ingot import config
from ingot.data.filters import language
from ingot.data.filters.language import LANGUAGES, Language, LanguageRules, fingerprint, identify
from ingot.schema.corpus import Document

ENGLISH = "The library reads its data in small pieces, so that a common computer can work with large collections."
GERMAN = "Die Bibliothek liest ihre Daten in kleinen Stücken, damit ein gewöhnlicher Rechner große Sammlungen schafft."


def document(text):
    return Document(id="0", url="u", source="s", file="f", record_id="r", text=text)


def test_keeps_the_wanted_language_and_notes_the_score():
    page = document(ENGLISH)
    assert Language()(page) is None
    score = page.notes["language_score"]
    assert page.language == "en" and isinstance(score, float) and 0.65 <= score <= 1


def test_other_language_is_named_with_its_score():
    drop = Language()(document(GERMAN))
    assert drop and drop.rule == "language.other" and drop.value.startswith("de 0.9")
    assert Language(keep=("de", "en"))(document(GERMAN)) is None
    assert Language(keep=())(document(GERMAN)) is None


@pytest.mark.parametrize("text", ["", "\n\n", "…" * 50])
def test_no_language_at_all_is_unsure(text):
    drop = Language()(document(text))
    assert drop and drop.rule == "language.unsure"


def test_only_the_beginning_counts():
    assert identify(ENGLISH * 30 + "\n" + GERMAN * 500)[0] == "en"


def test_thresholds_of_single_languages():
    drop = Language(keep=("de",), threshold=0.65, thresholds={"de": 1.0})(document(GERMAN[:60]))
    assert drop and drop.rule == "language.unsure"
    assert Language(keep=("de",), threshold=1.0, thresholds={"de": 0.5})(document(GERMAN)) is None
    assert "threshold 0.65, de 0.5" in Language(thresholds={"de": 0.5}).ran


def test_more_is_read_where_the_first_characters_are_unclear():
    codes = "0x1f 42 kg; 7 m; #12-b / 3.14 = x * y ... " * 12  # says no language
    assert len(codes) > 500 and identify(codes)[1] < 0.95
    assert identify(codes + GERMAN * 20)[0] == "de"
    assert identify(codes + GERMAN * 20, sure=0.0) == identify(codes[:500])


def test_capitals_are_read():
    shouted = "BÜROS DER GEMEINDE SIND AM MONTAG GESCHLOSSEN. BITTE WENDEN SIE SICH AN DIE NÄCHSTE STELLE."
    assert identify(shouted) == identify(shouted.lower()) != language._predict(shouted)
    assert identify("КЪДЕТО РЕКАТА СЕ ВЛИВА В МОРЕТО, ДЕЦАТА ПЛУВАТ ПРЕЗ ЛЯТОТО ПОД СТАРИЯ МОСТ.")[0] == "bg"


def test_a_text_of_two_languages_gets_the_one_that_begins():
    """Documented: one label per document, of its beginning."""
    page = document(ENGLISH * 6 + "\n" + GERMAN * 6)
    assert Language()(page) is None and page.language == "en"


def test_few_words_are_told_badly_and_never_raise():
    for text in ("ok", "Login", "12345", "a", "\ud800", "日本", "\x00"):
        code, score = identify(text)
        assert (code in LANGUAGES or code == "") and 0 <= score <= 1


def test_codes_are_those_of_the_model():
    assert len(LANGUAGES) == 176
    for text in ("hello", "привет", "日本", "مرحبا", "नमस्ते"):
        labels, _ = language._model().predict(text, k=300)
        assert {label.removeprefix("__label__") for label in labels} <= LANGUAGES


def test_rules_are_checked():
    bad = LanguageRules(keep=("eng", "de"), threshold=2.0, thresholds={"fr": -1.0})
    assert [name for name, _ in bad.problems()] == ["threshold", "thresholds", "keep"]
    rules = config.load(LanguageRules, None, ["thresholds.de=0.8", 'keep=["de", "en"]'])
    assert rules.thresholds == {"de": 0.8} and rules.keep == ("de", "en") and not list(rules.problems())


def test_the_fingerprint_names_model_and_thresholds():
    one = fingerprint(LanguageRules())
    assert len(one["model"]) == 64 and json.loads(json.dumps(one)) == one
    assert fingerprint(LanguageRules(thresholds={"de": 0.8})) != one


def test_ran_says_what_decides():
    assert "lid.176.ftz (sha256 " in Language().ran and "0.65" in Language().ran and "keeps en" in Language().ran


def test_no_downloader_is_imported():
    """The model's package brings a downloader along; a stage that never needs the network does not load it."""
    code = "import sys; from ingot.data.filters.language import identify; identify('a')"
    code += "; print('robust_downloader' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_labelled_paragraphs(test_data):
    with gzip.open(test_data / "text" / "udhr_labelled.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rows = [row for row in rows if len(row["text"]) >= 200]
    wrong = [(row["lang"], identify(row["text"])) for row in rows if identify(row["text"])[0] != row["lang"]]
    assert len(rows) > 100 and len(wrong) <= 0.02 * len(rows), wrong[:5]


def test_the_short_look_decides_like_the_long_one(test_data):
    """On articles, books and labelled paragraphs: at most 1 in 200 may change label or side of the threshold."""
    texts = []
    for name in ("news", "wiki", "books", "udhr_labelled"):
        with gzip.open(test_data / "text" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            texts += [json.loads(line)["text"] for line in list(file)[:300]]
    long = [identify(text, sure=2.0) for text in texts]
    short = [identify(text) for text in texts]
    differ = [(a, b) for a, b in zip(short, long, strict=True) if (a[0], a[1] >= 0.65) != (b[0], b[1] >= 0.65)]
    assert len(differ) <= 0.005 * len(texts), differ
