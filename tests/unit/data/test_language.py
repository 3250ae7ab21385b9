import gzip
import json
import subprocess
import sys

import pytest

from ingot.data.language import Language, identify
from ingot.schema.document import Document

ENGLISH = "The library reads its data in small pieces, so that a common computer can work with large collections."
GERMAN = "Die Bibliothek liest ihre Daten in kleinen Stücken, damit ein gewöhnlicher Rechner große Sammlungen schafft."


def document(text):
    return Document(id="0", url="u", source="s", file="f", record_id="r", text=text)


def test_keeps_the_wanted_language_and_notes_the_score():
    page = document(ENGLISH)
    assert Language()(page) is None
    assert page.language == "en" and 0.65 <= page.notes["language_score"] <= 1


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


def test_ran_says_what_decides():
    assert "lid.176.ftz" in Language().ran and "0.65" in Language().ran and "keeps en" in Language().ran


def test_no_downloader_is_imported():
    """The model's package brings a downloader along; a stage that never needs the network does not load it."""
    code = (
        "import sys; from ingot.data.language import identify; identify('a'); print('robust_downloader' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_labelled_paragraphs(test_data):
    with gzip.open(test_data / "text" / "udhr_labelled.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rows = [row for row in rows if len(row["text"]) >= 200]
    wrong = [(row["lang"], identify(row["text"])) for row in rows if identify(row["text"])[0] != row["lang"]]
    assert len(rows) > 100 and len(wrong) <= 0.02 * len(rows), wrong[:5]
