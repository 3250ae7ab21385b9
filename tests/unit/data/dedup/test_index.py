import json

import numpy as np
import pytest
from tests.expect import refused
from tests.unit.data.dedup.search import find_duplicates

from ingot.data.dedup.index import INDEX, Index, add_to_index
from ingot.data.dedup.minhash import DedupRules, shingle_set

from .conftest import changed, versions, words

RULES = DedupRules()


def documents(texts, start=0):
    return [(f"doc-{number}", shingle_set(text, RULES)) for number, text in enumerate(texts, start)]


@pytest.fixture
def texts():
    return [changed(words(n)) for n in range(10)]


@pytest.fixture
def index(tmp_path, texts):
    assert add_to_index(tmp_path / "index", RULES, documents(texts[:6])) == 6
    assert add_to_index(tmp_path / "index", RULES, documents(texts[6:], 6)) == 4
    return tmp_path / "index"


def test_an_index_grows_part_by_part(index, texts):
    opened = Index(index, RULES, verify=True)
    assert opened.documents == 10
    assert [folder.name for folder in opened.folders] == ["part-00000", "part-00001"]
    assert [opened.id_of(number) for number in (0, 5, 6, 9)] == ["doc-0", "doc-5", "doc-6", "doc-9"]
    for number, text in enumerate(texts):
        assert (opened.set_of(number) == shingle_set(text, RULES)).all()


def test_a_build_is_compared_with_the_index(index, tmp_path, write_folders):
    new = [changed(words(7), 30), changed(words(50)), changed(words(50), 3), changed(words(2))]
    opened = Index(index, RULES)
    (tmp_path / "work").mkdir()
    found = find_duplicates(
        write_folders(new, RULES, [1, 3]), lambda n: shingle_set(new[n], RULES), RULES, tmp_path / "work", index=opened
    )
    assert [(d, k) for d, k, _, _ in found.tolist()] == [(10, 7), (12, 11), (13, 2)]
    assert found["jaccard"][2] == 1


def test_in_two_builds_as_in_one(tmp_path, write_folders):
    # Without chains through dropped documents: every version is like every other of its text.
    texts = versions(15, 6, most=2)
    at_once, first, second = (tmp_path / name for name in ("at-once", "first", "second"))
    for folder in (at_once, first, second):
        folder.mkdir()
    expected = find_duplicates(write_folders(texts, RULES), lambda n: shingle_set(texts[n], RULES), RULES, at_once)
    old, new = texts[:50], texts[50:]
    dropped = find_duplicates(write_folders(old, RULES), lambda n: shingle_set(old[n], RULES), RULES, first)
    kept = [n for n in range(50) if n not in dropped["document"]]
    add_to_index(tmp_path / "index", RULES, ((str(n), shingle_set(old[n], RULES)) for n in kept))
    index = Index(tmp_path / "index", RULES)
    found = find_duplicates(write_folders(new, RULES), lambda n: shingle_set(new[n], RULES), RULES, second, index=index)
    later = [50 + int(n) - index.documents for n in found["document"]]
    assert [*dropped["document"].tolist(), *later] == expected["document"].tolist()


def test_other_shingles_or_bands_are_refused_but_not_another_threshold(index):
    assert Index(index, DedupRules(jaccard=0.9)).documents == 10
    with refused("E-DEDUP-RULES-DIFFER", settings=["ngram = 5, not 8", "rows = 8, not 4"]):
        Index(index, DedupRules(ngram=8, rows=4))
    with refused("E-DEDUP-RULES-DIFFER", settings=["bands = 16, not 4"]):
        add_to_index(index, DedupRules(bands=4), [])


def test_what_is_missing_or_damaged_is_said(index, tmp_path):
    with refused("E-INDEX-MISSING", index=str(tmp_path / "nothing")):
        Index(tmp_path / "nothing", RULES)
    sets = index / "part-00000" / "sets.npy"
    damaged = bytearray(sets.read_bytes())
    damaged[-1] ^= 1
    sets.write_bytes(damaged)
    Index(index, RULES)
    with refused("E-INDEX-DAMAGED", path=str(sets)):
        Index(index, RULES, verify=True)
    sets.unlink()
    with refused("E-INDEX-DAMAGED", path=str(sets)):
        Index(index, RULES)
    facts = json.loads((index / INDEX).read_text())
    (index / INDEX).write_text(json.dumps(facts | {"version": 2}))
    with refused("E-INDEX-VERSION", version=2):
        Index(index, RULES)


def test_a_part_that_was_not_finished_is_not_there(index, texts):
    def broken():
        yield from documents(texts[:2])
        raise RuntimeError

    with pytest.raises(RuntimeError):
        add_to_index(index, RULES, broken())
    assert Index(index, RULES).documents == 10
    assert add_to_index(index, RULES, documents(texts[:3])) == 3
    assert Index(index, RULES, verify=True).documents == 13
    with refused("E-INDEX-ID", id="a\nb"):
        add_to_index(index, RULES, [("a\nb", np.zeros(1, np.uint64))])
