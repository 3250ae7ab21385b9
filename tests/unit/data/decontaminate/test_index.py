import gzip
import json
import random
import time
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expect import refused

from ingot import config
from ingot.data.decontaminate import Decontaminate, DecontaminationRules, build_index, fingerprint
from ingot.data.decontaminate.index import read_items
from ingot.data.decontaminate.words import Bitmap, Words
from ingot.schema.corpus import Document

QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)
SHORT = "Which planet of the solar system has the most moons?"


def document(text):
    return Document(id="0", url="u", source="s", file="f", record_id="r", text=text)


def prose(seed, words=300):
    pick = random.Random(seed)
    return " ".join(f"{pick.getrandbits(pick.randint(8, 32)):x}g" for _ in range(words))


def stage(tmp_path, *items, **settings):
    path = tmp_path / "gsm_test.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    rules = DecontaminationRules(files=(str(path),), **settings)
    assert not list(rules.problems())
    build_index(rules, tmp_path / "index")
    return Decontaminate(rules, tmp_path / "index")


def test_a_copied_question_is_named(tmp_path):
    one = stage(tmp_path, {"question": prose(1)}, {"question": QUESTION, "answer": "72"})
    drop = one(document(prose(2) + "\n" + QUESTION + "\n" + prose(3)))
    assert drop and (drop.stage, drop.rule) == ("contaminated", "contaminated.ngram")
    assert drop.value == "gsm_test#2: 19 of 19 n-grams"
    assert one(document(prose(2))) is None
    assert "13-grams of gsm_test (2 items" in one.ran and "1 texts too short" in one.ran


def test_case_punctuation_and_whitespace_do_not_count(tmp_path):
    one = stage(tmp_path, {"q": QUESTION})
    disguised = QUESTION.upper().replace(" ", " \n ").replace(",", " -- ").replace("?", "!!")
    assert one(document(disguised))
    fullwidth_quotes = "\u201c" + QUESTION.replace(" ", "\u00a0") + "\u201d"
    assert one(document(fullwidth_quotes))


def test_fewer_words_than_an_n_gram_are_no_copy(tmp_path):
    one = stage(tmp_path, {"q": QUESTION})
    words = QUESTION.split()
    assert one(document("x " + " ".join(words[3:16]) + " y"))
    assert one(document("x " + " ".join(words[3:15]) + " y")) is None


def test_short_items_are_matched_as_a_whole_and_tiny_ones_never(tmp_path):
    one = stage(tmp_path, {"q": SHORT, "choices": ["Jupiter", "Saturn with its rings"]})
    assert one(document(f"{prose(1)} {SHORT} {prose(2)}"))
    assert one(document(f"{prose(1)} {SHORT.replace('moons', 'rings')} {prose(2)}")) is None
    assert one(document("Jupiter, Saturn with its rings")) is None


def test_numbers_and_repetition_are_no_questions(tmp_path):
    numbers = " ".join(map(str, range(40)))
    one = stage(tmp_path, {"q": numbers}, {"q": "la " * 40})
    assert one(document(numbers)) is None and one(document("la " * 50)) is None


def test_share_asks_for_a_part_of_the_item(tmp_path):
    long = prose(5, words=112)  # 100 n-grams
    half = " ".join(long.split()[:62])  # 50 of them
    assert stage(tmp_path, {"q": long}, share=0.5)(document(half))
    assert stage(tmp_path, {"q": long}, share=0.51)(document(half)) is None


def test_cutting_leaves_the_rest(tmp_path):
    one = stage(tmp_path, {"q": QUESTION}, action="cut", margin=20)
    page = document(prose(2) + "\n" + QUESTION + "\n" + prose(3))
    before = len(page.text)
    assert one(page) is None
    assert "Natalia" not in page.text
    assert page.text.startswith(prose(2)[:-40]) and page.text.endswith(prose(3)[40:])
    assert page.notes["contaminated"] == "gsm_test#1: 19 of 19 n-grams"
    assert page.notes["contaminated_cut"] == before - len(page.text) + 1  # a line feed stands for it
    assert one(document(QUESTION))  # nothing would be left
    assert one(document("\n".join(f"{prose(n, 20)} {QUESTION}" for n in range(12))))  # too many pieces


