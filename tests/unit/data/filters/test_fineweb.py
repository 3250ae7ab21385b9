import pytest

from ingot.data.filters.quality import FineWeb, FineWebRules
from ingot.schema.corpus import Document

LINES = [f"This is quite a good and long line, it has number {i}." for i in range(10)]


def rule_of(lines, **rules):
    document = Document(id="", url="", source="", file="", record_id="", text="\n".join(lines))
    drop = FineWeb(FineWebRules(**rules))(document)
    return drop.rule if drop else ""


def test_good_text_stays():
    assert rule_of(LINES) == ""


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ([""], "fineweb.empty"),
        ([line.rstrip(".") for line in LINES], "fineweb.terminal_punctuation"),
        ([*LINES, LINES[0]], "fineweb.duplicate_line_characters"),
        ([*LINES[:2], *(f"short {i}." for i in range(8))], "fineweb.short_lines"),
        ([line + "\n" * 8 for line in LINES], "fineweb.newline_ratio"),
    ],
)
def test_each_rule_names_what_it_drops(lines, rule):
    assert rule_of(lines) == rule


def test_the_papers_threshold_keeps_a_repeated_line():
    assert rule_of([*LINES, LINES[0]], duplicate_line_characters=0.1) == ""


def test_sentence_marks_of_other_scripts_count():
    assert rule_of([line.replace(".", "。") for line in LINES]) == ""


@pytest.mark.parametrize("mark", list("\"'”’»…"))
def test_closing_quotes_end_a_line_unless_they_may_not(mark):
    lines = [line.rstrip(".") + mark for line in LINES]
    assert rule_of(lines) == ""
    assert rule_of(lines, closing_quotes=False) == "fineweb.terminal_punctuation"
