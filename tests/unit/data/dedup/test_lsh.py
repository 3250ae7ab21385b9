import csv
import gzip
import json

import numpy as np

from ingot.data.dedup.lsh import near_duplicates
from ingot.data.dedup.minhash import DedupRules, jaccard, shingles, signature

RULES = DedupRules()


def find(texts, rules=RULES):
    sets = [np.unique(shingles(text, rules.ngram)) for text in texts]
    signatures = np.array([signature(s, rules.permutations) for s in sets]).reshape(-1, rules.permutations)
    return near_duplicates(signatures, sets.__getitem__, rules)


def words(seed, count=200):
    return [f"w{i}" for i in np.random.default_rng(seed).integers(0, 5000, count)]


def changed(text_words, *places):
    return " ".join("changed" if i in places else word for i, word in enumerate(text_words))


def test_nothing_and_one_document():
    assert find([]) == {}
    assert find(["one text"]) == {}


def test_the_first_of_a_cluster_stays():
    a, b = words(1), words(2)
    texts = [changed(b), changed(a), changed(a, 50), changed(b), changed(a)]
    found = find(texts)
    assert {i: d.kept for i, d in found.items()} == {2: 1, 3: 0, 4: 1}
    assert found[3].jaccard == 1.0
    assert 0.8 <= found[2].jaccard < 1


def test_a_pair_below_the_threshold_stays_even_if_a_band_agrees():
    a = words(3)
    texts = [changed(a), changed(a, *range(10, 200, 30))]
    similarity = jaccard(*(np.unique(shingles(t)) for t in texts))
    assert 0.6 < similarity < 0.8
    assert find(texts) == {}
    assert list(find(texts, DedupRules(jaccard=0.6, bands=32, rows=4))) == [1]


def test_few_permutations_only_nominate_and_never_veto():
    texts = [text for n in range(100) for text in (changed(words(n)), changed(words(n), 50, 150))]
    assert set(find(texts, DedupRules(jaccard=0.9, bands=8, rows=1))) == set(range(1, 200, 2))


def test_clusters_connect_through_the_middle():
    a = words(4)
    first, middle, last = changed(a), changed(a, 20, 35), changed(a, 20, 35, 60, 80, 100)
    assert find([first, last]) == {}
    assert {i: d.kept for i, d in find([first, last, middle]).items()} == {1: 0, 2: 0}


def test_many_copies_are_not_compared_with_each_other():
    asked = []
    text = np.unique(shingles(changed(words(5))))

    def shingle_set(number):
        asked.append(number)
        return text

    found = near_duplicates(np.array([signature(text)] * 3000), shingle_set, RULES)
    assert len(found) == 2999
    assert len(asked) <= 3000


def test_planted_pairs(test_data):
    with gzip.open(test_data / "dedup_docs.jsonl.gz") as file:
        documents = [json.loads(line) for line in file]
    number = {document["id"]: i for i, document in enumerate(documents)}
    with (test_data / "dedup_truth.csv").open() as file:
        truth = [(number[a], number[b], float(j)) for a, b, j in list(csv.reader(file))[1:]]
    found = find([document["text"] for document in documents])
    kept = [found[i].kept if i in found else i for i in range(len(documents))]
    similar = [kept[a] == kept[b] for a, b, j in truth if j >= 0.8]
    assert sum(similar) / len(similar) >= 0.98  # recall
    sets = {}
    for i, duplicate in found.items():  # precision is 1: every dropped document has a verified partner
        for j in (i, duplicate.like):
            sets[j] = sets.get(j) if j in sets else np.unique(shingles(documents[j]["text"]))
        assert jaccard(sets[i], sets[duplicate.like]) == duplicate.jaccard >= 0.8