def test_an_n_gram_of_many_items_names_the_first(tmp_path):
    one = stage(tmp_path, *({"q": QUESTION, "n": str(n)} for n in range(50)))
    drop = one(document(QUESTION))
    assert drop and drop.value == "gsm_test#1: 19 of 19 n-grams"
    assert all(len(match.items) == 10 for match in one.matches(QUESTION))


@pytest.mark.parametrize(
    "text",
    [
        "自然语言处理是人工智能领域中的一个重要方向它研究能实现人与计算机之间有效通信的各种理论",
        "प्राकृतिक भाषा संसाधन कृत्रिम बुद्धि का वह क्षेत्र है जो मानव और मशीन की भाषा को समझने का काम करता है",
        "Обработка естественного языка это общее направление искусственного интеллекта и математической лингвистики",
        "𠀀𠀁𠀂𠀃𠀄𠀅𠀆𠀇𠀈𠀉𠀊𠀋𠀌𠀍𠀎",
    ],
)
def test_other_scripts(tmp_path, text):
    one = stage(tmp_path, {"q": text})
    assert one(document(f"{prose(1)} «{text}» {prose(2)}"))
    assert one(document(prose(1) + text[: len(text) // 4])) is None


def reference_words(text):
    """Return the same words as Words, one character at a time."""
    words, current = [], ""
    for char in text:
        code = ord(char)
        word = 0x20000 <= code < 0x40000 or (
            code < 0x20000 and (char.isalnum() or unicodedata.category(char)[0] == "M")
        )
        alone = word and (
            code >= 0x20000
            or any(a <= code < b for a, b in ((0x2E80, 0x2FE0), (0x3040, 0x3130), (0x31A0, 0x3200), (0x3400, 0x4DC0)))
            or any(a <= code < b for a, b in ((0x4E00, 0xA000), (0xF900, 0xFB00)))
        )
        if (alone or not word) and current:
            words.append(current)
            current = ""
        if alone:
            words.append(char)
        elif word:
            current += char.lower() if len(char.lower()) == 1 else char
    return words + [current] * bool(current)


@given(
    st.text(
        alphabet=st.one_of(st.characters(), st.sampled_from("abYZ İ'-\n日本語カ\u0301\ud800\U00020000")), max_size=60
    )
)
def test_words_equal_the_plain_reference(text):
    words = Words.of(text)
    assert words.strings() == reference_words(text)
    spans = zip(words.starts, words.ends, strict=True)
    assert [text[a:b].lower() for a, b in spans if text[a:b].isascii()] == [w for w in words.strings() if w.isascii()]
    assert words.strings(1, 3) == reference_words(text)[1:3]


@given(st.integers(1, 40), st.lists(st.integers(5, 13), min_size=1, max_size=3, unique=True))
def test_equal_windows_have_equal_shapes(offset, lengths):
    text = prose(1, words=30)
    alone = Words.of(text).shapes(lengths)
    inside = Words.of(prose(2, words=offset) + " " + text).shapes(lengths)
    for one, other in zip(alone, inside, strict=True):
        assert np.array_equal(one, other[offset:]) and len(np.unique(one)) == len(one)


def test_long_texts_are_taken_in_blocks():
    text = prose(3, words=40_000)
    thirteen, eight = Words.of(text).shapes([13, 8])
    assert (len(thirteen), len(eight)) == (40_000 - 12, 40_000 - 7)
    tail = Words.of(" ".join(text.split()[-100:])).shapes([13, 8])
    assert np.array_equal(thirteen[-88:], tail[0]) and np.array_equal(eight[-93:], tail[1])


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=200))
def test_the_bitmap_forgets_nothing(values):
    shapes = np.array(values, np.uint64)
    assert len(Bitmap.of(shapes).candidates(shapes)) == len(shapes)


@pytest.fixture(scope="module")
def one_item(tmp_path_factory):
    return stage(tmp_path_factory.mktemp("index"), {"q": prose(7, words=100)})


@given(st.integers(10, 10**6), st.integers(0, 60), st.integers(13, 40))  # 7 is the item itself
def test_every_planted_piece_is_found(one_item, seed, start, words):
    piece = " ".join(prose(7, words=100).split()[start : start + words])
    found = one_item.matches(f"{prose(seed, 20)} {piece} {prose(seed + 1, 20)}")
    assert len(found) >= words - 12 and found[0].first == 20 and {match.items for match in found} == {(0,)}


def test_formats_of_sets(tmp_path):
    rows = [{"q": "one", "meta": {"a": ["two"], "n": 3}}, {"q": "four", "meta": None}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    (tmp_path / "d.txt").write_text("one\ntwo\n\n \nfour\n")
    assert all(
        list(read_items(tmp_path / name)) == [["one", "two"], ["four"]] for name in ("a.jsonl", "b.json", "c.jsonl.gz")
    )
    assert list(read_items(tmp_path / "d.txt")) == [["one\ntwo"], ["four\n"]]
    assert list(read_items(tmp_path / "a.jsonl", ("meta",))) == [["two"], []]
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), tmp_path / "e.parquet")
    assert list(read_items(tmp_path / "e.parquet")) == [["one", "two"], ["four"]]


def test_bad_sets_and_indexes_are_refused(tmp_path):
    (tmp_path / "broken.jsonl").write_text("{}\n{")
    (tmp_path / "good.jsonl").write_text(json.dumps({"q": QUESTION}))
    good = str(tmp_path / "good.jsonl")
    with refused("E-EVALSET-UNREADABLE", path=str(tmp_path / "broken.jsonl")):
        build_index(DecontaminationRules(files=(str(tmp_path / "broken.jsonl"),)), tmp_path / "index")
    packed = bytearray(gzip.compress(json.dumps({"q": prose(1, 2000)}).encode()))
    packed[15:45] = bytes(30)
    (tmp_path / "torn.jsonl.gz").write_bytes(packed)
    with refused("E-EVALSET-UNREADABLE"):
        build_index(DecontaminationRules(files=(str(tmp_path / "torn.jsonl.gz"),)), tmp_path / "index")
    with refused("E-EVALSET-MISSING"):
        build_index(DecontaminationRules(files=(str(tmp_path / "none.jsonl"),)), tmp_path / "index")
    with refused("E-EVALSET-FIELDS", fields=["question"]):
        build_index(DecontaminationRules(files=(good,), fields=("question",)), tmp_path / "index")
    with refused("E-EVALINDEX-MISSING", index=str(tmp_path / "nothing")):
        Decontaminate(DecontaminationRules(), tmp_path / "nothing")
    build_index(DecontaminationRules(files=(good,)), tmp_path / "index")
    with refused("E-EVALINDEX-SETTINGS", key="ngram"):
        Decontaminate(DecontaminationRules(ngram=8), tmp_path / "index")
    bad = DecontaminationRules(ngram=2, min_words=9, share=2.0, margin=-1, files=("a.csv",))
    assert [field for field, _ in bad.problems()] == ["ngram", "min_words", "share", "margin", "files"]


def test_no_sets_find_nothing(tmp_path):
    rules = DecontaminationRules()
    assert build_index(rules, tmp_path) == {"items": 0, "ngrams": 0, "skipped": 0}
    one = Decontaminate(rules, tmp_path)
    assert one(document(QUESTION)) is None and "no evaluation sets" in one.ran


def test_the_fingerprint_follows_content_not_places(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "set.jsonl").write_text(json.dumps({"q": QUESTION}))
    one, other = (fingerprint(DecontaminationRules(files=(str(tmp_path / name / "set.jsonl"),))) for name in "ab")
    assert one == other and json.loads(json.dumps(one)) == one
    (tmp_path / "b" / "set.jsonl").write_text(json.dumps({"q": SHORT}))
    assert fingerprint(DecontaminationRules(files=(str(tmp_path / "b" / "set.jsonl"),))) != one


def test_settings_can_be_read_from_a_recipe():
    rules = config.load(DecontaminationRules, None, ['files=["a.jsonl"]', 'action="cut"', "share=0.5"])
    assert (rules.files, rules.action, rules.share) == (("a.jsonl",), "cut", 0.5)


def test_hostile_text_takes_linear_time(tmp_path):
    one = stage(tmp_path, {"q": QUESTION})
    for text in (QUESTION * 1500, "a " * 200_000, "日" * 200_000, "\U0010ffff" * 1000, ""):
        started = time.process_time()
        one(document(text))
        assert time.process_time() - started < 2
